// What both forms of the pullback share: shared memory, the products with the states, the masked matrices.
#pragma once

#include <type_traits>

#include "cuda/device/chunk.cuh"
#include "cuda/traits.h"

namespace rewy::cuda::pullback {

inline constexpr int kThreads = 256;
inline constexpr int kBlocks = kTile / kBlock;  ///< 16-token blocks of a chunk

template <class Element, Gate kGate_, Strength kStrength_>
struct Config {
  using T = Element;
  static constexpr bool kVector = kGate_ == Gate::kVector;
  static constexpr bool kIndependent = kStrength_ == Strength::kIndependent;
};

struct alignas(128) TileStorage {
  unsigned char bytes[kTileBytes];
};

/// Tiles of one step over 64 value columns.
struct ValueTiles {
  TileStorage state_t, dstate_t;  ///< S^T, dS+^T   [64 value columns, 64 features]
  TileStorage d_o;                ///< [64 tokens, 64 value columns]
  TileStorage r_t, p_t;           ///< R^T, P^T     [64 value columns, 64 tokens]
};

/// Hq and D, each as the sum of two 16-bit tiles: 16 bits of mantissa where they enter a product.
struct MatrixTiles {
  TileStorage hq_high, hq_low, d_high, d_low;  ///< [64 tokens i, 64 tokens j]
};

/// Sums over a tile's 64 features, by token, each half of them apart.
struct RowHalves {
  float query[2][kTile];     ///< scalar gates: what the pairs and the state give to dG, diagonal pairs left out
  float write[2][kTile];     ///< scalar gates: F * dF
  float strength[2][kTile];  ///< shared strength: the part of dbeta that goes through the keys
};

/// FP32 [64 tokens, 64 features], pairs of columns placed so that the accumulators' rows do not meet in a bank.
struct Exchange {
  float values[kTile * kTile];
  __device__ __forceinline__ float& at(int row, int column) {
    return values[row * kTile + (column ^ ((row & 3) << 3))];
  }
  __device__ __forceinline__ float2& pair(int row, int column) {
    return *reinterpret_cast<float2*>(&values[row * kTile + (column ^ ((row & 3) << 3))]);
  }
};

struct ScalarGateStorage {
  float inside[kBlocks][kBlock][kBlock];  ///< decay from token j to i of one block
  float from_block[kTile];                ///< from the block's start, this token's included
  float to_block_end[kTile];              ///< of the tokens after this one
  float from_start[kTile], to_end[kTile];
};

struct VectorGateStorage {
  TileStorage q, k;                          ///< as they lie   [64 tokens, 64 features]
  float decay[kTile][kTile];                 ///< g, from step 0 on exp(g)
  float2 diagonal[kBlocks][kBlock][kBlock];  ///< {Hq, D} of pairs inside a block
  float block_decay[kBlocks][kTile];         ///< by feature
  float block_sum[2][kBlocks][kTile];        ///< of dG and of F * dF, by feature
};

/// What a block works on.
struct Job {
  ChunkAt at;
  std::int64_t slot;
  int key_head, group;
  int tile, tiles;  ///< of 64 features; tile number `tiles` is the values'
};

/// Grid: [chunk slot][query head][tile of 64 features, and one for the values].
template <bool kGrouped>
__device__ __forceinline__ Job find_job(const Params& p, unsigned block) {
  Job job;
  job.tiles = (p.K + kTile - 1) / kTile;
  job.tile = static_cast<int>(block % (job.tiles + 1));
  block /= job.tiles + 1;
  job.slot = block / p.H;
  job.key_head = static_cast<int>(block % p.H);
  job.group = kGrouped ? p.HV / p.H : 1;
  job.at = locate(p, job.slot);
  return job;
}

template <class C>
struct SharedStorage {
  union {
    struct {
      union {
        ValueTiles value;    ///< steps 1 to 3
        MatrixTiles matrix;  ///< steps 4 and 5
      };
      TileStorage operand[3];  ///< queries, keys, erase vectors   [64 tokens, 64 features]
    };
    Exchange exchange[C::kVector ? 4 : 1];  ///< step 6: gradients of queries, erase vectors, keys (pairs), keys (state)
  };
  std::conditional_t<C::kVector, VectorGateStorage, ScalarGateStorage> gate;
  float beta[kTile];
  float hq_diagonal[kTile];
  float state_sum[8][kTile];  ///< sum over value columns of S * dS+, eighth by eighth
  float decay[kTile];         ///< lambda by feature; scalar gates: element 0
  RowHalves rows;
  // Behind, for grouped heads: the sums of dq and dk, FP32 [2][64][64].
};

/// Accumulators of one head and feature tile. A warp has 16 token rows and 32 columns of each.
struct Sums {
  Accumulator<4> query;  ///< dO S^T
  Accumulator<4> erase;  ///< P S^T
  Accumulator<4> write;  ///< R dS+^T
  Accumulator<4> hq, d;  ///< dO R^T, P R^T: columns are tokens
};

struct Place {
  int row;     ///< first token row of this warp: 16 * (warp % 4)
  int column;  ///< first column: 32 * (warp / 4)
};
__device__ __forceinline__ Place place() {
  const int warp = fresh(static_cast<int>(threadIdx.x)) / 32;
  return {16 * (warp % 4), 32 * (warp / 4)};
}

template <class T>
__device__ __forceinline__ void copy_value_tiles(const Params& p, const Job& job, int head, int feature, int value,
                                                 ValueTiles& tiles) {
  const std::int64_t index = job.slot * p.HV + head;
  const int columns = p.V - value;
  const auto copy = [](TileStorage& tile, const T* from, std::int64_t stride, int rows, int valid) {
    copy_tile<kThreads>(ptx::shared_address(&tile), from, stride, rows, valid);
  };
  const std::int64_t state = (index * p.V + value) * p.K + feature;
  const std::int64_t token = (index * p.V + value) * kTile;
  copy(tiles.d_o, row_pointer<const T>(p.d_o, job.at.batch, job.at.token, head) + value, p.d_o.token, job.at.tokens,
       columns);
  copy(tiles.r_t, static_cast<const T*>(p.r_t) + token, kTile, columns, kTile);
  copy(tiles.p_t, static_cast<const T*>(p.p_t) + token, kTile, columns, kTile);
  copy(tiles.state_t, static_cast<const T*>(p.state_t) + state, p.K, columns, p.K - feature);
  copy(tiles.dstate_t, static_cast<const T*>(p.dstate_t) + state, p.K, columns, p.K - feature);
  ptx::copy_commit();
}

/// A tile as rows of one head from column `first` on, in 16-byte pieces, where the rows are wanted.
template <class T>
__device__ __forceinline__ void store_tile(const TileStorage& tile, const Rows& rows, const ChunkAt& at, int head,
                                           int first, int columns) {
  if (rows.data == nullptr) return;
  const int row = static_cast<int>(threadIdx.x) / 8, column = static_cast<int>(threadIdx.x) % 8 * 8;
  T* to = row_pointer<T>(rows, at.batch, at.token + row, head) + first + column;
  const int left = first + column < columns ? at.tokens - row : 0;
#pragma unroll
  for (int i = 0; i < kTile; i += kThreads / 8) {
    if (i < left) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile.bytes + tile_offset(row + i, column));
    }
    to += kThreads / 8 * rows.token;
  }
}

