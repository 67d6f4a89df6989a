// The CUDA backend's activations, host side: what they serve, the workspace, one launch over all parts and one for the
// sums (docs/kernels/activation.md).
#include "cuda/activation.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <string>

#include "common/activation.h"
#include "common/arena.h"
#include "cuda/device_state.h"

namespace rewy {
namespace {

using namespace cuda;

static_assert(kActivationTokens == kTokenTile);
constexpr std::int64_t kMostCount = std::numeric_limits<std::int32_t>::max();
constexpr int kThreadFeatures = 8;   // a thread's: 16 bytes of 16-bit elements
constexpr std::int64_t kPiece = 16;  // bytes

/// Heads that are the features of a [B, T, heads] tensor come in runs.
std::int64_t runs_of(std::int64_t heads) {
  return (heads + kActivationWidth - 1) / kActivationWidth;
}

/// Blocks of all parts, which the grid counts in 31 bits; more than that where the product overflows.
std::int64_t most_blocks(const Activation& a) {
  std::int64_t groups = a.normalise ? 2 * a.H : 0, blocks = 0;
  if (a.gate != Gate::kNone) groups += a.gate == Gate::kVector ? a.HV : runs_of(a.HV);
  if (a.strength) groups += runs_of(a.HV);
  return __builtin_mul_overflow(a.B * token_tiles(a), groups, &blocks) ? kMostCount + 1 : blocks;
}

/// What does not depend on the device comes first, so that it is answered without one.
std::string declines_cuda(const Activation& a, Direction, const Execution& execution) {
  const auto fp64 = [](bool there, const char* what, DType t) {
    return there && t == DType::kF64 ? std::string(what) + " f64 is the reference's" : std::string();
  };
  for (const std::string& reason :
       {fp64(a.normalise, "dtype", a.dtype), fp64(a.gate != Gate::kNone, "gate_dtype", a.gate_dtype),
        fp64(a.strength, "strength_dtype", a.strength_dtype)}) {
    if (!reason.empty()) return reason;
  }
  const bool wide = a.normalise || a.gate == Gate::kVector;
  if (wide && (a.K % kThreadFeatures != 0 || a.K > kActivationWidth)) {
    return "K = " + std::to_string(a.K) + " is not a multiple of 8 from 8 to 256";
  }
  if (a.T > kMostCount || std::max(a.H, a.HV) * std::max<std::int64_t>(a.K, 1) > kMostCount ||
      most_blocks(a) > kMostCount) {
    return "T, heads * K or B * heads * T / 64 reaches 2^31";
  }
  if (!bound_fits_fp32(a)) return "lower_bound is beyond the range of FP32";
  return device_declines(execution.device.index);
}

/// Where the sums of the tiles lie; on an empty arena it measures.
void lay_out(const Activation& a, Arena& arena, ActivationParams& at) {
  at.slots = a.B * token_tiles(a);
  at.bias_width = static_cast<std::int32_t>(gate_width(a));
  at.rate_width = static_cast<std::int32_t>(a.HV);
  at.bias_sums = arena.take<float>(at.slots * at.bias_width);
  at.rate_sums = arena.take<float>(at.slots * at.rate_width);
}

std::size_t bytes_cuda(const Activation& a, Direction direction, const Execution&) {
  if (direction == Direction::kForward || a.gate == Gate::kNone) return 0;
  ActivationParams nowhere{};
  Arena arena;
  lay_out(a, arena, nowhere);
  return arena.used();
}

/// [B, T, heads] is read as runs of 256 heads.
Elements elements(const TensorView& t) {
  if (!t.given()) return {};
  if (t.rank == 4) return {t.data, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  return {t.data, t.strides[0], t.strides[1], kActivationWidth * t.strides[2], t.strides[2]};
}

/// A [B, T, H] tensor that goes with [B, T, H, K]: its heads are groups.
Elements of_rows(const TensorView& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.strides[1], t.strides[2], 0};
}

/// Whether every eight features of a row are whole 16-byte pieces.
bool is_whole(const TensorView& t) {
  return cuda::is_whole(t, kPiece / static_cast<std::int64_t>(size_of(t.dtype)), kThreadFeatures);
}

/// Collects the parts of a call in the order of their blocks.
class Parts {
 public:
  Parts(const Activation& a, ActivationParams& at) : a_(a), at_(at) {
    at.T = a.T;
    at.tiles = static_cast<std::uint32_t>(token_tiles(a));
    at.vector_gate = a.gate == Gate::kVector;
    at.bounded = a.lower_bound.has_value();
    at.lower_bound = static_cast<float>(a.lower_bound.value_or(0));
    at.strength_factor = a.allow_negative_eigenvalues ? 2.0f : 1.0f;
  }

