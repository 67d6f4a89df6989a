// A forward token by token on a GPU, host side: what is served, and the launch. Nothing is refused for its strides.
#include "cuda/recurrent.h"

#include <cmath>
#include <limits>

#include "cuda/device_state.h"

namespace rewy::cuda {
namespace {

constexpr std::int64_t kFour = 4;  // neighbouring elements: what a lane has of a row

/// Of [B, T, heads] there is no feature axis.
Elements elements_of(const TensorView& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.strides[1], t.strides[2], t.rank == 4 ? t.strides[3] : 0};
}

/// Scalars have no rows.
bool rows_in_fours(const TensorView& t) {
  return t.rank != 4 || is_whole(t, kFour, kFour);
}

StateAccess access_of(const TensorView& t, StateLayout layout) {
  if (!is_whole(t, kFour, kFour)) return StateAccess::kElements;
  return layout == StateLayout::kKV ? StateAccess::kValues : StateAccess::kKeys;
}

}  // namespace

std::string recurrent_declines(const Problem& p) {
  if (p.dtype == DType::kF64) return "dtype f64 is the reference's (this one computes in FP32)";
  if (p.K > kMostTokenFeatures) return "K = " + std::to_string(p.K) + " is above 256";
  if (!std::isfinite(static_cast<float>(p.query_scale()))) return "scale is beyond the range of FP32";
  // A warp for every four columns at least: counted in 31 bits.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t warps = 0;
  if (__builtin_mul_overflow(p.sequences(), p.HV, &warps) ||
      __builtin_mul_overflow(warps, (p.V + kFour - 1) / kFour, &warps) || warps > kMost || p.HV > kMost) {
    return "sequences * HV * V / 4 reaches 2^31";
  }
  return {};
}

void forward_recurrent(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  const Inputs& in = args.in;
  RecurrentParams at;
  at.T = p.T;
  at.sequences = static_cast<std::int32_t>(p.sequences());
  at.H = static_cast<std::int32_t>(p.H);
  at.HV = static_cast<std::int32_t>(p.HV);
  at.K = static_cast<std::int32_t>(p.K);
  at.V = static_cast<std::int32_t>(p.V);
  at.scale = static_cast<float>(p.query_scale());
  at.strength_dtype = p.strength_dtype;
  at.whole = true;
  for (const TensorView* t : {&in.q, &in.k, &in.v, &in.g, &in.b, &in.w, &args.o}) {
    at.whole = at.whole && rows_in_fours(*t);
  }
  if (p.segments) {
    at.cu_seqlens = in.cu_seqlens.data;
    at.offset_stride = in.cu_seqlens.strides[0];
    at.offsets_are_i64 = in.cu_seqlens.dtype == DType::kI64;
  }
  at.q = elements_of(in.q);
  at.k = elements_of(in.k);
  at.v = elements_of(in.v);
  at.o = elements_of(args.o);
  at.g = elements_of(in.g);
  at.beta = elements_of(in.beta);
  at.b = elements_of(in.b);
  at.w = elements_of(in.w);
  at.initial_state = states_of(in.initial_state, p.state_layout);
  at.final_state = states_of(args.final_state, p.state_layout);
  at.initial_access = access_of(in.initial_state, p.state_layout);
  at.final_access = access_of(args.final_state, p.state_layout);

  const CurrentDevice device(execution.device.index);
  launch_recurrent(at, {p.op, p.dtype}, device_limits(execution.device.index).limits,
                   static_cast<cudaStream_t>(execution.stream));
}

}  // namespace rewy::cuda
