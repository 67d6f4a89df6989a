// How many bytes the forward keeps for the backward. PyTorch must know that without running anything, for lengths that
// are symbols: the number of chunks is a formula, and the bytes of one chunk and head depend on widths and types alone.
// What activations made is kept by token. Both are tensors of bytes with one axis: of an axis that counts chunks
// PyTorch would want to know whether it is 1.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/backend.h"
#include "rewy/rewy.h"

namespace rewy::torch_ops {

/// Bytes kept of one chunk of one head.
inline std::int64_t saved_bytes_of_chunk(Problem p, const Execution& execution) {
  p.B = p.H = p.HV = 1;
  p.T = kChunk;
  p.segments.reset();
  return static_cast<std::int64_t>(workspace_bytes(p, Direction::kForward, execution).saved);
}

/// The type of an activation's sums and decays: FP32, or FP64 where the part is FP64.
inline DType wide(DType part) {
  return part == DType::kF64 ? DType::kF64 : DType::kF32;
}

/// Bytes of what an activation makes of one token (Activated, ops.cpp).
inline std::int64_t activated_bytes_of_token(const Activation& a) {
  const auto size = [](DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); };
  std::int64_t bytes = 0;
  if (a.normalise) bytes += 2 * a.H * (a.K * size(a.dtype) + size(wide(a.dtype)));
  if (a.gate != Gate::kNone) bytes += gate_width(a) * size(wide(a.gate_dtype));
  if (a.strength) bytes += a.HV * size(a.beta_dtype);
  return bytes;
}

}  // namespace rewy::torch_ops
