// The pullback inside a chunk for vector gates. Between 16-token blocks the decays are split at block boundaries: keys
// decay to the end of their block, queries and erase vectors from the start of theirs, and the FP32 accumulators decay
// over the blocks between. Inside a block every pair is taken alone, in FP32. All factors are products of decays.
#pragma once

#include "cuda/sm80/pullback.cuh"

namespace rewy::cuda::pullback {

/// Step 0: q, k and g of the tile's features, on their way to shared memory.
template <class C, class Shared>
__device__ __forceinline__ void stage_columns(const Params& p, const Job& job, int head, int feature, Shared& shared) {
  using T = typename C::T;
  const auto copy = [&](TileStorage& tile, const Rows& rows) {
    copy_tile<kThreads>(ptx::shared_address(&tile),
                        row_pointer<const T>(rows, job.at.batch, job.at.token, job.key_head) + feature, rows.token,
                        job.at.tokens, p.K - feature);
  };
  copy(shared.gate.q, p.q);
  copy(shared.gate.k, p.k);
  const int row = static_cast<int>(threadIdx.x) / 16, column = static_cast<int>(threadIdx.x) % 16 * 4;
  const float* g = row_pointer<const float>(p.g, job.at.batch, job.at.token + row, head) + feature + column;
  const int left = feature + column < p.K ? job.at.tokens - row : 0;
#pragma unroll
  for (int i = 0; i < kTile; i += kThreads / 16) {
    ptx::copy_async_16(ptx::shared_address(&shared.gate.decay[row + i][column]), g, i < left);
    g += kThreads / 16 * p.g.token;
  }
  ptx::copy_commit();
}

/// One feature of one block. Rows past the tail are zero and do not decay.
template <class C, class Shared>
struct Column {
  using T = typename C::T;
  const Shared& shared;
  int first;                                                 ///< row
  int f;                                                     ///< feature of the tile
  std::uint32_t strength[C::kIndependent ? kBlock / 2 : 1];  ///< b of two rows each

  __device__ __forceinline__ Column(const Params& p, const Job& job, int head, int feature, const Shared& s)
      : shared(s) {
    const int thread = fresh(threadIdx.x);
    first = thread / kTile * kBlock;
    f = thread % kTile;
    if constexpr (C::kIndependent) {
      const T* b = row_pointer<const T>(p.b, job.at.batch, job.at.token + first, head) + feature + f;
      const int left = feature + f < p.K ? job.at.tokens - first : 0;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const std::uint32_t bits = i < left ? *reinterpret_cast<const std::uint16_t*>(b) : 0u;
        strength[i / 2] = i % 2 == 0 ? bits : strength[i / 2] | bits << 16;
        b += p.b.token;
      }
    }
  }
  __device__ __forceinline__ float decay(int i) const {
    return shared.gate.decay[first + i][f];
  }
  __device__ __forceinline__ float q(int i) const {
    return element(shared.gate.q, i);
  }
  __device__ __forceinline__ float k(int i) const {
    return element(shared.gate.k, i);
  }
  /// b_i of the erase vector b_i * k_i.
  __device__ __forceinline__ float erase_strength(int i) const {
    if constexpr (C::kIndependent) {
      const float2 pair = unpack<T>(strength[i / 2]);
      return i % 2 == 0 ? pair.x : pair.y;
    } else {
      return shared.beta[first + i];
    }
  }

 private:
  __device__ __forceinline__ float element(const TileStorage& tile, int i) const {
    return static_cast<float>(*reinterpret_cast<const T*>(tile.bytes + tile_offset(first + i, f)));
  }
};

/// Step 0: the operands between blocks, a thread for each block and feature. Turns g into decays.
template <class C, class Shared>
__device__ __forceinline__ void prepare_vector(const Params& p, const Job& job, int head, int feature, Shared& shared) {
  using T = typename C::T;
  if (!C::kIndependent && threadIdx.x < kTile) shared.beta[threadIdx.x] = shared_strength(p, job.at, head, threadIdx.x);
  const Column<C, Shared> column(p, job, head, feature, shared);
  ptx::copy_wait<1>();  // the value tiles may still be under way
  __syncthreads();
  const int first = column.first, f = column.f;
  const auto store = [&](int which, int row, float x) {
    *reinterpret_cast<T*>(shared.operand[which].bytes + tile_offset(row, f)) = static_cast<T>(x);
  };
  float decay[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    decay[i] = decay_of(column.decay(i));
    shared.gate.decay[first + i][f] = decay[i];  // read by this thread alone
  }
  float receive = 1.0f, send = 1.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    receive *= decay[i];
    store(0, first + i, receive * column.q(i));
    store(2, first + i, receive * (column.erase_strength(i) * column.k(i)));
  }
#pragma unroll
  for (int i = kBlock - 1; i >= 0; --i) {
    store(1, first + i, send * column.k(i));
    send *= decay[i];
  }
  shared.gate.block_decay[first / kBlock][f] = send;
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
        if (i / kBlock == (j + e) / kBlock)
          shared.gate.diagonal[i / kBlock][i % kBlock][(j + e) % kBlock] = {hq[e], d[e]};
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
    const float2 x =
        *reinterpret_cast<const float2*>(&shared.gate.block_decay[block][first_column + 8 * n + lane_column()]);
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

