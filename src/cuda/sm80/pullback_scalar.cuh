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
  } else if (p.g.data != nullptr && thread >= 64 && thread < 128) {
    // One column j of a block: products from j + 1 on.
    const int j = thread - 64, block = j / kBlock, first = block * kBlock;
    const float own = scalar_decay(p, job.at, head, j);
    float product = 1.0f, from_block = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float decay = __shfl_sync(~0u, own, (thread & kBlock) + i);
      if (first + i > j) product *= decay;
      if (first + i <= j) from_block *= decay;
      gate.inside[block][i][j - first] = product;
    }
    gate.from_block[j] = from_block;
    gate.to_block_end[j] = product;
  }
  // A barrier follows before the first use.
}

/// Step 0 of a tile: q and k as they lie.
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

/// factor * x, 0 where the factor is 0 whatever x is: sums above the diagonal may be anything.
__device__ __forceinline__ float masked(float factor, float x) {
  return factor == 0.0f ? 0.0f : factor * x;
}

/// Step 4: Hq and D, masked and decayed. A warp's columns are of two blocks: one decay from the row's block to the
/// column's, or inside the block, or none.
template <class C, class Shared>
__device__ __forceinline__ void store_matrices(const Params& p, const Sums& sums, Shared& shared) {
  using T = typename C::T;
  const Place at = place();
  const ScalarGateStorage& gate = shared.gate;
  const int row_block = at.row / kBlock;
  const bool gated = p.g.data != nullptr;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int j = at.column + 8 * n + lane_column(), column_block = (at.column + 8 * n) / kBlock;
    float between = 1.0f;  // decay of the whole blocks between the two
    for (int block = column_block + 1; gated && block < row_block; ++block) {
      between *= gate.from_block[block * kBlock + kBlock - 1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at.row + lane_row() + 8 * half;
      float2 decay = {1.0f, 1.0f};
      if (gated && column_block < row_block) {
        const float2 to_end = *reinterpret_cast<const float2*>(&gate.to_block_end[j]);
        const float from_end = gate.from_block[i] * between;
        decay = {from_end * to_end.x, from_end * to_end.y};
      } else if (gated && column_block == row_block) {
        decay = *reinterpret_cast<const float2*>(&gate.inside[row_block][i % kBlock][j % kBlock]);
      }
      const float hq[2] = {sums.hq.c[n][2 * half], sums.hq.c[n][2 * half + 1]};
      if (j == i) shared.hq_diagonal[i] = p.scale * hq[0];
      if (j + 1 == i) shared.hq_diagonal[i] = p.scale * hq[1];
      decay = {j < i ? decay.x : 0.0f, j + 1 < i ? decay.y : 0.0f};
      store_halves<T>(shared.matrix.hq_high, shared.matrix.hq_low, i, j, masked(p.scale * decay.x, hq[0]),
                      masked(p.scale * decay.y, hq[1]));
      store_halves<T>(shared.matrix.d_high, shared.matrix.d_low, i, j, masked(-decay.x, sums.d.c[n][2 * half]),
                      masked(-decay.y, sums.d.c[n][2 * half + 1]));
    }
  }
}

/// beta k in the third operand tile, rounded once.
template <class C, class Shared>
__device__ __forceinline__ void make_erase_operand(Shared& shared) {
  using T = typename C::T;
#pragma unroll
  for (int piece = threadIdx.x; piece < kTileBytes / 16; piece += kThreads) {
    const float beta = shared.beta[piece / 8];  // pieces keep to their rows, in whatever order
    uint4 x = reinterpret_cast<const uint4*>(shared.operand[1].bytes)[piece];
    for (std::uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) {
      const float2 k = unpack<T>(*pair);
      *pair = pack<T>(beta * k.x, beta * k.y);
    }
    reinterpret_cast<uint4*>(shared.operand[2].bytes)[piece] = x;
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
  __syncthreads();  // the operands have been read
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
      if (group.last()) {  // where q and k lay
        *reinterpret_cast<std::uint32_t*>(shared.operand[0].bytes + offset) = pack<T>(dq[0], dq[1]);
        *reinterpret_cast<std::uint32_t*>(shared.operand[1].bytes + offset) = pack<T>(dk[0], dk[1]);
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
  __syncthreads();
  if (group.last()) {
    store_tile<T>(shared.operand[0], p.dq, job.at, job.key_head, feature, p.K);
    store_tile<T>(shared.operand[1], p.dk, job.at, job.key_head, feature, p.K);
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