/// dV = w P, dw = v P and, of shared strengths, <v, P> by token: a block of its own, so that the others' registers and
/// their first tile are spared it. Tiles are rewritten where they lie and stored in 16-byte pieces.
template <class C, class Shared>
__device__ __forceinline__ void pull_back_values(const Params& p, const Job& job, int head, Shared& shared,
                                                 RowSums* row_sums) {
  using T = typename C::T;
  const Place at = place();
  TileStorage& sensitivity = shared.value.p_t;
  TileStorage& values = shared.value.d_o;
  TileStorage& strengths = shared.value.r_t;
  const std::int64_t index = job.slot * p.HV + head;
  float sums[2] = {0.0f, 0.0f};
  if (!C::kIndependent && threadIdx.x < kTile) shared.beta[threadIdx.x] = shared_strength(p, job.at, head, threadIdx.x);
  for (int value = 0; value < p.V; value += kTile) {
    const auto copy = [&](TileStorage& tile, const Rows& rows) {
      copy_tile<kThreads>(ptx::shared_address(&tile),
                          row_pointer<const T>(rows, job.at.batch, job.at.token, head) + value, rows.token,
                          job.at.tokens, p.V - value);
    };
    const auto store = [&](const TileStorage& tile, const Rows& rows) {
      store_tile<T>(tile, rows, job.at, head, value, p.V);
    };
    __syncthreads();  // the last tiles have been stored
    copy_tile<kThreads>(ptx::shared_address(&sensitivity), static_cast<const T*>(p.p_t) + (index * p.V + value) * kTile,
                        kTile, p.V - value, kTile);
    copy(values, p.v);
    if constexpr (C::kIndependent) copy(strengths, p.w);
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = at.column + 16 * j;
      std::uint32_t a[4];
      load_a_transposed(ptx::shared_address(&sensitivity), column, at.row, a);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = at.row + lane_row() + 8 * (e % 2);
        const std::uint32_t offset = tile_offset(row, column + lane_column() + 8 * (e / 2));
        std::uint32_t& v_pair = *reinterpret_cast<std::uint32_t*>(values.bytes + offset);
        const float2 x = unpack<T>(a[e]), v = unpack<T>(v_pair);
        float2 strength;
        if constexpr (C::kIndependent) {
          std::uint32_t& w_pair = *reinterpret_cast<std::uint32_t*>(strengths.bytes + offset);
          strength = unpack<T>(w_pair);
          w_pair = pack<T>(v.x * x.x, v.y * x.y);
        } else {
          strength.x = strength.y = shared.beta[row];
          sums[e % 2] += v.x * x.x + v.y * x.y;
        }
        v_pair = pack<T>(strength.x * x.x, strength.y * x.y);
      }
    }
    __syncthreads();
    store(values, p.dv);
    if constexpr (C::kIndependent) store(strengths, p.dw);
  }
  if constexpr (!C::kIndependent) {
    RowHalves& rows = shared.rows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[e] += __shfl_xor_sync(~0u, sums[e], 1);
      sums[e] += __shfl_xor_sync(~0u, sums[e], 2);
      if (threadIdx.x % 4 == 0) rows.strength[at.column / 32][at.row + lane_row() + 8 * e] = sums[e];
    }
    __syncthreads();
    if (threadIdx.x < kTile)
      row_sums->strength[threadIdx.x] = rows.strength[0][threadIdx.x] + rows.strength[1][threadIdx.x];
  }
}

