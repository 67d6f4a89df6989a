// The CUDA backend: says what it serves, checks what only its kernels mind, lays out the workspace and launches.
// Nothing here allocates on the device, synchronises or reads device memory, so every call can be captured in a graph.
#include <cuda_runtime_api.h>

#include <cmath>
#include <limits>
#include <string>

#include "common/validate.h"
#include "cuda/device_state.h"
#include "cuda/kernels.h"
#include "cuda/recurrent.h"
#include "cuda/sm90a/scan.h"
#include "cuda/workspace.h"

namespace rewy {
namespace {

using namespace cuda;

constexpr std::int64_t kMostWidth = 256;
constexpr std::int64_t kWidthStep = 8;  // 16 bytes of 16-bit elements: what one cp.async copies
constexpr std::size_t kRowAlign = 16;   // bytes, for the same reason

bool is_width(std::int64_t n) {
  return n % kWidthStep == 0 && n >= kWidthStep && n <= kMostWidth;
}

bool is_half(DType t) {
  return t == DType::kBF16 || t == DType::kF16;
}

/// Tokens, sequences and chunks are counted in 32 bits, in chunk tables and grids. A scan has up to 32 blocks a
/// sequence and head: 16 columns each, in two directions.
bool counts_fit(const Problem& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const auto product_fits = [](std::int64_t a, std::int64_t b, std::int64_t most) {
    std::int64_t product = 0;
    return !__builtin_mul_overflow(a, b, &product) && product <= most;
  };
  return p.T <= kMost && p.HV <= kMost && product_fits(p.sequences(), p.HV, kMost / 32) &&
         product_fits(most_chunks(p), p.HV, kMost);
}

Kind kind_of(const Problem& p) {
  return {p.op, p.dtype};
}

/// What the kernels of chunks decline, on any device.
std::string declines_chunks(const Problem& p) {
  if (!is_half(p.dtype)) return "dtype " + std::string(name(p.dtype)) + " is neither bf16 nor f16";
  if (strength_of(p.op) == Strength::kIndependent && p.strength_dtype != p.dtype) {
    return "strength_dtype " + std::string(name(p.strength_dtype)) + " is not dtype " + std::string(name(p.dtype)) +
           ": b and w have the type of q";
  }
  if (!is_width(p.K)) return "K = " + std::to_string(p.K) + " is not a multiple of 8 from 8 to 256";
  if (!is_width(p.V)) return "V = " + std::to_string(p.V) + " is not a multiple of 8 from 8 to 256";
  if (p.variant != Variant{}) return "the choice of a derivative graph is the CPU backend's";
  if (!std::isfinite(static_cast<float>(p.query_scale()))) return "scale is beyond the range of FP32";
  if (!counts_fit(p)) return "T or chunks * HV reaches 2^31, or sequences * HV 2^26";
  return {};
}

/// What does not depend on the device comes first, so that it is answered without one.
std::string declines_cuda(const Problem& p, Direction direction, const Execution& execution) {
  const bool tokens = execution.schedule == Schedule::kTokens;
  if (std::string reason = tokens_decline(p, direction, execution); !reason.empty()) return reason;
  if (std::string reason = tokens ? recurrent_declines(p) : declines_chunks(p); !reason.empty()) return reason;
  if (const std::string problem = device_declines(execution.device.index); !problem.empty()) return problem;
  if (tokens) return {};  // no shared memory
  const DeviceLimits limits = device_limits(execution.device.index).limits;
  const std::string device = "device " + std::to_string(limits.index);
  const auto lacks = [&](int need) { return need > limits.shared_bytes_per_block; };
  const auto memory = [&](int need, const std::string& what) {
    return device + " has " + std::to_string(limits.shared_bytes_per_block) + " bytes of shared memory a block, " +
           what + " needs " + std::to_string(need);
  };
  if (const int need = scan_shared_bytes(kind_of(p), p.K); lacks(need)) {
    return memory(need, "K = " + std::to_string(p.K));
  }
  const std::int64_t group = p.HV / p.H;
  if (const int need = pullback_shared_bytes(kind_of(p), group); direction == Direction::kBackward && lacks(need)) {
    return memory(need, "the backward of " + std::string(name(p.op)) + (group > 1 ? " with grouped heads" : ""));
  }
  return {};
}

Bytes bytes_cuda(const Problem& p, Direction direction, const Execution& execution) {
  if (execution.schedule == Schedule::kTokens) return {};
  Params nowhere{};
  Arena kept;
  lay_out_saved(p, kept, nowhere);
  const auto workspace = [&](Given given) {
    Arena arena;
    lay_out_workspace(p, direction, given, arena, nowhere);
    return arena.used();
  };
  const std::size_t least = workspace({.saved = true, .dg = true});
  return {.workspace = least,
          .saved = kept.used(),
          .unsaved = workspace({.saved = false, .dg = true}) - least,
          .without_dg = workspace({.saved = true, .dg = false}) - least};
}

/// Turns a call's views into Params, and refuses the strides that the kernels cannot read or write.
class Views {
 public:
  Views(const Problem& p, Direction direction) : p_(p), operation_(operation(p, direction)) {}

