// The public interface: describe a Problem once, ask for its bytes, then call forward and backward.
//
//   rewy::Problem p{.op = rewy::Operator::kKda, .T = 2048, .H = 4, .HV = 4, .K = 128, .V = 128};
//   rewy::Bytes bytes = rewy::workspace_bytes(p, rewy::Direction::kForward, execution);
//
// Nothing here allocates memory that outlives a call, synchronises a device or ends the process. Wrong arguments throw
// rewy::Error before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rewy/error.h"
#include "rewy/tensor_view.h"
#include "rewy/types.h"
#include "rewy/version.h"

namespace rewy {

/// One operator call without its data. Widths K and V are arbitrary on the CPU (README, support table).
struct Problem {
  Operator op = Operator::kKda;
  std::int64_t B = 1;   ///< batch; 1 when packed
  std::int64_t T = 0;   ///< tokens; when packed, rows of the packed tensors
  std::int64_t H = 1;   ///< query/key heads
  std::int64_t HV = 1;  ///< value heads, a multiple of H; value head hv reads query/key head hv / (HV / H)
  std::int64_t K = 0;   ///< key width
  std::int64_t V = 0;   ///< value width

  /// Packed sequences: the number N of segments, which cu_seqlens (N+1 offsets) delimits. Not set: B sequences of T.
  std::optional<std::int64_t> segments{};

  DType dtype = DType::kF32;           ///< q k v do, and o dq dk dv
  DType strength_dtype = DType::kF32;  ///< beta, or b and w, and their gradients
  StateLayout state_layout = StateLayout::kKV;
  Policy policy = Policy::kRecompute;
  Variant variant{};

  /// Factor on the queries; not set: K^-0.5. Applied in FP32 (FP64 in the reference).
  std::optional<double> scale{};

  /// Number of states: segments when packed, else B.
  std::int64_t sequences() const { return segments ? *segments : B; }
  double query_scale() const;
  bool operator==(const Problem&) const = default;
};

/// What both directions read. Optional ones are left default-constructed.
/// The CPU honours any strides, CUDA those of the README's table; the gate and both states are FP32 (FP64 too where
/// dtype is FP64). inf and NaN are not looked for. No output may share memory with another argument, nor with itself:
/// refused wherever the extents of two contiguous arguments overlap; slices interleaved in one packed buffer are
/// accepted, and theirs is the caller's duty.
struct Inputs {
  TensorView q{};     ///< [B, T, H, K]   dtype
  TensorView k{};     ///< [B, T, H, K]   dtype; needs beta * k.k <= 2, so keys are normalised as a rule
  TensorView v{};     ///< [B, T, HV, V]  dtype
  TensorView g{};     ///< [B, T, HV] (gdn) or [B, T, HV, K] (kda, gdn2): natural log of the decay, g <= 0, -inf resets
  TensorView beta{};  ///< [B, T, HV]     strength_dtype, in [0, 2]      (deltanet, gdn, kda)
  TensorView b{};     ///< [B, T, HV, K]  strength_dtype, erase strength (gdn2)
  TensorView w{};     ///< [B, T, HV, V]  strength_dtype, write strength (gdn2)
  TensorView initial_state{};  ///< [N, HV, K, V], or [N, HV, V, K] with StateLayout::kVK; optional, zero if not given
  TensorView cu_seqlens{};     ///< [N + 1] int32 or int64: 0 = c_0 <= c_1 <= ... <= c_N <= T; only when packed
};

/// o_i = S_i^T q_i with S_i = diag(exp g_i) S_{i-1} + k_i r_i^T  (docs/math.md, section 1).
/// Rows of o after the last offset of a packed call are zero.
struct ForwardArgs {
  Inputs in{};
  TensorView o{};            ///< [B, T, HV, V]  dtype
  TensorView final_state{};  ///< like initial_state; optional. An empty segment passes its initial state through.
  /// What the backward can reuse: Bytes::saved bytes, 64-byte aligned; empty, or token by token: nothing is kept.
  std::span<std::byte> saved{};
};

/// The gradients of a loss with dL/do and dL/dfinal_state given (docs/math.md, sections 3 and 4).
/// Outputs that are not given are not computed into memory; rows after the last offset of a packed call get zeros.
/// Gradients of q and k are summed over the value heads that share them. While the call runs, dg of a vector gate may
/// hold intermediate values; without it they need Bytes::without_dg more of the workspace.
struct BackwardArgs {
  Inputs in{};
  TensorView d_o{};              ///< [B, T, HV, V]  dtype
  TensorView d_final_state{};    ///< like initial_state; optional, zero if not given
  TensorView dq{};               ///< [B, T, H, K]   dtype
  TensorView dk{};               ///< [B, T, H, K]   dtype
  TensorView dv{};               ///< [B, T, HV, V]  dtype
  TensorView dg{};               ///< like g         (gdn, kda, gdn2)
  TensorView dbeta{};            ///< like beta      (deltanet, gdn, kda)
  TensorView db{};               ///< like b         (gdn2)
  TensorView dw{};               ///< like w         (gdn2)
  TensorView d_initial_state{};  ///< like initial_state; only where an initial_state is given
  /// Left by forward() of the same problem and backend; empty: everything is recomputed.
  std::span<const std::byte> saved{};
};

/// Which implementation to use. kAutomatic takes the first of the dispatch table that serves the problem.
enum class Backend : std::uint8_t { kAutomatic, kCpu, kCuda, kReference };
std::string_view name(Backend);
Backend parse_backend(std::string_view);

/// Operations one call executed, counted where the products are issued. An operation is one multiplication or addition.
/// Only the CPU backend counts; the others leave zeros.
struct Work {
  struct Stage {
    std::int64_t products = 0;  ///< matrix products
    std::int64_t dense = 0;     ///< operations of those products as if no operand were triangular (the paper's count)
    std::int64_t executed = 0;  ///< operations executed, zero triangles skipped
  };
  Stage prepare{};            ///< L, A, Cq (and W, U of the expanded graph)
  Stage scan{};               ///< state recurrences and outputs
  Stage local{};              ///< local pullback of R = A (Z - E S): 3 products (rewy) or 7 (expanded) a chunk and head
  Stage interact{};           ///< Hq, dF, dO S^T and the intra-chunk contractions
  std::int64_t pairwise = 0;  ///< exponentials of single token pairs and features
  std::int64_t chunks = 0;    ///< chunks times value heads