/// Steps 1 to 3: every product over the value columns. when_landed() is called once the operands are there.
template <class C, class Shared, class Fn>
__device__ __forceinline__ void multiply_values(const Params& p, const Job& job, int head, int feature, Shared& shared,
                                                Sums& sums, Fn&& when_landed) {
  using T = typename C::T;
  const Place at = place();
  sums.query.clear(), sums.erase.clear(), sums.write.clear(), sums.hq.clear(), sums.d.clear();
  float2 state_sum = {0.0f, 0.0f};
  const int pair = threadIdx.x % 32, eighth = threadIdx.x / 32;
  for (int value = 0; value < p.V; value += kTile) {
    if (value > 0) {
      __syncthreads();  // the tiles have been read
      copy_value_tiles<T>(p, job, head, feature, value, shared.value);
    }
    ptx::copy_wait<0>();
    __syncthreads();
    if (value == 0) when_landed();
    const ValueTiles& tiles = shared.value;
    const std::uint32_t state = ptx::shared_address(&tiles.state_t), dstate = ptx::shared_address(&tiles.dstate_t);
    const std::uint32_t d_o = ptx::shared_address(&tiles.d_o);
    const std::uint32_t r = ptx::shared_address(&tiles.r_t), sensitivity = ptx::shared_address(&tiles.p_t);
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
      if (value + 16 * j >= p.V) break;
      std::uint32_t a_o[4], a_p[4], a_r[4];
      load_a(d_o, at.row, 16 * j, a_o);
      load_a_transposed(sensitivity, 16 * j, at.row, a_p);
      load_a_transposed(r, 16 * j, at.row, a_r);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        std::uint32_t b[4];
        load_b_transposed(state, 16 * j, at.column + 16 * n, b);
        multiply_pair<T>(sums.query, 2 * n, a_o, b);
        multiply_pair<T>(sums.erase, 2 * n, a_p, b);
        load_b_transposed(dstate, 16 * j, at.column + 16 * n, b);
        multiply_pair<T>(sums.write, 2 * n, a_r, b);
        load_b_transposed(r, 16 * j, at.column + 16 * n, b);
        multiply_pair<T>(sums.hq, 2 * n, a_o, b);
        multiply_pair<T>(sums.d, 2 * n, a_p, b);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const std::uint32_t offset = tile_offset(8 * eighth + e, 2 * pair);
      const float2 x = unpack<T>(*reinterpret_cast<const std::uint32_t*>(tiles.state_t.bytes + offset));
      const float2 y = unpack<T>(*reinterpret_cast<const std::uint32_t*>(tiles.dstate_t.bytes + offset));
      state_sum.x += x.x * y.x;
      state_sum.y += x.y * y.y;
    }
  }
  *reinterpret_cast<float2*>(&shared.state_sum[eighth][2 * pair]) = state_sum;
}