  /// [B, T, heads, width]: copied 16 bytes at a time.
  Rows rows(const TensorView& t, const char* argument) const {
    if (!t.given() || t.elements() == 0) return plain(t);
    const auto refuse = [&](const std::string& actual) {
      throw Error(operation_, argument, "last axis contiguous, rows 16-byte aligned", actual);
    };
    const auto size = static_cast<std::int64_t>(size_of(t.dtype));
    bool fits = t.strides[3] == 1;
    for (int a = 0; a < 3; ++a) {
      fits = fits && (t.shape[a] == 1 || t.strides[a] % (static_cast<std::int64_t>(kRowAlign) / size) == 0);
    }
    if (!fits) {
      refuse("strides " + shape_text({t.strides.data(), 4}) + " of " + std::string(name(t.dtype)));
    }
    if (const auto past = reinterpret_cast<std::uintptr_t>(t.data) % kRowAlign; past != 0) {
      refuse("an address " + std::to_string(past) + " bytes past it");
    }
    return plain(t);
  }

  /// [B, T, heads]: element by element, any strides.
  Rows scalars(const TensorView& t) const { return plain(t); }

  Rows gate(const TensorView& t, const char* argument) const {
    return gate_of(p_.op) == Gate::kVector ? rows(t, argument) : scalars(t);
  }

  States states(const TensorView& t) const { return states_of(t, p_.state_layout); }

  Params params(const Inputs& in) const {
    Params at{};
    at.B = p_.B;
    at.T = p_.T;
    at.sequences = p_.sequences();
    at.chunks = most_chunks(p_);
    at.H = static_cast<std::int32_t>(p_.H);
    at.HV = static_cast<std::int32_t>(p_.HV);
    at.K = static_cast<std::int32_t>(p_.K);
    at.V = static_cast<std::int32_t>(p_.V);
    at.scale = at.scale_power = static_cast<float>(p_.query_scale());
    at.scale_rest = 1.0f;
    if (at.scale != 0.0f) {
      int exponent = 0;
      at.scale_rest = 2.0f * std::frexp(std::fabs(at.scale), &exponent);  // in [1, 2)
      at.scale_power = at.scale / at.scale_rest;
    }
    at.strength_dtype = p_.strength_dtype;
    if (p_.segments) {
      at.cu_seqlens = in.cu_seqlens.data;
      at.offset_stride = in.cu_seqlens.strides[0];
      at.offsets_are_i64 = in.cu_seqlens.dtype == DType::kI64;
    }
    at.q = rows(in.q, "q");
    at.k = rows(in.k, "k");
    at.v = rows(in.v, "v");
    at.g = gate(in.g, "g");
    at.beta = scalars(in.beta);
    at.b = rows(in.b, "b");
    at.w = rows(in.w, "w");
    at.initial_state = states(in.initial_state);
    return at;
  }

 private:
  /// An axis of one element is never stepped along: its stride may be anything, and is 0 to the kernels.
  Rows plain(const TensorView& t) const {
    if (!t.given()) return {};
    const auto stride = [&](int axis) { return t.shape[axis] == 1 ? 0 : t.strides[axis]; };
    return {t.data, stride(0), stride(1), stride(2)};
  }

