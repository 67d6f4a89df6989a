// The pullback inside a chunk for vector gates. Between 16-token blocks the decays are split at block boundaries: keys
// decay to the end of their block, queries and erase vectors from the start of theirs, and the FP32 accumulators decay
// over the blocks between. Inside a block every pair is taken alone, in FP32. All factors are products of decays.
#pragma once

#include "cuda/sm80/pullback.cuh"

namespace rewy::cuda::pullback {

/// One feature of one block, from memory. Rows past the tail are zero and do not decay.
template <class C>
struct Column {
  using T = typename C::T;
  float decay[kBlock], k[kBlock], q[kBlock];
  float strength[C::kIndependent ? kBlock : 1];

  __device__ __forceinline__ void load(const Params& p, const Job& job, int head, int first_row, int feature) {
    const std::int64_t token = job.at.token + first_row;
    const float* g = row_pointer<const float>(p.g, job.at.batch, token, head) + feature;
    const T* q_row = row_pointer<const T>(p.q, job.at.batch, token, job.key_head) + feature;
    const T* k_row = row_pointer<const T>(p.k, job.at.batch, token, job.key_head) + feature;
    const T* b_row = C::kIndependent ? row_pointer<const T>(p.b, job.at.batch, token, head) + feature : nullptr;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const bool valid = first_row + i < job.at.tokens && feature < p.K;
      decay[i] = valid ? g[i * p.g.token] : 0.0f;
      q[i] = valid ? static_cast<float>(q_row[i * p.q.token]) : 0.0f;
      k[i] = valid ? static_cast<float>(k_row[i * p.k.token]) : 0.0f;
      if constexpr (C::kIndependent) strength[i] = valid ? static_cast<float>(b_row[i * p.b.token]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) decay[i] = decay_of(decay[i]);
  }
  /// b_i of the erase vector b_i * k_i.
  __device__ __forceinline__ float erase_strength(int i, const float* beta) const {
    if constexpr (C::kIndependent) {
      return strength[i];
    } else {
      return beta[i];
    }
  }
};

/// Step 0: the operands between blocks, a thread for each block and feature.
template <class C, class Shared>
__device__ __forceinline__ void prepare_vector(const Params& p, const Job& job, int head, int feature, Shared& shared) {
  using T = typename C::T;
  const int block = threadIdx.x / kTile, f = threadIdx.x % kTile, first = block * kBlock;
  if (!C::kIndependent && threadIdx.x < kTile) shared.beta[threadIdx.x] = shared_strength(p, job.at, head, threadIdx.x);
  Column<C> column;
  column.load(p, job, head, first, feature + f);
  __syncthreads();
  const auto store = [&](int which, int row, float x) {
    *reinterpret_cast<T*>(shared.operand[which].bytes + tile_offset(row, f)) = static_cast<T>(x);
  };
  float receive = 1.0f, send = 1.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    receive *= column.decay[i];
    store(0, first + i, receive * column.q[i]);
    store(2, first + i, receive * (column.erase_strength(i, shared.beta + first) * column.k[i]));
  }
#pragma unroll
  for (int i = kBlock - 1; i >= 0; --i) {
    store(1, first + i, send * column.k[i]);
    send *= column.decay[i];
  }
  shared.gate.block_decay[block][f] = send;
}

/// Step 4: Hq and D, masked; the pairs inside a block apart, in FP32.
template <class C, class Shared>
__device__ __forceinline__ void store_matrices_vector(const Params& p, const Sums& sums, Shared& shared) {
  using T = typename C::T;
  const Place at = place();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at.row + lane_row() + 8 * half;
      const int j = at.column + 8 * n + lane_column();
      float hq[2], d[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j + e == i) shared.hq_diagonal[i] = p.scale * sums.hq.c[n][2 * half + e];
        hq[e] = j + e < i ? p.scale * sums.hq.c[n][2 * half + e] : 0.0f;
        d[e] = j + e < i ? -sums.d.c[n][2 * half + e] : 0.0f;
        if (i / kBlock == (j + e) / kBlock) shared.gate.diagonal[i / kBlock][i % kBlock][(j + e) % kBlock] = {hq[e], d[e]};
      }
      store_halves<T>(shared.matrix.hq_high, shared.matrix.hq_low, i, j, hq[0], hq[1]);
      store_halves<T>(shared.matrix.d_high, shared.matrix.d_low, i, j, d[0], d[1]);
    }
  }
}