/// Stores a pair of columns of a matrix as high and low halves.
template <class T>
__device__ __forceinline__ void store_halves(TileStorage& high, TileStorage& low, int row, int column, float x,
                                             float y) {
  const std::uint32_t upper = pack<T>(x, y);
  const float2 stored = unpack<T>(upper);
  const std::uint32_t offset = tile_offset(row, column);
  *reinterpret_cast<std::uint32_t*>(high.bytes + offset) = upper;
  *reinterpret_cast<std::uint32_t*>(low.bytes + offset) = pack<T>(x - stored.x, y - stored.y);
}

/// acc += (high + low) b, the matrix's blocks row, column; transposed: its transpose.
template <class T, bool kTransposed>
__device__ __forceinline__ void multiply_block(const TileStorage& high, const TileStorage& low, int row, int column,
                                               const TileStorage& operand, int first_feature, Accumulator<4>& acc) {
  std::uint32_t a[2][4];
  if constexpr (kTransposed) {
    load_a_transposed(ptx::shared_address(&high), row, column, a[0]);
    load_a_transposed(ptx::shared_address(&low), row, column, a[1]);
  } else {
    load_a(ptx::shared_address(&high), row, column, a[0]);
    load_a(ptx::shared_address(&low), row, column, a[1]);
  }
  const int inner = kTransposed ? row : column;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    std::uint32_t b[4];
    load_b_transposed(ptx::shared_address(&operand), inner, first_feature + 16 * n, b);
    multiply_pair<T>(acc, 2 * n, a[0], b);
    multiply_pair<T>(acc, 2 * n, a[1], b);
  }
}

/// Sums of a warp's 64 values, two a lane, over what comes from an element on: its suffix, as a suffix.
__device__ __forceinline__ void suffix_sums(float (&x)[2]) {
  const int lane = threadIdx.x & 31;
  float after = x[0] + x[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float upper = __shfl_down_sync(~0u, after, step);
    if (lane + step < 32) after += upper;
  }
  const float rest = __shfl_down_sync(~0u, after, 1);
  x[1] += lane == 31 ? 0.0f : rest;
  x[0] += x[1];
}
/// Likewise over what comes before an element, exclusive.
__device__ __forceinline__ void prefix_sums(float (&x)[2]) {
  const int lane = threadIdx.x & 31;
  float before = x[0] + x[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float lower = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += lower;
  }
  const float rest = __shfl_up_sync(~0u, before, 1);
  const float start = lane == 0 ? 0.0f : rest;
  x[1] = start + x[0];
  x[0] = start;
}

/// Queries' and keys' gradients of one element, summed over the heads of the group: stored by the last head.
template <class T, bool kGrouped>
struct GroupSum {
  float* sums;  ///< [2][64][64]; not used where a group is one head
  int member, group;

  __device__ __forceinline__ float add(int which, int row, int column, float x) const {
    if constexpr (!kGrouped) return x;
    float& sum = sums[(which * kTile + row) * kTile + column];
    return sum = member == 0 ? x : sum + x;
  }
  __device__ __forceinline__ bool last() const { return !kGrouped || member + 1 == group; }
};

}  // namespace rewy::cuda::pullback
