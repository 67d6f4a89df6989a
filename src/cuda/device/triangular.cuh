// The inverse of a unit lower triangular matrix [64, 64] in shared memory, in place, in FP32-class arithmetic: never
// powers of the matrix, never 16-bit numbers in between.
#pragma once

#include "cuda/device/tile.cuh"

namespace rewy::cuda {

/// Floats from one row to the next: the A fragments of TF32 products then hit every bank once, and rows stay aligned
/// for 16-byte accesses.
inline constexpr int kTriangularStride = kTile + 4;

__device__ __forceinline__ int triangular_offset(int row, int column) {
  return row * kTriangularStride + column;
}

/// Step 1, by one warp: the diagonal block [16, 16] at `at` of L becomes that of (I + L)^-1, zeros above its diagonal
/// included. Lane c solves for column c mod 16 by forward substitution. Once x[k] is final it leaves all later rows,
/// so that the chain of dependent operations is 16 and not 120 long.
__device__ __forceinline__ void invert_diagonal_block(float* m, int at) {
  const int lane = threadIdx.x & 31, column = lane & (kBlock - 1);
  float x[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) x[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < kBlock; k += 4) {
#pragma unroll
    for (int r = k + 1; r < kBlock; ++r) {
      const float4 l = *reinterpret_cast<const float4*>(m + triangular_offset(at + r, at + k));
      x[r] -= l.x * x[k];
      if (r > k + 1) x[r] -= l.y * x[k + 1];
      if (r > k + 2) x[r] -= l.z * x[k + 2];
      if (r > k + 3) x[r] -= l.w * x[k + 3];
    }
  }
  __syncwarp();  // all lanes have read L before it is overwritten
  if (lane < kBlock) {
#pragma unroll
    for (int r = 0; r < kBlock; ++r) m[triangular_offset(at + r, at + column)] = x[r];
  }
}

/// x = high + low, both TF32: together 21 bits of mantissa.
__device__ __forceinline__ void split_tf32(float x, std::uint32_t& high, std::uint32_t& low) {
  high = ptx::to_tf32(x);
  low = ptx::to_tf32(x - __uint_as_float(high));
}

/// d += a b: [16, depth] times [depth, 8], depth a multiple of 8, by one warp as three TF32 products. `a` and `b` point
/// to their first elements in a matrix of stride kTriangularStride, b as [k][n].
__device__ __forceinline__ void multiply_add_tf32x3(float (&d)[4], const float* a, const float* b, int depth) {
  const int row = (threadIdx.x & 31) >> 2, column = threadIdx.x & 3;
  a += triangular_offset(row, column);
  b += triangular_offset(column, row);
  for (int k = 0; k < depth; k += 8) {
    std::uint32_t high[4], low[4], b_high[2], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(a[triangular_offset(8 * (i & 1), k + 4 * (i >> 1))], high[i], low[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) split_tf32(b[triangular_offset(k + 4 * i, 0)], b_high[i], b_low[i]);
    ptx::multiply_add_tf32(d, low, b_high[0], b_high[1]);
    ptx::multiply_add_tf32(d, high, b_low[0], b_low[1]);
    ptx::multiply_add_tf32(d, high, b_high[0], b_high[1]);
  }
}

/// Stores factor * d, [16, 8], from `to` on.
__device__ __forceinline__ void store_triangular(float* to, const float (&d)[4], float factor) {
  to += triangular_offset(lane_row(), lane_column());
  *reinterpret_cast<float2*>(to) = {factor * d[0], factor * d[1]};
  *reinterpret_cast<float2*>(to + triangular_offset(8, 0)) = {factor * d[2], factor * d[3]};
}

// Merging: with both inverses on the diagonal at hand, the block below is -A22 (L21 A11). The product in brackets waits
// in the mirrored block above the diagonal, which nothing else uses.

/// Step 2, by one warp: 16 to 32, at `at`.
__device__ __forceinline__ void merge_16(float* m, int at) {
  const int low = at + kBlock;
  float d[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    multiply_add_tf32x3(d[n], m + triangular_offset(low, at), m + triangular_offset(at, at + 8 * n), kBlock);
    store_triangular(m + triangular_offset(at, low + 8 * n), d[n], 1.0f);
    d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
  }
  __syncwarp();  // the products are written, and L21 is read for the last time
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    multiply_add_tf32x3(d[n], m + triangular_offset(low, low), m + triangular_offset(at, low + 8 * n), kBlock);
    store_triangular(m + triangular_offset(low, at + 8 * n), d[n], -1.0f);
  }
}

/// Step 3, by the block's eight warps: 32 to 64. Each warp has a unit [16, 8]. Blocks above the diagonal hold products
/// of step 2 and not zeros: they are left out of the sums.
__device__ __forceinline__ void merge_32(float* m, int warp) {
  const int row = kBlock * (warp & 1), column = 8 * (warp >> 1), first = column & ~(kBlock - 1);
  float d[4] = {};
  multiply_add_tf32x3(d, m + triangular_offset(32 + row, first), m + triangular_offset(first, column), 32 - first);
  store_triangular(m + triangular_offset(row, 32 + column), d, 1.0f);
  __syncthreads();
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  multiply_add_tf32x3(d, m + triangular_offset(32 + row, 32), m + triangular_offset(0, 32 + column), row + kBlock);
  store_triangular(m + triangular_offset(32 + row, column), d, -1.0f);
}

}  // namespace rewy::cuda