/// acc's columns decay over one block.
template <class Shared>
__device__ __forceinline__ void decay_columns(Accumulator<4>& acc, const Shared& shared, int block, int first_column) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 x = *reinterpret_cast<const float2*>(&shared.gate.block_decay[block][first_column + 8 * n + lane_column()]);
    acc.c[n][0] *= x.x;
    acc.c[n][1] *= x.y;
    acc.c[n][2] *= x.x;
    acc.c[n][3] *= x.y;
  }
}

/// Steps 5 and 6: the pairs between blocks, then everything to the exchange.
template <class C, class Shared>
__device__ __forceinline__ void multiply_blocks(const Params& p, Shared& shared, Sums& sums) {
  using T = typename C::T;
  const Place at = place();
  const MatrixTiles& m = shared.matrix;
  const int block = at.row / kBlock;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums.query.c[n][e] *= p.scale;
      sums.erase.c[n][e] = -sums.erase.c[n][e];
    }
  }
  Accumulator<4> keys;
  keys.clear();
#pragma unroll
  for (int other = 0; other < kBlocks - 1; ++other) {
    if (other >= block) break;
    decay_columns(sums.query, shared, other, at.column);
    decay_columns(sums.erase, shared, other, at.column);
    multiply_block<T, false>(m.hq_high, m.hq_low, at.row, 16 * other, shared.operand[1], at.column, sums.query);
    multiply_block<T, false>(m.d_high, m.d_low, at.row, 16 * other, shared.operand[1], at.column, sums.erase);
  }
#pragma unroll
  for (int other = kBlocks - 1; other > 0; --other) {
    if (other <= block) break;
    decay_columns(keys, shared, other, at.column);
    decay_columns(sums.write, shared, other, at.column);
    multiply_block<T, true>(m.hq_high, m.hq_low, 16 * other, at.row, shared.operand[0], at.column, keys);
    multiply_block<T, true>(m.d_high, m.d_low, 16 * other, at.row, shared.operand[2], at.column, keys);
  }
  __syncthreads();  // the operands have been read
  const Accumulator<4>* all[4] = {&sums.query, &sums.erase, &keys, &sums.write};
#pragma unroll
  for (int which = 0; which < 4; ++which) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float(&c)[4] = all[which]->c[n];
      const int column = at.column + 8 * n + lane_column(), row = at.row + lane_row();
      shared.exchange[which].pair(row, column) = {c[0], c[1]};
      shared.exchange[which].pair(row + 8, column) = {c[2], c[3]};
    }
  }
  __syncthreads();
}

/// Steps 7 and 8: the pairs inside a block, and all gradients of one feature of one block a thread.
template <class C, class Shared, class Group>
__device__ __forceinline__ void finish_vector(const Params& p, const Job& job, int head, int feature, Shared& shared,
                                              const Group& group) {
  using T = typename C::T;
  const int block = threadIdx.x / kTile, f = threadIdx.x % kTile, first = block * kBlock;
  const bool inside = feature + f < p.K;
  const float* beta = shared.beta + first;
  const auto& diagonal = shared.gate.diagonal[block];
  Column<C> column;
  column.load(p, job, head, first, feature + f);
  const auto valid = [&](int i) { return inside && first + i < job.at.tokens; };
  const auto key_row = [&](const Rows& rows, int i) {
    return row_pointer<T>(rows, job.at.batch, job.at.token + first + i, job.key_head) + feature + f;
  };

  // Rows: what reaches q_i and e_i = b_i k_i. The gate's sums take the operands as rounded for the products, so that a
  // pair of blocks gives its two ends the same number and cancels where both lie behind a token.
  float receive = 1.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    receive *= column.decay[i];
    float query = 0.0f, erase = 0.0f, ratio = 1.0f;
#pragma unroll
    for (int j = i - 1; j >= 0; --j) {
      ratio *= column.decay[j + 1];
      const float key = ratio * column.k[j];
      query += diagonal[i][j].x * key;
      erase += diagonal[i][j].y * key;
    }
    float& query_sum = shared.exchange[0].at(first + i, f);
    float& erase_sum = shared.exchange[1].at(first + i, f);
    const float e = column.erase_strength(i, beta) * column.k[i];
    const float dq = receive * query_sum + query + shared.hq_diagonal[first + i] * column.k[i];
    const float d_gate = rounded<T>(receive * column.q[i]) * query_sum + column.q[i] * query +
                         (rounded<T>(receive * e) * erase_sum + e * erase);
    erase_sum = receive * erase_sum + erase;
    query_sum = d_gate;
    const float sum = group.add(0, first + i, f, dq);
    if (p.dq.data != nullptr && group.last() && valid(i)) *key_row(p.dq, i) = static_cast<T>(sum);
  }

  // Columns: what reaches k_j.
  float send = 1.0f, after = 0.0f, writes = 0.0f;
