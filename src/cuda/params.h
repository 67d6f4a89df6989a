// What the kernels of one call are given: one flat structure for all of them, passed by value. backend.cpp fills it,
// the kernels read it. Letters as in docs/math.md; strides are in elements.
#pragma once

#include <cstdint>

#include "rewy/types.h"

namespace rewy::cuda {

/// A [B, T, heads, width] tensor whose last axis is contiguous (scalars: [B, T, heads]). Null data: not given.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
};

/// FP32 states [N, HV, K, V] in either layout: element (n, h, k, v) by strides. Null data: not given.
struct States {
  float* data = nullptr;
  std::int64_t sequence = 0, head = 0, key = 0, value = 0;
};

/// Where one chunk lies. The slots behind the last chunk of a packed call have tokens = 0.
struct ChunkAt {
  std::int64_t token;     ///< first token row of the chunk
  std::int32_t batch;     ///< of the tensors
  std::int32_t sequence;  ///< of the states
  std::int32_t tokens;    ///< 1 to 64
  std::int32_t last;      ///< 1 for the last chunk of its sequence
};

/// What the pullback sums over 64 features of a value head's chunk, by token.
struct RowSums {
  float query[kChunk], write[kChunk];  ///< scalar gates: what pairs and the state give to dG, and F * dF
  float strength[kChunk];              ///< shared strength: dbeta
  float state;                         ///< scalar gates: lambda * sum of S * dS+
};

struct Params {
  // The problem.
  std::int64_t B, T;
  std::int64_t sequences;  ///< N
  std::int64_t chunks;     ///< chunk slots; unpacked: B * ceil(T / 64), slot = batch * ceil(T / 64) + chunk
  std::int32_t H, HV;
  std::int32_t K, V;
  float scale;  ///< of the queries
  /// scale = scale_power * scale_rest: a power of two, which rounds nothing, and a factor from 1 to 2. For scalar gates
  /// the state's gradient is kept divided by scale_rest (dstate_t too), so that dO enters it exact where nothing
  /// decays.
  float scale_power, scale_rest;
  DType strength_dtype;  ///< of beta (b and w have the type of q)

  // Packed sequences; cu_seqlens null otherwise.
  const void* cu_seqlens;  ///< [N + 1], int32 or int64, on the device
  bool offsets_are_i64;
  std::int64_t offset_stride;
  std::int32_t* first_chunk;  ///< [N + 1]     slot of each sequence's first chunk, workspace
  ChunkAt* chunk_table;       ///< [chunks]    workspace

  // Inputs.
  Rows q, k;    ///< [B, T, H, K]
  Rows v, d_o;  ///< [B, T, HV, V]
  Rows g;       ///< [B, T, HV] or [B, T, HV, K] FP32; not given: no decay
  Rows beta;    ///< [B, T, HV]
  Rows b, w;    ///< [B, T, HV, K], [B, T, HV, V]
  States initial_state, d_final_state;

  // Outputs. Any may be absent.
  Rows o;
  Rows dq, dk, dv, dg, dbeta, db, dw;
  States final_state, d_initial_state;

  // Between the kernels, one of each a (chunk slot, value head), that is at index slot * HV + head. 16-bit of the type
  // of q. Absent where the call needs none.
  void* a;         ///< A                              [64, 64]   zero above the diagonal and in rows past the tail
  void* cq;        ///< Cq, of scaled queries          [64, 64]   likewise
  void* state_t;   ///< S^T before the chunk           [V, K]
  void* r_t;       ///< R^T                            [V, 64]
  void* dstate_t;  ///< dS+^T after the chunk          [V, K]
  void* p_t;       ///< P^T                            [V, 64]
  float* decay;    ///< vector gates: lambda, FP32         [K]

  RowSums* row_sums;  ///< shared strength: [chunk slot, value head][every 64 features, and the values]

  // Vector gates, by token, 16-bit. For scalar ones k and q take their place, and the scans scale rows of the products.
  // In a backward, E and F may lie in dg's rows, which the pullback overwrites last.
  Rows erase, write, query;  ///< E, F and gamma * q   [B, T, HV, K]
};

}  // namespace rewy::cuda
