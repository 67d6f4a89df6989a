#include "floors.h"

#include <algorithm>

namespace rewy::tool {

double Floor::seconds() const {
  return std::max(bytes / kH200BytesPerSecond, operations / kH200OperationsPerSecond);
}

// The backward's bytes are those of three passes, each reading its inputs and writing its outputs once: the scan of S
// and R, the scan of dS and P, and the pullback to the inputs. At K = V = 128 in 16 bits a row of 64 tokens (q, k, v,
// do, dq, dk, dv, R, P) is 16 KB, S or dS 32 KB, a vector gate or its gradient 32 KB, A or Cq 8 KB:
//
//   deltanet, gdn   88 + 112 + 208 = 408 KB;   kda: 536 KB with g read by every pass and dg written
//   gdn2            648 KB, with b read by every pass, w by the first and the last, db and dw written
//
// Scalar gates and shared strengths are 256 bytes and are left out. Queries and keys count once for the value heads
// that share them. The forward's are inputs and outputs once: a fused forward moves nothing else.
//
// Operations are those of the products at full size. The four contractions with D and Hq count twice: those two keep 16
// bits of precision as sums of two 16-bit numbers. 31 million at K = V = 128.
Floor chunk_floor(const Problem& p, Direction direction, bool saved) {
  constexpr auto kTokens = static_cast<double>(kChunk);
  const auto K = static_cast<double>(p.K), V = static_cast<double>(p.V);
  const auto element = static_cast<double>(size_of(p.dtype));
  const bool independent = strength_of(p.op) == Strength::kIndependent;
  const auto strength = independent ? static_cast<double>(size_of(p.strength_dtype)) : 0;

  const double key_row = kTokens * K * element * static_cast<double>(p.H) / static_cast<double>(p.HV);
  const double value_row = kTokens * V * element;
  const double gate = gate_of(p.op) == Gate::kVector ? kTokens * K * sizeof(float) : 0;
  const double erase = kTokens * K * strength, write = kTokens * V * strength;
  const double state = K * V * element;
  const double square = kTokens * kTokens * element;  // A or Cq

  const double kv = 2 * kTokens * K * V;  // a product of a row of tokens with a state
  const double k_square = 2 * kTokens * kTokens * K, v_square = 2 * kTokens * kTokens * V;

  if (direction == Direction::kForward) {
    const double kept = !saved ? 0 : p.policy == Policy::kSave ? 2 * square + value_row + state : square;
    return {.bytes = 2 * key_row + 2 * value_row + gate + erase + write + kept,
            .operations = 2 * k_square + 3 * kv + 2 * v_square};
  }
  const bool scan_saved = saved && p.policy == Policy::kSave;
  Floor f;
  if (!scan_saved) {  // S and R forwards
    f.bytes += key_row + value_row + square + gate + erase + write + state + value_row;
    f.operations += 2 * kv + v_square + k_square;  // Cq too
  }
  // dS and P backwards
  f.bytes += 2 * key_row + value_row + 2 * square + gate + erase + state + value_row;
  f.operations += 3 * kv + 2 * v_square;
  // the pullback
  f.bytes += 2 * key_row + 4 * value_row + 2 * state + gate + erase + write;
  f.bytes += 2 * key_row + value_row + gate + erase + write;
  f.operations += 3 * kv + 2 * v_square + 2 * 4 * k_square;
  return f;
}

Floor token_floor(const Problem& p, bool initial_state, bool final_state) {
  const auto K = static_cast<double>(p.K), V = static_cast<double>(p.V);
  const auto tokens = static_cast<double>(p.B * p.T), heads = static_cast<double>(p.HV);
  const auto element = static_cast<double>(size_of(p.dtype)), strength = static_cast<double>(size_of(p.strength_dtype));
  const double gate = gate_of(p.op) == Gate::kVector ? K : gate_of(p.op) == Gate::kScalar ? 1 : 0;
  const double strengths = strength_of(p.op) == Strength::kIndependent ? K + V : 1;
  const double states = static_cast<double>(p.sequences()) * heads * K * V * sizeof(float);
  const double row = 2 * V * element + gate * sizeof(float) + strengths * strength;  // of a value head
  return {.bytes = tokens * (2 * K * element * static_cast<double>(p.H) + heads * row) +
                   states * ((initial_state ? 1 : 0) + (final_state ? 1 : 0)),
          .operations = 3 * 2 * K * V * tokens * heads};
}

Floor call_floor(const Problem& p, Direction direction, bool saved) {
  const double chunks = static_cast<double>(p.B * p.T * p.HV) / static_cast<double>(kChunk);
  const Floor one = chunk_floor(p, direction, saved);
  return {.bytes = one.bytes * chunks, .operations = one.operations * chunks};
}

}  // namespace rewy::tool
