// The launches of the CUDA backend. Each takes the call's Params and the stream; each checks its launch and throws
// rewy::Error where it fails. A kernel exists for every gate that is a trait of an operator: an absent gate runs as a
// scalar one of zeros, so that DeltaNet has no instances of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/params.h"
#include "rewy/rewy.h"

namespace rewy::cuda {

/// Which instances serve a call.
struct Kind {
  Operator op;
  DType dtype;  ///< of q, k, v: kBF16 or kF16, token by token kF32 too
};

/// What the launch heuristics know of a device.
struct DeviceLimits {
  int index = 0;
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;  ///< opt-in maximum
  int compute_capability = 0;      ///< 90 for 9.0
};

/// The device as one of a lower compute capability: its memory and multiprocessors, the other's kernels.
inline DeviceLimits restricted(DeviceLimits limits, int architecture) {
  if (architecture != 0) limits.compute_capability = std::min(limits.compute_capability, architecture);
  return limits;
}

/// Packed calls: fills first_chunk and chunk_table from cu_seqlens, clamped to [0, T] and made non-decreasing.
void launch_chunk_table(const Params&, cudaStream_t);

/// Packed calls: zeros the rows behind the last offset of every output that has token rows.
void launch_zero_tail(const Params&, const Kind&, cudaStream_t);

/// A and Cq of every chunk (docs/kernels/prepare.md).
void launch_prepare(const Params&, const Kind&, const DeviceLimits&, cudaStream_t);

/// Vector gates: E, F and Qg of every token, lambda of every chunk (docs/kernels/operands.md); nothing for other gates.
void launch_operands(const Params&, const Kind&, cudaStream_t);

/// o, final_state, and S and R where Params has room for them (docs/kernels/scan.md).
void launch_scan_output(const Params&, const Kind&, const DeviceLimits&, cudaStream_t);

/// The backward's scans: S and R forwards (skipped where `states_saved`), dS+ and P backwards, d_initial_state.
void launch_scan_both(const Params&, const Kind&, const DeviceLimits&, bool states_saved, cudaStream_t);

/// Every input gradient (docs/kernels/pullback.md).
void launch_pullback(const Params&, const Kind&, const DeviceLimits&, cudaStream_t);

/// Dynamic shared memory that a device must offer a block of the scans, and of the pullback of `group` = HV / H heads.
/// prepare takes what every device of compute capability 8.0 and up has.
int scan_shared_bytes(const Kind&, std::int64_t K);
int pullback_shared_bytes(const Kind&, std::int64_t group);

}  // namespace rewy::cuda
