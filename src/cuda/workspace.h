// What lies where in a call's memory on the device. The same functions measure it and hand it out (common/arena.h).
#pragma once

#include "common/arena.h"
#include "common/backend.h"
#include "cuda/params.h"

namespace rewy::cuda {

/// One 16-bit [rows, columns] block a chunk slot and value head.
inline void* take_blocks(Arena& arena, const Problem& p, std::int64_t rows, std::int64_t columns) {
  return arena.take<std::uint16_t>(most_chunks(p) * p.HV * rows * columns);
}

/// ForwardArgs::saved, by policy: A and Cq, and the states and R where they are saved.
inline void lay_out_saved(const Problem& p, Arena& arena, Params& at) {
  at.a = take_blocks(arena, p, kChunk, kChunk);
  at.cq = take_blocks(arena, p, kChunk, kChunk);
  if (p.policy == Policy::kSave) {
    at.state_t = take_blocks(arena, p, p.V, p.K);
    at.r_t = take_blocks(arena, p, p.V, kChunk);
  }
}

/// The workspace. With `saved` given, what it holds is not laid out again. The forward keeps no states: its scan
/// writes them only where they are saved.
inline void lay_out_workspace(const Problem& p, Direction direction, bool saved, Arena& arena, Params& at) {
  if (p.segments) {
    at.first_chunk = arena.take<std::int32_t>(p.sequences() + 1);
    at.chunk_table = arena.take<ChunkAt>(most_chunks(p));
  }
  if (!saved) {
    at.a = take_blocks(arena, p, kChunk, kChunk);
    at.cq = take_blocks(arena, p, kChunk, kChunk);
  }
  if (direction == Direction::kForward) return;
  if (!(saved && p.policy == Policy::kSave)) {
    at.state_t = take_blocks(arena, p, p.V, p.K);
    at.r_t = take_blocks(arena, p, p.V, kChunk);
  }
  at.dstate_t = take_blocks(arena, p, p.V, p.K);
  at.p_t = take_blocks(arena, p, p.V, kChunk);
}

}  // namespace rewy::cuda
