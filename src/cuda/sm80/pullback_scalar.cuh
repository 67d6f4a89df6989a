// The pullback inside a chunk for scalar gates (and none): the decays are folded into Hq and D, and Gram elimination
// takes the gate gradients from the products already there.
#pragma once

#include "cuda/sm80/pullback.cuh"

namespace rewy::cuda::pullback {

/// Step 0: decays between all positions, beta.
template <class C, class Shared>
__device__ __forceinline__ void prepare_scalar(const Params& p, const Job& job, int head, Shared& shared) {
  ScalarGateStorage& gate = shared.gate;
  const int thread = threadIdx.x;
  if (thread < 32) {
    const int first = 2 * thread;
    const float decay[2] = {scalar_decay(p, job.at, head, first), scalar_decay(p, job.at, head, first + 1)};
    const ScalarDecays d = scalar_decays(decay);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      gate.from_start[first + e] = d.from_start[e];
      gate.to_end[first + e] = d.to_end[e] * p.scale_rest;  // dS+ is kept divided by it
      shared.beta[first + e] = shared_strength(p, job.at, head, first + e);
    }
    if (thread == 0) shared.decay[0] = d.total;
  } else if (thread >= 64 && thread < 128) {
    // One column j of a block: products from j + 1 on.
    const int j = thread - 64, block = j / kBlock, first = block * kBlock;
    float product = 1.0f, from_block = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float decay = scalar_decay(p, job.at, head, first + i);
      if (first + i > j) product *= decay;
      if (first + i <= j) from_block *= decay;
      gate.inside[block][i][j - first] = product;
    }
    gate.from_block[j] = from_block;
    gate.to_block_end[j] = product;
  }
  __syncthreads();
  if (thread < kBlocks * kBlocks) {
    const int i = thread / kBlocks, j = thread % kBlocks;
    float product = 1.0f;
    for (int block = j + 1; block < i; ++block) product *= gate.from_block[block * kBlock + kBlock - 1];
    gate.between[i][j] = product;
  }
  // A barrier follows before the first use.
}

/// The decay from token j to token i >= j.
__device__ __forceinline__ float ratio(const ScalarGateStorage& gate, int i, int j) {
  const int bi = i / kBlock, bj = j / kBlock;
  if (bi == bj) return gate.inside[bi][i % kBlock][j % kBlock];
  return gate.from_block[i] * gate.between[bi][bj] * gate.to_block_end[j];
}

/// Step 0 of a tile: q and k as they lie, and the erase vectors beta k.
template <class C, class Shared>
__device__ __forceinline__ void stage_operands(const Params& p, const Job& job, int feature, Shared& shared) {
  using T = typename C::T;
  const auto copy = [&](TileStorage& tile, const Rows& rows) {
    copy_tile<kThreads>(ptx::shared_address(&tile),
                        row_pointer<const T>(rows, job.at.batch, job.at.token, job.key_head) + feature, rows.token,
                        job.at.tokens, p.K - feature);
  };
  copy(shared.operand[0], p.q);
  copy(shared.operand[1], p.k);
}

/// Step 4: Hq and D, masked and decayed.
template <class C, class Shared>
__device__ __forceinline__ void store_matrices(const Params& p, const Sums& sums, Shared& shared) {
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
        hq[e] = d[e] = 0.0f;
        if (j + e == i) shared.hq_diagonal[i] = p.scale * sums.hq.c[n][2 * half + e];
        if (j + e < i) {
          const float decay = ratio(shared.gate, i, j + e);
          hq[e] = p.scale * decay * sums.hq.c[n][2 * half + e];
          d[e] = -decay * sums.d.c[n][2 * half + e];
        }
      }
      store_halves<T>(shared.matrix.hq_high, shared.matrix.hq_low, i, j, hq[0], hq[1]);
      store_halves<T>(shared.matrix.d_high, shared.matrix.d_low, i, j, d[0], d[1]);
    }
  }
}

/// beta k in the third operand tile, rounded once.
template <class C, class Shared>
__device__ __forceinline__ void make_erase_operand(Shared& shared) {
  using T = typename C::T;
  for (int word = threadIdx.x; word < kTile * kTile / 2; word += kThreads) {
    const int row = word / 32;
    const std::uint32_t offset = tile_offset(row, 2 * (word % 32));
    const float2 k = unpack<T>(*reinterpret_cast<const std::uint32_t*>(shared.operand[1].bytes + offset));
    *reinterpret_cast<std::uint32_t*>(shared.operand[2].bytes + offset) =
        pack<T>(shared.beta[row] * k.x, shared.beta[row] * k.y);
  }
}

