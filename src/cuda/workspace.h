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

/// A 16-bit [B, T, HV, K] tensor.
inline Rows take_rows(Arena& arena, const Problem& p) {
  return {arena.take<std::uint16_t>(p.B * p.T * p.HV * p.K), p.T * p.HV * p.K, p.HV * p.K, p.K};
}

/// What the caller gives a call besides the workspace, that makes some of it unnecessary.
struct Given {
  bool saved;  ///< ForwardArgs::saved or BackwardArgs::saved
  bool dg;     ///< BackwardArgs::dg
};

/// E and F in the memory of a vector gate's dg: a row of K FP32 holds K 16-bit elements of each.
inline void lay_out_in_dg(const Problem& p, Params& at) {
  at.erase = {at.dg.data, 2 * at.dg.batch, 2 * at.dg.token, 2 * at.dg.head};
  at.write = at.erase;
  at.write.data = static_cast<std::uint16_t*>(at.dg.data) + p.K;
}

/// The workspace. What lies in memory given is not laid out again. The forward keeps no states: its scan writes them
/// only where they are saved.
inline void lay_out_workspace(const Problem& p, Direction direction, Given given, Arena& arena, Params& at) {
  if (p.segments) {
    at.first_chunk = arena.take<std::int32_t>(p.sequences() + 1);
    at.chunk_table = arena.take<ChunkAt>(most_chunks(p));
  }
  if (!given.saved) {
    at.a = take_blocks(arena, p, kChunk, kChunk);
    at.cq = take_blocks(arena, p, kChunk, kChunk);
  }
  if (gate_of(p.op) == Gate::kVector) {
    at.decay = arena.take<float>(most_chunks(p) * p.HV * p.K);
    at.query = take_rows(arena, p);
    if (direction == Direction::kForward || !given.dg) {
      at.erase = take_rows(arena, p);
      at.write = take_rows(arena, p);
    }
  }
  if (direction == Direction::kForward) return;
  if (!(given.saved && p.policy == Policy::kSave)) {
    at.state_t = take_blocks(arena, p, p.V, p.K);
    at.r_t = take_blocks(arena, p, p.V, kChunk);
  }
  at.dstate_t = take_blocks(arena, p, p.V, p.K);
  at.p_t = take_blocks(arena, p, p.V, kChunk);
  if (strength_of(p.op) == Strength::kShared) {
    at.row_sums = arena.take<RowSums>(most_chunks(p) * p.HV * ((p.K + kChunk - 1) / kChunk + 1));
  }
}

}  // namespace rewy::cuda
