// The tile every kernel works on: rows of 64 16-bit elements in shared memory, 128 bytes a row. The 16-byte piece c of
// row r lies at place c ^ (r % 8), so that eight rows of one piece, and eight pieces of one row, hit all 32 banks once.
// A wider operand is several tiles, one for each 64 columns.
#pragma once

#include "cuda/device/ptx.cuh"
#include "rewy/types.h"

namespace rewy::cuda {

inline constexpr int kTile = 64;                      ///< rows and columns of a square tile; also the chunk length
inline constexpr int kTileBytes = kTile * kTile * 2;  ///< of 64 rows
inline constexpr int kBlock = 16;                     ///< tokens of a sub-block

/// Byte offset of element (row, column), column < 64.
__device__ __forceinline__ std::uint32_t tile_offset(int row, int column) {
  return static_cast<std::uint32_t>(row * 128 + (((column >> 3) ^ (row & 7)) << 4) + ((column & 7) << 1));
}

/// x, as if computed here: what follows from it is not kept in registers from one feature tile to the next, where the
/// addresses of all steps would crowd out the sums.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Fragments. Rows and columns of an operand are multiples of 16 here, so that they enter a lane's address by one sum
// and one exclusive or: a lane keeps one address for each kind of fragment, not one for each fragment.
__device__ __forceinline__ std::uint32_t fragment_address(std::uint32_t tile, int row, int column, int lane_row,
                                                          int lane_piece) {
  return ((tile + tile_offset(lane_row, 8 * lane_piece)) ^ static_cast<std::uint32_t>(column << 1)) +
         static_cast<std::uint32_t>(row * 128);
}

/// A fragment [16, 16] of an operand stored [rows m][columns k].
__device__ __forceinline__ void load_a(std::uint32_t tile, int m, int k, std::uint32_t (&a)[4]) {
  const int l = threadIdx.x & 31;
  ptx::load_matrices(fragment_address(tile, m, k, l & 15, l >> 4), a);
}
/// A fragment [16, 16] of an operand stored transposed, [rows k][columns m].
__device__ __forceinline__ void load_a_transposed(std::uint32_t tile, int k, int m, std::uint32_t (&a)[4]) {
  const int l = threadIdx.x & 31;
  ptx::load_matrices_transposed(fragment_address(tile, k, m, (l & 7) + (l >> 4) * 8, (l >> 3) & 1), a);
}
/// Two B fragments [16, 8] + [16, 8] (columns n to n + 15) of an operand stored [rows n][columns k]:
/// b[0], b[1] for columns n to n + 7, b[2], b[3] for the others.
__device__ __forceinline__ void load_b(std::uint32_t tile, int n, int k, std::uint32_t (&b)[4]) {
  const int l = threadIdx.x & 31;
  ptx::load_matrices(fragment_address(tile, n, k, (l & 7) + (l >> 4) * 8, (l >> 3) & 1), b);
}
/// The same of an operand stored [rows k][columns n].
__device__ __forceinline__ void load_b_transposed(std::uint32_t tile, int k, int n, std::uint32_t (&b)[4]) {
  const int l = threadIdx.x & 31;
  ptx::load_matrices_transposed(fragment_address(tile, k, n, l & 15, l >> 4), b);
}

/// Accumulators [16, 8 kN]: c[n][0], c[n][1] are row l / 4, columns 8 n + 2 (l % 4) + {0, 1}; c[n][2], c[n][3] row + 8.
template <int kN>
struct Accumulator {
  float c[kN][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kN; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
  }
};

__device__ __forceinline__ int lane_row() {
  return (threadIdx.x & 31) >> 2;
}
__device__ __forceinline__ int lane_column() {
  return (threadIdx.x & 3) * 2;
}

/// acc[n], acc[n + 1] += a b, for the two B fragments of one load.
template <class T, int kN>
__device__ __forceinline__ void multiply_pair(Accumulator<kN>& acc, int n, const std::uint32_t (&a)[4],
                                              const std::uint32_t (&b)[4]) {
  ptx::multiply_add<T>(acc.c[n], a, b[0], b[1]);
  ptx::multiply_add<T>(acc.c[n + 1], a, b[2], b[3]);
}

// Pairs of 16-bit elements in a register, the lower column in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float lower, float upper);
template <>
__device__ __forceinline__ std::uint32_t pack<ptx::BFloat>(float lower, float upper) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(lower, upper);
  return reinterpret_cast<const std::uint32_t&>(x);
}
template <>
__device__ __forceinline__ std::uint32_t pack<ptx::Half>(float lower, float upper) {
  const __half2 x = __floats2half2_rn(lower, upper);
  return reinterpret_cast<const std::uint32_t&>(x);
}
template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t x);
template <>
__device__ __forceinline__ float2 unpack<ptx::BFloat>(std::uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<ptx::Half>(std::uint32_t x) {
  return __half22float2(reinterpret_cast<const __half2&>(x));
}

/// The value a number has once stored as T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return unpack<T>(pack<T>(x, 0.0f)).x;
}

/// The A fragment of columns 16 j to 16 j + 15 that an accumulator holds.
template <class T, int kN>
__device__ __forceinline__ void to_fragment(const Accumulator<kN>& acc, int j, std::uint32_t (&a)[4]) {
  a[0] = pack<T>(acc.c[2 * j][0], acc.c[2 * j][1]);
  a[1] = pack<T>(acc.c[2 * j][2], acc.c[2 * j][3]);
  a[2] = pack<T>(acc.c[2 * j + 1][0], acc.c[2 * j + 1][1]);
  a[3] = pack<T>(acc.c[2 * j + 1][2], acc.c[2 * j + 1][3]);
}

/// Copies a [64, 64] tile from global rows `stride` elements apart, by kThreads threads of the block from a multiple of
/// kThreads on: each has one 16-byte piece of every kThreads / 8-th row. Rows from valid_rows and columns from
/// valid_columns (a multiple of 8) on become zero and are not read.
template <int kThreads, class T>
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const T* from, std::int64_t stride, int valid_rows,
                                          int valid_columns) {
  constexpr int kStep = kThreads / 8;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, row = thread / 8, column = thread % 8 * 8;
  const int left = column < valid_columns ? valid_rows - row : 0;
  from += row * stride + column;
#pragma unroll 4
  for (int i = 0; i < kTile; i += kStep) {
    ptx::copy_async_16(tile + tile_offset(row + i, column), from, i < left);
    from += kStep * stride;
  }
}

/// beta by its own type, from its bits.
__device__ __forceinline__ float scalar_from_bits(std::uint32_t bits, DType type) {
  switch (type) {
    case DType::kBF16: return unpack<ptx::BFloat>(bits).x;
    case DType::kF16: return unpack<ptx::Half>(bits).x;
    default: return __uint_as_float(bits);
  }
}
__device__ __forceinline__ float load_scalar(const void* data, std::int64_t at, DType type) {
  return scalar_from_bits(
      type == DType::kF32 ? static_cast<const std::uint32_t*>(data)[at] : static_cast<const std::uint16_t*>(data)[at],
      type);
}
__device__ __forceinline__ void store_scalar(void* data, std::int64_t at, DType type, float value) {
  switch (type) {
    case DType::kBF16: static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value); break;
    case DType::kF16: static_cast<__half*>(data)[at] = __float2half_rn(value); break;
    default: static_cast<float*>(data)[at] = value; break;
  }
}

}  // namespace rewy::cuda