#pragma unroll
  for (int j = kBlock - 1; j >= 0; --j) {
    float key = 0.0f, ratio = 1.0f;
#pragma unroll
    for (int i = j + 1; i < kBlock; ++i) {
      ratio *= column.decay[i];
      const float e = column.erase_strength(i, beta) * column.k[i];
      key += ratio * (diagonal[i][j].x * column.q[i] + diagonal[i][j].y * e);
    }
    const float d_erase = shared.exchange[1].at(first + j, f);
    const float d_key = shared.exchange[2].at(first + j, f);
    float& d_write = shared.exchange[3].at(first + j, f);
    const float dk = column.erase_strength(j, beta) * d_erase + send * (d_key + d_write) + key +
                     shared.hq_diagonal[first + j] * column.q[j];
    after += shared.exchange[0].at(first + j, f) - (rounded<T>(send * column.k[j]) * d_key + column.k[j] * key);
    shared.exchange[0].at(first + j, f) = after;
    d_write *= send * column.k[j];
    writes += d_write;
    const float strength = column.k[j] * d_erase;
    if constexpr (C::kIndependent) {
      if (p.db.data != nullptr && valid(j)) {
        row_pointer<T>(p.db, job.at.batch, job.at.token + first + j, head)[feature + f] = static_cast<T>(strength);
      }
    } else {
      shared.exchange[1].at(first + j, f) = strength;
    }
    const float sum = group.add(1, first + j, f, dk);
    if (p.dk.data != nullptr && group.last() && valid(j)) *key_row(p.dk, j) = static_cast<T>(sum);
    send *= column.decay[j];
  }
  shared.gate.block_sum[0][block][f] = after;
  shared.gate.block_sum[1][block][f] = writes;
  __syncthreads();

  if (p.dg.data != nullptr) {
    float later = 0.0f, earlier = 0.0f, lambda = 1.0f, state = 0.0f;
#pragma unroll
    for (int other = kBlocks - 1; other >= 0; --other) {
      if (other > block) later += shared.gate.block_sum[0][other][f];
    }
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      if (other < block) earlier += shared.gate.block_sum[1][other][f];
      lambda *= shared.gate.block_decay[other][f];
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) state += shared.state_sum[e][f];
    earlier += lambda * state;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (valid(i)) {
        row_pointer<float>(p.dg, job.at.batch, job.at.token + first + i, head)[feature + f] =
            (shared.exchange[0].at(first + i, f) + later) + earlier;
      }
      earlier += shared.exchange[3].at(first + i, f);
    }
  }
  if constexpr (!C::kIndependent) {
    // dbeta: four threads a row.
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4 * 16;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 16; ++e) sum += shared.exchange[1].at(row, quarter + (e + static_cast<int>(threadIdx.x)) % 16);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0) {
      shared.rows.strength[0][row] = sum;
      shared.rows.strength[1][row] = 0.0f;
    }
  }
}

}  // namespace rewy::cuda::pullback