  /// `result` is the result's gradient in a backward, where d_raw may be missing if only sums are asked for.
  ActivationPart& add(PartKind kind, const TensorView& raw, const TensorView& result, const TensorView& d_raw = {}) {
    ActivationPart& part = at_.parts[count_++];
    const bool heads_are_groups = raw.rank == 4;
    part.kind = kind;
    part.whole = is_whole(raw) && is_whole(result) && is_whole(d_raw);
    part.raw_dtype = raw.dtype;
    part.result_dtype = result.dtype;
    part.groups = static_cast<std::uint32_t>(heads_are_groups ? raw.shape[2] : runs_of(raw.shape[2]));
    part.features = static_cast<std::int32_t>(heads_are_groups ? raw.shape[2] * raw.shape[3] : raw.shape[2]);
    part.run = heads_are_groups ? static_cast<std::int32_t>(raw.shape[3]) : kActivationWidth;
    const auto threads =
        static_cast<unsigned>((std::min(part.run, part.features) + kThreadFeatures - 1) / kThreadFeatures);
    part.lane_bits = std::bit_width(threads - 1);
    part.raw = elements(raw);
    part.result = elements(result);
    part.d_raw = elements(d_raw);
    blocks_ += static_cast<std::uint32_t>(a_.B) * at_.tiles * part.groups;
    for (int i = count_ - 1; i < kMostParts; ++i) at_.parts[i].end = blocks_;
    return part;
  }

  std::uint32_t blocks() const { return blocks_; }

 private:
  const Activation& a_;
  ActivationParams& at_;
  int count_ = 0;
  std::uint32_t blocks_ = 0;
};

Vector1 vector1(const TensorView& t) {
  if (!t.given()) return {};
  return {static_cast<float*>(t.data), t.strides[0]};
}

void forward_cuda(const Activation& a, const ActivateArgs& args, const Execution& execution) {
  ActivationParams at{};
  Parts parts(a, at);
  if (a.normalise) {
    parts.add(PartKind::kNormalise, args.in.raw_q, args.q).rstd = of_rows(args.q_rstd);
    parts.add(PartKind::kNormalise, args.in.raw_k, args.k).rstd = of_rows(args.k_rstd);
  }
  if (a.gate != Gate::kNone) parts.add(PartKind::kGate, args.in.raw_g, args.g);
  if (a.strength) parts.add(PartKind::kStrength, args.in.raw_beta, args.beta);
  at.A_log = vector1(args.in.A_log);
  at.dt_bias = vector1(args.in.dt_bias);
  const CurrentDevice device(execution.device.index);
  launch_activation(at, Direction::kForward, parts.blocks(), static_cast<cudaStream_t>(execution.stream));
}

void backward_cuda(const Activation& a, const ActivateBackwardArgs& args, const Execution& execution) {
  ActivationParams at{};
  Parts parts(a, at);
  const auto normalise = [&](const TensorView& raw, const TensorView& d_result, const TensorView& d_raw,
                             const TensorView& rstd) {
    if (d_raw.given()) parts.add(PartKind::kNormalise, raw, d_result, d_raw).rstd = of_rows(rstd);
  };
  const bool sums = args.d_A_log.given() || args.d_dt_bias.given();
  normalise(args.in.raw_q, args.dq, args.d_raw_q, args.q_rstd);
  normalise(args.in.raw_k, args.dk, args.d_raw_k, args.k_rstd);
  if (args.d_raw_g.given() || sums) parts.add(PartKind::kGate, args.in.raw_g, args.dg, args.d_raw_g);
  if (args.d_raw_beta.given()) parts.add(PartKind::kStrength, args.in.raw_beta, args.dbeta, args.d_raw_beta);
  at.A_log = vector1(args.in.A_log);
  at.dt_bias = vector1(args.in.dt_bias);
  at.d_A_log = vector1(args.d_A_log);
  at.d_dt_bias = vector1(args.d_dt_bias);
  if (sums) {
    Arena arena(execution.workspace);
    lay_out(a, arena, at);
  }
  const CurrentDevice device(execution.device.index);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  launch_activation(at, Direction::kBackward, parts.blocks(), stream);
  if (sums) launch_activation_sums(at, stream);
}

}  // namespace

const ActivationEntry kCudaActivation{Backend::kCuda, DeviceKind::kCuda, declines_cuda,
                                      bytes_cuda,     forward_cuda,      backward_cuda};

}  // namespace rewy