  Stage total() const;
  Work& operator+=(const Work&);
};

/// Where and how a call runs.
struct Execution {
  Device device{};         ///< of every tensor of the call
  void* stream = nullptr;  ///< cudaStream_t of a CUDA call (null: the default stream); must be null on the CPU
  int threads = 0;         ///< CPU threads; 0: all the OpenMP runtime gives. Never changes a bit of a result.
  Backend backend = Backend::kAutomatic;
  Schedule schedule = Schedule::kChunks;  ///< of operators; activations have one
  int architecture = 0;  ///< CUDA: kernels for at most this compute capability (80 for 8.0); 0: the device's own
  std::span<std::byte>
      workspace{};       ///< bytes as Bytes says, on `device`, 64-byte aligned; contents before and after mean nothing
  Work* work = nullptr;  ///< if set, receives what the call executed
};

struct Bytes {
  std::size_t workspace = 0;  ///< for Execution::workspace
  std::size_t saved = 0;      ///< for ForwardArgs::saved
  std::size_t unsaved = 0;    ///< on top of workspace, where ForwardArgs::saved or BackwardArgs::saved is empty
  /// On top of workspace, for a backward of a vector gate that is given no dg, whose memory serves as scratch.
  std::size_t without_dg = 0;
};

/// Bytes of one call. None grows faster than T; token by token a GPU needs no memory. Uses only device, threads,
/// backend, schedule and architecture of `execution`.
Bytes workspace_bytes(const Problem&, Direction, const Execution& = {});

void forward(const Problem&, const ForwardArgs&, const Execution&);
void backward(const Problem&, const BackwardArgs&, const Execution&);

/// Which backend serves a problem, and why those before it in the table declined.
struct Explanation {
  struct Row {
    std::string backend;
    std::string reason;          ///< empty: it serves the problem
    std::string kernels;         ///< of the backend that serves, where it chooses among kernels: "portable scans"
    std::string answer() const;  ///< "serves it, portable scans" or "declines: ..."
  };
  std::string backend;    ///< the chosen one; empty if none serves
  std::vector<Row> rows;  ///< in the order of the table, up to the chosen one
  std::string text() const;
};
Explanation explain(const Problem&, Direction, const Execution& = {});

}  // namespace rewy
