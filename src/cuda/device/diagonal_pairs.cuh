// Vector gates inside a block of 16 tokens, pair by pair in FP32: how 64 threads of a [64, 64] problem share the pairs
// (i, j), j < i, of one diagonal block, and where the operands lie.
//
// The operands are read row by row here, never by ldmatrix, so 16-bit tiles are plain rows of 128 bytes: the address of
// a later row differs by a constant.
#pragma once

#include "cuda/device/tile.cuh"

namespace rewy::cuda {

inline constexpr int kRowBytes = kTile * 2;       ///< of a 16-bit tile
inline constexpr int kDecayRowBytes = kTile * 4;  ///< of the FP32 decays

/// Byte of a row's feature among the decays. A row's even 16-byte pieces lie in its first half, the odd ones in the
/// second, rotated: without bank conflicts for lanes that take one or two features each, in order, and for lanes that
/// take eight as two pieces.
__device__ __forceinline__ int decay_offset(int row, int feature) {
  const int piece = feature >> 2;
  return row * kDecayRowBytes + (((piece >> 1) ^ ((piece & 1) * 12)) << 4) + ((feature & 3) << 2);
}

/// Eight 16-bit elements, as FP32.
template <class T>
__device__ __forceinline__ void load_eight(const unsigned char* from, float (&x)[8]) {
  const uint4 word = *reinterpret_cast<const uint4*>(from);
  const float2 a = unpack<T>(word.x), b = unpack<T>(word.y), c = unpack<T>(word.z), d = unpack<T>(word.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

/// A thread's 15 pairs: first those of column `low`, then those of column 15 - low, each downwards. Lanes l and l ^ 1,
/// 2, 4 share pairs and have eight features each.
struct DiagonalPairs {
  int first_row;  ///< of the block
  int low;
  __device__ __forceinline__ explicit DiagonalPairs(int thread)
      : first_row(kBlock * (thread >> 6)), low((thread & 63) >> 3) {}
  __device__ __forceinline__ int high() const { return kBlock - 1 - low; }
  __device__ __forceinline__ int row(int step) const { return step >= high() ? step + 1 : low + 1 + step; }
  __device__ __forceinline__ int column(int step) const { return step >= high() ? high() : low; }
};

/// Sums over a thread's eight features: [step] of products with the erase keys, [16 + step] with the queries; [15] and
/// [31] of queries and keys of the tokens low and 15 - low themselves.
using PairSums = float[2 * kBlock];

__device__ __forceinline__ void add_dot(float& sum, const float (&x)[8], const float (&y)[8]) {
#pragma unroll
  for (int f = 0; f < 8; ++f) sum += x[f] * y[f];
}

/// Adds one tile of 64 features. A key is decayed on its way down its column by one multiplication a row. `b` null:
/// shared strengths, which the caller multiplies in.
template <class T, bool kIndependent>
__device__ __forceinline__ void add_diagonal_pairs(const unsigned char* q, const unsigned char* k,
                                                   const unsigned char* b, const unsigned char* decay, PairSums& sums,
                                                   int thread) {
  const DiagonalPairs pairs(thread);
  const int piece = thread & 7;
  int at = (pairs.first_row + pairs.low) * kRowBytes + 16 * piece;
  int even = decay_offset(pairs.first_row + pairs.low, 8 * piece), odd = even ^ decay_offset(0, 4);
  float sent[8], x[8];
  const int high = (pairs.first_row + pairs.high()) * kRowBytes + 16 * piece;
  load_eight<T>(k + high, sent);
  load_eight<T>(q + high, x);
  add_dot(sums[2 * kBlock - 1], x, sent);
  load_eight<T>(k + at, sent);
  load_eight<T>(q + at, x);
  add_dot(sums[kBlock - 1], x, sent);
#pragma unroll
  for (int step = 0; step < kBlock - 1; ++step) {
    __syncwarp();  // keeps the next rows' loads from taking the registers of the sums
    if (step >= kBlock / 2 && step == pairs.high()) {  // high() is at least 8
      at -= pairs.low * kRowBytes;
      even -= pairs.low * kDecayRowBytes;
      odd -= pairs.low * kDecayRowBytes;
      load_eight<T>(k + at + step * kRowBytes, sent);
    }
    const float4 a = *reinterpret_cast<const float4*>(decay + even + (step + 1) * kDecayRowBytes);
    const float4 c = *reinterpret_cast<const float4*>(decay + odd + (step + 1) * kDecayRowBytes);
    sent[0] *= a.x, sent[1] *= a.y, sent[2] *= a.z, sent[3] *= a.w;
    sent[4] *= c.x, sent[5] *= c.y, sent[6] *= c.z, sent[7] *= c.w;
    load_eight<T>(q + at + (step + 1) * kRowBytes, x);
    add_dot(sums[kBlock + step], x, sent);
    load_eight<T>(k + at + (step + 1) * kRowBytes, x);
    if constexpr (kIndependent) {
      float strength[8];
      load_eight<T>(b + at + (step + 1) * kRowBytes, strength);
#pragma unroll
      for (int f = 0; f < 8; ++f) x[f] *= strength[f];
    }
    add_dot(sums[step], x, sent);
  }
}

/// Adds the sums of the eight lanes that share pairs. Each halving of the group halves what a lane keeps: lane l ends
/// with sums 4 (l mod 8) to 4 (l mod 8) + 3 in its first four.
template <int kStep = 4>
__device__ __forceinline__ void reduce_scatter(PairSums& sums) {
  constexpr int kKept = 4 * kStep;
  const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float mine = upper ? sums[i + kKept] : sums[i], other = upper ? sums[i] : sums[i + kKept];
    sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, kStep);
  }
  if constexpr (kStep > 1) reduce_scatter<kStep / 2>(sums);
}

}  // namespace rewy::cuda