  const Problem& p_;
  std::string operation_;
};

/// Where a call runs, and which launches have anything to do. Sequences without tokens still pass their states on, so
/// scans run wherever there are sequences; without chunks there are no other kernels.
struct Launches {
  Launches(const Problem& p, const Execution& execution)
      : kind(kind_of(p)),
        device(execution.device.index),
        limits(restricted(device_limits(execution.device.index).limits, execution.architecture)),
        stream(static_cast<cudaStream_t>(execution.stream)),
        packed(p.segments.has_value()),
        sequences(p.sequences() > 0),
        chunks(most_chunks(p) > 0 && sequences),
        tokens(p.T > 0) {}

  Kind kind;
  CurrentDevice device;
  DeviceLimits limits;
  cudaStream_t stream;
  bool packed, sequences, chunks, tokens;
};

void forward_cuda(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  if (execution.schedule == Schedule::kTokens) return forward_recurrent(p, args, execution);
  const Views views(p, Direction::kForward);
  Params params = views.params(args.in);
  params.o = views.rows(args.o, "o");
  params.final_state = views.states(args.final_state);
  const bool saved = !args.saved.empty();
  if (saved) {
    Arena kept(args.saved);
    lay_out_saved(p, kept, params);
  }
  Arena arena(execution.workspace);
  lay_out_workspace(p, Direction::kForward, {.saved = saved, .dg = false}, arena, params);

  const Launches on(p, execution);
  if (on.packed) launch_chunk_table(params, on.stream);
  if (on.chunks) launch_operands(params, on.kind, on.stream);
  if (on.chunks) launch_prepare(params, on.kind, on.limits, on.stream);
  if (on.sequences) launch_scan_output(params, on.kind, on.limits, on.stream);
  if (on.packed && on.tokens) launch_zero_tail(params, on.kind, on.stream);
}

void backward_cuda(const Problem& p, const BackwardArgs& args, const Execution& execution) {
  const Views views(p, Direction::kBackward);
  Params params = views.params(args.in);
  params.d_o = views.rows(args.d_o, "d_o");
  params.d_final_state = views.states(args.d_final_state);
  params.dq = views.rows(args.dq, "dq");
  params.dk = views.rows(args.dk, "dk");
  params.dv = views.rows(args.dv, "dv");
  params.dg = views.gate(args.dg, "dg");
  params.dbeta = views.scalars(args.dbeta);
  params.db = views.rows(args.db, "db");
  params.dw = views.rows(args.dw, "dw");
  params.d_initial_state = views.states(args.d_initial_state);
  const bool saved = !args.saved.empty();
  if (saved) {
    // Only read: prepare is not launched, nor the scan of saved states.
    Arena kept(std::span(const_cast<std::byte*>(args.saved.data()), args.saved.size()));
    lay_out_saved(p, kept, params);
  }
  Arena arena(execution.workspace);
  const bool dg = args.dg.given();
  lay_out_workspace(p, Direction::kBackward, {.saved = saved, .dg = dg}, arena, params);
  if (dg && gate_of(p.op) == Gate::kVector) lay_out_in_dg(p, params);
  const bool states_saved = saved && p.policy == Policy::kSave;

  const Launches on(p, execution);
  if (on.packed) launch_chunk_table(params, on.stream);
  if (on.chunks) launch_operands(params, on.kind, on.stream);
  if (on.chunks && !saved) launch_prepare(params, on.kind, on.limits, on.stream);
  if (on.sequences) launch_scan_both(params, on.kind, on.limits, states_saved, on.stream);
  if (on.chunks) launch_pullback(params, on.kind, on.limits, on.stream);
  if (on.packed && on.tokens) launch_zero_tail(params, on.kind, on.stream);
}

std::string kernels_cuda(const Problem& p, Direction direction, const Execution& execution) {
  if (execution.schedule == Schedule::kTokens) return "token by token";
  const DeviceLimits limits = restricted(device_limits(execution.device.index).limits, execution.architecture);
  const bool warpgroups = sm90a::scans_serve(Views(p, direction).params({}), limits);
  return warpgroups ? "scans with warpgroup products of sm_90a, portable ones for strides that are not positive"
                    : "portable scans";
}

void check_inputs_cuda(const Problem& p, Direction direction, const Inputs& in, const Execution& execution) {
  if (execution.schedule == Schedule::kChunks) static_cast<void>(Views(p, direction).params(in));
}

}  // namespace

const BackendEntry kCudaBackend{Backend::kCuda, DeviceKind::kCuda, declines_cuda, bytes_cuda,
                                forward_cuda,   backward_cuda,     kernels_cuda,  check_inputs_cuda};

}  // namespace rewy
