// The CPU backend's plan of one call and its stages. backend.cpp schedules them over threads; stages.cpp holds
// them, compiled once per instruction set.
//
//   prepare_chunk   every (chunk, value head): A = (I + L)^-1, Cq; the expanded graph also W = A E, U = A Z
//   scan_forward    every (sequence, value head, value columns): S and R through the chunks; the outputs
//   scan_reverse    the same, backwards: dS and P (expanded: dR)
//   pullback_chunk  every (chunk, query head): all input gradients, summed over the heads of the group
//
// and in place of the first two, where a forward goes token by token:
//
//   scan_tokens     every (sequence, value head, value columns): the recurrence itself
//
// scan_forward and scan_reverse of one call need nothing of each other and can run side by side. Where the heads alone
// keep all threads busy, the scans run the other two stages themselves, chunk by chunk (Plan::fused).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/arena.h"
#include "cpu/tile.h"
#include "rewy/rewy.h"

namespace rewy::cpu {

struct Sequence {
  std::int64_t batch;        ///< of the tensors
  std::int64_t begin;        ///< first token row
  std::int64_t tokens;       ///< may be 0
  std::int64_t first_chunk;  ///< in the chunk table
};

struct Chunk {
  std::int64_t batch;
  std::int64_t token;  ///< first token row
  std::int64_t n;      ///< tokens, 1 to 64
};

/// Columns [begin, end) of the values; a multiple of 16 but for the padding of the last.
struct Slice {
  std::int64_t begin, end;
};

/// Columns of a slice of scan_tokens: two vectors of AVX-512, and at K = 128 a state of 16 KB, which stays in the first
/// level of cache.
inline constexpr std::int64_t kTokenColumns = 2 * kPad;

/// Sizes that all stages and the workspace layout share.
struct Sizes {
  std::int64_t K, V, Kp, Vp;  ///< widths, and padded to 16
  std::int64_t ldk, ldv, ldc;
  explicit Sizes(const Problem& p)
      : K(p.K),
        V(p.V),
        Kp(round_up(p.K, kPad)),
        Vp(round_up(p.V, kPad)),
        ldk(tile_stride(p.K)),
        ldv(tile_stride(p.V)),
        ldc(tile_stride(kChunk)) {}
  std::int64_t matrix() const { return kChunk * ldc; }  ///< floats of an [n, n] tile
  std::int64_t keys() const { return kChunk * ldk; }    ///< [n, K]
  std::int64_t values() const { return kChunk * ldv; }  ///< [n, V]
  std::int64_t state_t() const { return Vp * ldk; }     ///< [V, K], a state transposed
};

/// What one call keeps between its stages, an array over (chunk, value head) each. Null where the call needs none.
struct Intermediates {
  float* a = nullptr;         ///< A
  float* cq = nullptr;        ///< Cq
  float* w = nullptr;         ///< W  (expanded graph)
  float* u = nullptr;         ///< U  (expanded graph)
  float* state_t = nullptr;   ///< S^T before the chunk
  float* r = nullptr;         ///< R
  float* dstate_t = nullptr;  ///< dS+^T after the chunk
  float* p = nullptr;         ///< P; dR in the expanded graph
};

/// Everything the stages read. The tensors not given have null data.
struct Plan {
  explicit Plan(const Problem& problem) : p(problem), size(problem) {}

  const Problem& p;
  Sizes size;
  Direction direction = Direction::kForward;
  const Sequence* sequences = nullptr;
  const Chunk* chunks = nullptr;
  std::int64_t chunk_count = 0;
  const Inputs* in = nullptr;
  const ForwardArgs* fwd = nullptr;   ///< forward calls
  const BackwardArgs* bwd = nullptr;  ///< backward calls
  Intermediates keep;
  bool make_a = true;   ///< prepare_chunk computes A (false: the forward left it)
  bool make_cq = true;  ///< prepare_chunk computes Cq
  bool make_w = false;  ///< prepare_chunk computes W and U (expanded graph)
  /// scan_forward prepares each chunk just before its step, and scan_reverse prepares it before and pulls it back just
  /// after, while its rows are in the caches. What only the step itself uses (Cq, dS+, P) then has one slot.
  bool fused = false;
  bool expanded() const { return p.variant.graph == Graph::kExpanded; }
  std::int64_t group() const { return p.HV / p.H; }
  std::int64_t at(std::int64_t chunk, std::int64_t head) const { return chunk * p.HV + head; }
  std::int64_t adjoint_at(std::int64_t chunk, std::int64_t head) const { return fused ? 0 : at(chunk, head); }
  std::int64_t cq_at(std::int64_t chunk, std::int64_t head) const { return fused && make_cq ? 0 : at(chunk, head); }
};

struct Stages {
  void (*prepare_chunk)(const Plan&, std::int64_t chunk, std::int64_t head, Arena scratch, Work&);
  void (*scan_forward)(const Plan&, std::int64_t sequence, std::int64_t head, Slice, Arena scratch, Work&);
  void (*scan_reverse)(const Plan&, std::int64_t sequence, std::int64_t head, Slice, Arena scratch, Work&);
  void (*pullback_chunk)(const Plan&, std::int64_t chunk, std::int64_t query_head, Arena scratch, Work&);
  void (*scan_tokens)(const Plan&, std::int64_t sequence, std::int64_t head, Slice, Arena scratch, Work&);
};

/// The stages for the best instruction set of this machine (or the best that hwy's test switches allow).
Stages stages_for_this_cpu();

/// Scratch of the largest stage of a call, for one thread.
std::size_t scratch_bytes(const Problem&, Direction, Schedule);

/// Name of the instruction set stages_for_this_cpu() uses, and of all this build and machine can use, best first.
const char* instruction_set();
std::string usable_instruction_sets();

}  // namespace rewy::cpu
