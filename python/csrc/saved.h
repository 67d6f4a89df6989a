// What the forward keeps for the backward, as the shape of a tensor of bytes: [chunks, HV, bytes a chunk and head].
// PyTorch must know a result's shape without running anything, for lengths that are symbols: the number of chunks is a
// formula, and the bytes of one chunk and head depend on widths and types alone. What activations made is kept by
// token.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>

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

inline std::array<std::int64_t, 3> saved_shape(const Problem& p, const Bytes& bytes, const Execution& execution) {
  const std::int64_t chunks = most_chunks(p);
  if (chunks == 0) return {0, p.HV, saved_bytes_of_chunk(p, execution)};
  const auto saved = static_cast<std::int64_t>(bytes.saved);
  if (saved % (chunks * p.HV) != 0) {
    throw std::logic_error("rewy: saved bytes are not a whole number a chunk and head");
  }
  return {chunks, p.HV, saved / (chunks * p.HV)};
}

/// The type of an activation's sums and decays: FP32, or FP64 where the part is FP64.
inline DType wide(DType part) {
  return part == DType::kF64 ? DType::kF64 : DType::kF32;
}

/// Bytes of what an activation makes of one token: a tensor of bytes [B, T, this] holds all of it (Activated, ops.cpp).
inline std::int64_t activated_bytes_of_token(const Activation& a) {
  const auto size = [](DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); };
  std::int64_t bytes = 0;
  if (a.normalise) bytes += 2 * a.H * (a.K * size(a.dtype) + size(wide(a.dtype)));
  if (a.gate != Gate::kNone) bytes += gate_width(a) * size(wide(a.gate_dtype));
  if (a.strength) bytes += a.HV * size(a.beta_dtype);
  return bytes;
}

}  // namespace rewy::torch_ops