/// Step 8's last part: dg of one feature of one block a thread, from the sums inside the blocks.
template <class Shared>
__device__ __forceinline__ void finish_gates(const Params& p, const Job& job, int head, int feature, Shared& shared) {
  const int thread = fresh(threadIdx.x), block = thread / kTile, first = block * kBlock, f = thread % kTile;
  const int left = feature + f < p.K ? job.at.tokens - first : 0;
  float* to = row_pointer<float>(p.dg, job.at.batch, job.at.token + first, head) + feature + f;
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
    // Where nothing of the state is left, the gate's gradient is 0, and not the rounding of sums that cancel.
    const float dg = (shared.exchange[0].at(first + i, f) + later) + earlier;
    if (i < left) *to = shared.gate.decay[first + i][f] == 0.0f ? 0.0f : dg;
    to += p.dg.token;
    earlier += shared.exchange[3].at(first + i, f);
  }
}

/// Steps 7 and 8: the pairs inside a block, and all gradients of one feature of one block a thread.
template <class C, class Shared, class Group>
__device__ __forceinline__ void finish_vector(const Params& p, const Job& job, int head, int feature, Shared& shared,
                                              const Group& group) {
  using T = typename C::T;
  const Column<C, Shared> column(p, job, head, feature, shared);
  const int first = column.first, f = column.f;
  const int left = feature + f < p.K ? job.at.tokens - first : 0;  // rows that exist
  const auto& diagonal = shared.gate.diagonal[first / kBlock];
  float decay[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) decay[i] = column.decay(i);

  // Rows: what reaches q_i and e_i = b_i k_i. The gate's sums take the operands as rounded for the products, so that a
  // pair of blocks gives its two ends the same number and cancels where both lie behind a token.
  {
    const bool stores = p.dq.data != nullptr && group.last();
    T* to = row_pointer<T>(p.dq, job.at.batch, job.at.token + first, job.key_head) + feature + f;
    float k[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) k[i] = column.k(i);
    float receive = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      receive *= decay[i];
      float query = 0.0f, erase = 0.0f, ratio = 1.0f;
#pragma unroll
      for (int j = i - 1; j >= 0; --j) {
        ratio *= decay[j + 1];
        const float key = ratio * k[j];
        query += diagonal[i][j].x * key;
        erase += diagonal[i][j].y * key;
      }
      float& query_sum = shared.exchange[0].at(first + i, f);
      float& erase_sum = shared.exchange[1].at(first + i, f);
      const float q = column.q(i), e = column.erase_strength(i) * k[i];
      const float dq = receive * query_sum + query + shared.hq_diagonal[first + i] * k[i];
      const float d_gate =
          rounded<T>(receive * q) * query_sum + q * query + (rounded<T>(receive * e) * erase_sum + e * erase);
      erase_sum = receive * erase_sum + erase;
      query_sum = d_gate;
      const float sum = group.add(0, first + i, f, dq);
      if (stores && i < left) *to = static_cast<T>(sum);
      to += p.dq.token;
      __syncwarp();  // keeps the next row's loads behind this row: registers
    }
  }

  // Columns: what reaches k_j.
  {
    const bool stores = p.dk.data != nullptr && group.last();
    T* to = row_pointer<T>(p.dk, job.at.batch, job.at.token + first + kBlock - 1, job.key_head) + feature + f;
    T* strength_to = C::kIndependent && p.db.data != nullptr
                         ? row_pointer<T>(p.db, job.at.batch, job.at.token + first + kBlock - 1, head) + feature + f
                         : nullptr;
    float q[kBlock], e[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      q[i] = column.q(i);
      e[i] = column.erase_strength(i) * column.k(i);
    }
    float send = 1.0f, after = 0.0f, writes = 0.0f;
#pragma unroll
    for (int j = kBlock - 1; j >= 0; --j) {
      float key = 0.0f, ratio = 1.0f;
#pragma unroll
      for (int i = j + 1; i < kBlock; ++i) {
        ratio *= decay[i];
        key += ratio * (diagonal[i][j].x * q[i] + diagonal[i][j].y * e[i]);
      }
      const float k = column.k(j);
      const float d_erase = shared.exchange[1].at(first + j, f);
      const float d_key = shared.exchange[2].at(first + j, f);
      float& d_write = shared.exchange[3].at(first + j, f);
      const float dk =
          column.erase_strength(j) * d_erase + send * (d_key + d_write) + key + shared.hq_diagonal[first + j] * q[j];
      after += shared.exchange[0].at(first + j, f) - (rounded<T>(send * k) * d_key + k * key);
      shared.exchange[0].at(first + j, f) = after;
      d_write *= send * k;
      writes += d_write;
      const float strength = k * d_erase;
      if constexpr (C::kIndependent) {
        if (strength_to != nullptr) {
          if (j < left) *strength_to = static_cast<T>(strength);
          strength_to -= p.db.token;
        }
      } else {
        shared.exchange[1].at(first + j, f) = strength;
      }
      const float sum = group.add(1, first + j, f, dk);
      if (stores && j < left) *to = static_cast<T>(sum);
      to -= p.dk.token;
      send *= decay[j];
      __syncwarp();
    }
    shared.gate.block_sum[0][first / kBlock][f] = after;
    shared.gate.block_sum[1][first / kBlock][f] = writes;
  }
  __syncthreads();

  if (p.dg.data != nullptr) finish_gates(p, job, head, feature, shared);
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