/// Steps 5 and 6: the pairs, and the gradients of queries and keys. `keys` receives what the pairs give to k_j.
template <class C, class Shared, class Group>
__device__ __forceinline__ void finish_scalar(const Params& p, const Job& job, int feature, Shared& shared, Sums& sums,
                                              const Group& group) {
  using T = typename C::T;
  const Place at = place();
  const MatrixTiles& m = shared.matrix;
  // From the state: rows decay from the chunk's start, and to its end.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.row + lane_row() + 8 * half;
    const float from_start = shared.gate.from_start[i], to_end = shared.gate.to_end[i];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        sums.query.c[n][e] *= from_start * p.scale;
        sums.erase.c[n][e] *= -from_start;
        sums.write.c[n][e] *= to_end;
      }
    }
  }
  Accumulator<4> keys;
  keys.clear();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int other = 16 * block;
    if (other <= at.row) {
      multiply_block<T, false>(m.hq_high, m.hq_low, at.row, other, shared.operand[1], at.column, sums.query);
      multiply_block<T, false>(m.d_high, m.d_low, at.row, other, shared.operand[1], at.column, sums.erase);
    }
    if (other >= at.row) {
      multiply_block<T, true>(m.hq_high, m.hq_low, other, at.row, shared.operand[0], at.column, keys);
      multiply_block<T, true>(m.d_high, m.d_low, other, at.row, shared.operand[2], at.column, keys);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.row + lane_row() + 8 * half;
    const float diagonal = shared.hq_diagonal[i], beta = shared.beta[i];
    float query_sum = 0.0f, write_sum = 0.0f, strength_sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int c = at.column + 8 * n + lane_column();
      const std::uint32_t offset = tile_offset(i, c);
      const float2 q = unpack<T>(*reinterpret_cast<const std::uint32_t*>(shared.operand[0].bytes + offset));
      const float2 k = unpack<T>(*reinterpret_cast<const std::uint32_t*>(shared.operand[1].bytes + offset));
      const float2 erase = unpack<T>(*reinterpret_cast<const std::uint32_t*>(shared.operand[2].bytes + offset));
      float dq[2], dk[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float qe = e == 0 ? q.x : q.y, ke = e == 0 ? k.x : k.y, ee = e == 0 ? erase.x : erase.y;
        const float d_query = sums.query.c[n][2 * half + e], d_erase = sums.erase.c[n][2 * half + e];
        const float d_key = keys.c[n][2 * half + e], d_write = sums.write.c[n][2 * half + e];
        dq[e] = group.add(0, i, c + e, d_query + diagonal * ke);
        dk[e] = group.add(1, i, c + e, beta * d_erase + d_key + d_write + diagonal * qe);
        query_sum += qe * d_query + ee * d_erase - ke * d_key;
        write_sum += ke * d_write;
        strength_sum += ke * d_erase;
      }
      if (group.last() && i < job.at.tokens && feature + c < p.K) {
        const std::int64_t token = job.at.token + i;
        if (p.dq.data != nullptr) {
          *reinterpret_cast<std::uint32_t*>(row_pointer<T>(p.dq, job.at.batch, token, job.key_head) + feature + c) =
              pack<T>(dq[0], dq[1]);
        }
        if (p.dk.data != nullptr) {
          *reinterpret_cast<std::uint32_t*>(row_pointer<T>(p.dk, job.at.batch, token, job.key_head) + feature + c) =
              pack<T>(dk[0], dk[1]);
        }
      }
    }
    const auto quad_sum = [](float x) {
      x += __shfl_xor_sync(~0u, x, 1);
      return x + __shfl_xor_sync(~0u, x, 2);
    };
    query_sum = quad_sum(query_sum), write_sum = quad_sum(write_sum), strength_sum = quad_sum(strength_sum);
    if (threadIdx.x % 4 == 0) {
      const int side = at.column / 32;
      shared.rows.query[side][i] = query_sum;
      shared.rows.write[side][i] = write_sum;
      shared.rows.strength[side][i] = strength_sum;
    }
  }
}

/// The sum of S * dS+, by one warp.
template <class Shared>
__device__ __forceinline__ float state_sum(const Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum += shared.state_sum[e][lane] + shared.state_sum[e][lane + 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

}  // namespace rewy::cuda::pullback
