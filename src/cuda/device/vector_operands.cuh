// Vector gates in prepare: what a block of 256 threads keeps of one tile of 64 features, and the products below the
// diagonal by the tensor cores. Steps as numbered in docs/kernels/prepare.md.
#pragma once

#include "cuda/device/diagonal_pairs.cuh"

namespace rewy::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kBlocks = kTile / kBlock;              ///< of 16 tokens in a chunk
inline constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;  ///< of blocks, below the diagonal
inline constexpr int kHalves = kTile / 8;                   ///< half blocks of 8 tokens, one a warp
inline constexpr int kBlockBytes = kTileBytes / kBlocks;    ///< of a tile's 16 rows
inline constexpr int kUnits = 3;                            ///< [16, 8] products of a warp below the diagonal

template <class Config>
struct VectorOperands {
  alignas(128) unsigned char q[kTileBytes], k[kTileBytes], b[Config::kIndependent ? kTileBytes : 16];
  alignas(128) unsigned char decay[kTile * kDecayRowBytes];        ///< g, then exp(g); see decay_offset
  alignas(128) unsigned char receive_q[kTileBytes - kBlockBytes];  ///< rows 16 to 63
  alignas(128) unsigned char receive_k[kTileBytes - kBlockBytes];
  alignas(128) unsigned char send[kPairs * kBlockBytes];  ///< a block of 16 rows for each pair
};

template <class Config>
struct VectorFactors {
  /// Of a warp's units, those whose sums wait here from one tile to the next; as many as leave room for three blocks.
  static constexpr int kParked = Config::kIndependent ? 2 : 3;
  float4 parked[kParked][kThreads];
  alignas(16) float half_product[kHalves][kTile];  ///< decays of 8 tokens, by feature
};

/// Step 4: the 16-bit operands of the blocks below the diagonal. Warp h has rows 8 h to 8 h + 7, its lane two features.
template <class Config>
__device__ __forceinline__ void stage_operands(VectorOperands<Config>& operands, const VectorFactors<Config>& factors,
                                               int thread) {
  using T = typename Config::T;
  const int half = thread >> 5, block = half >> 1, feature = 2 * (thread & 31);
  const auto product = [&](int h) { return *reinterpret_cast<const float2*>(&factors.half_product[h][feature]); };
  const auto decay = [&](int r) {
    return *reinterpret_cast<const float2*>(operands.decay + decay_offset(8 * half, feature) + r * kDecayRowBytes);
  };
  const auto raw = [&](const unsigned char* tile, int r) {
    return unpack<T>(*reinterpret_cast<const std::uint32_t*>(tile + (8 * half + r) * kRowBytes + 2 * feature));
  };
  const auto put = [&](unsigned char* tile, int row, int r, float x, float y) {  // row: a multiple of 8
    *reinterpret_cast<std::uint32_t*>(tile + row * kRowBytes + tile_offset(r, feature)) = pack<T>(x, y);
  };

  if (block > 0) {  // receive: from the block's first row
    float2 run = half & 1 ? product(half - 1) : float2{1.0f, 1.0f};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float2 a = decay(r);
      run = {run.x * a.x, run.y * a.y};
      const float2 query = raw(operands.q, r);
      float2 key = raw(operands.k, r);
      if constexpr (Config::kIndependent) {
        const float2 b = raw(operands.b, r);
        key = {key.x * b.x, key.y * b.y};
      }
      put(operands.receive_q, 8 * half - kBlock, r, query.x * run.x, query.y * run.y);
      put(operands.receive_k, 8 * half - kBlock, r, key.x * run.x, key.y * run.y);
    }
  }

  const int later = kBlocks - 1 - block,
            first = block * (2 * kBlocks - 1 - block) / 2;  // the pairs (block, block + 1), ...
  if (later > 0) {  // send: to the block's last row, then through the whole blocks up to the receiving one
    float2 between[kBlocks - 1];
    between[0] = {1.0f, 1.0f};
#pragma unroll
    for (int n = 1; n < kBlocks - 1; ++n) {
      between[n] = between[n - 1];
      if (n < later) {
        const float2 x = product(2 * (block + n)), y = product(2 * (block + n) + 1);
        between[n] = {between[n].x * (x.x * y.x), between[n].y * (x.y * y.y)};
      }
    }
    float2 run = half & 1 ? float2{1.0f, 1.0f} : product(half + 1);
#pragma unroll
    for (int r = 7; r >= 0; --r) {
      const float2 key = raw(operands.k, r);
#pragma unroll
      for (int n = 0; n < kBlocks - 1; ++n) {
        if (n < later) {
          put(operands.send, kBlock * (first + n) + 8 * (half & 1), r, key.x * (run.x * between[n].x),
              key.y * (run.y * between[n].y));
        }
      }
      const float2 a = decay(r);
      run = {run.x * a.x, run.y * a.y};
    }
  }
}

/// The products below the diagonal in units of [16, 8], three a warp: those of L by warps 0 to 3, of Cq by 4 to 7.
struct Unit {
  int receiver;  ///< block of the rows
  int column;    ///< first column in the chunk
  int send_row;  ///< of that column
  __device__ __forceinline__ static bool of_cq() { return threadIdx.x >= kThreads / 2; }
  __device__ __forceinline__ Unit(int u, int thread) {
    const int unit = kUnits * ((thread >> 5) & 3) + u, pair = unit >> 1;  // 0-1, 0-2, 0-3, 1-2, 1-3, 2-3
    const int sender = pair < 3 ? 0 : pair < 5 ? 1 : 2;
    receiver = pair < 3 ? pair + 1 : pair < 5 ? pair - 1 : 3;
    column = kBlock * sender + 8 * (unit & 1);
    send_row = 8 * unit;
  }
};

/// Step 5: one feature tile of a unit. Addresses follow from `thread` alone, which the caller made anew for this tile.
template <class T>
__device__ __forceinline__ void unit_product(float (&sum)[4], std::uint32_t receive, std::uint32_t send,
                                             const Unit& unit, int thread) {
  const int lane = thread & 31;
  const auto load_receiving = [&](int depth, std::uint32_t(&rows)[4]) {  // load_a, but by `thread`
    const int row = kBlock * (unit.receiver - 1) + (lane & 15);
    ptx::load_matrices(receive + tile_offset(row, depth + (lane >> 4) * 8), rows);
  };
#pragma unroll
  for (int depth = 0; depth < kTile; depth += 32) {
    std::uint32_t rows[4], columns[4];
    // Eight columns at a depth of 32: of load_b's lanes, 16 to 31 are moved on in depth and not in columns.
    ptx::load_matrices(send + tile_offset(unit.send_row + (lane & 7), depth + (lane >> 3) * 8), columns);
    load_receiving(depth, rows);
    ptx::multiply_add<T>(sum, rows, columns[0], columns[1]);
    load_receiving(depth + 16, rows);
    ptx::multiply_add<T>(sum, rows, columns[2], columns[3]);
  }
}

}  // namespace rewy::cuda
