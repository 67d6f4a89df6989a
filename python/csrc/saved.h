// What the forward keeps for the backward, as the shape of a tensor of bytes: [chunks, HV, bytes a chunk and head].
// PyTorch must know a result's shape without running anything, for lengths that are symbols: the number of chunks is a
// formula, and the bytes of one chunk and head depend on widths and types alone.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>

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

}  // namespace rewy::torch_ops
