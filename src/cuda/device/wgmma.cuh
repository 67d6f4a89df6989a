// Hopper's warpgroup products (PTX ISA, wgmma). Only for sm_90a. The left operand and the accumulators lie in the
// registers of four warps, 16 rows each, laid out as those of mma.m16n8k16; the right operand is tiles in shared
// memory, which the tensor cores read once for all four.
#pragma once

#include "cuda/device/tile.cuh"

namespace rewy::cuda::wgmma {

/// Makes ordinary writes to shared memory visible to the tensor cores [fence.proxy.async].
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Orders register writes before the products that follow [wgmma.fence].
__device__ __forceinline__ void begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// The same for a left operand just made: its registers are written before the fence.
__device__ __forceinline__ void begin(std::uint32_t (&a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[e])::"memory");
  begin();
}
/// Closes a group of products [wgmma.commit_group].
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are under way [wgmma.wait_group].
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of an accumulator across a wait.
template <int kN>
__device__ __forceinline__ void hold(Accumulator<kN>& acc) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc.c[n][e])::"memory");
  }
}

// Matrix descriptors. Fields in units of 16 bytes: start (bits 0 to 13), distance of 64-column tiles (bits 16 to 29),
// distance of groups of eight rows (bits 32 to 45); bit 62 names the 128-byte swizzle, which is that of tile.cuh for
// tiles that start at multiples of 1024 bytes. The lower word of one address is kept, and those of others follow by one
// sum.
inline constexpr std::uint32_t kUpperWord = (8 * 128 >> 4) | (1u << 30);
inline constexpr int kTileUnits = kTileBytes >> 4;

__device__ __forceinline__ std::uint32_t lower_word(std::uint32_t address) {
  return ((address & 0x3ffff) >> 4) | (static_cast<std::uint32_t>(kTileUnits) << 16);
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t lower) {
  std::uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lower), "r"(kUpperWord));
  return d;
}
/// b[k][n] stored [rows n][columns k] in tile number `tile` from `base` on, its columns from k on: not transposed.
__device__ __forceinline__ std::uint64_t rows_of(std::uint32_t base, int tile, int k) {
  return descriptor(base + static_cast<std::uint32_t>(tile * kTileUnits + k * 2 / 16));
}
/// b[k][n] stored [rows k][columns n], its rows from k on: transposed. Columns from 64 on are in the tile behind.
__device__ __forceinline__ std::uint64_t columns_of(std::uint32_t base, int tile, int k) {
  return descriptor(base + static_cast<std::uint32_t>(tile * kTileUnits + k * 128 / 16));
}

#define REWY_WGMMA_N64(type)                                                                                          \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "                                                     \
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "              \
      "{%32, %33, %34, %35}, %36, p, %38, 1, %39;\n}\n"                                                               \
      : "+f"(d.c[0][0]), "+f"(d.c[0][1]), "+f"(d.c[0][2]), "+f"(d.c[0][3]), "+f"(d.c[1][0]), "+f"(d.c[1][1]),         \
        "+f"(d.c[1][2]), "+f"(d.c[1][3]), "+f"(d.c[2][0]), "+f"(d.c[2][1]), "+f"(d.c[2][2]), "+f"(d.c[2][3]),         \
        "+f"(d.c[3][0]), "+f"(d.c[3][1]), "+f"(d.c[3][2]), "+f"(d.c[3][3]), "+f"(d.c[4][0]), "+f"(d.c[4][1]),         \
        "+f"(d.c[4][2]), "+f"(d.c[4][3]), "+f"(d.c[5][0]), "+f"(d.c[5][1]), "+f"(d.c[5][2]), "+f"(d.c[5][3]),         \
        "+f"(d.c[6][0]), "+f"(d.c[6][1]), "+f"(d.c[6][2]), "+f"(d.c[6][3]), "+f"(d.c[7][0]), "+f"(d.c[7][1]),         \
        "+f"(d.c[7][2]), "+f"(d.c[7][3])                                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kNegate ? -1 : 1), \
        "n"(kTransposed ? 1 : 0))
/// d [64, 64] (+)= a b, a [64, 16] in registers, b [16, 64] in shared memory [wgmma.mma_async.m64n64k16].
template <class T, bool kTransposed, bool kNegate = false>
__device__ __forceinline__ void multiply_async(Accumulator<8>& d, const std::uint32_t (&a)[4], std::uint64_t b,
                                               bool accumulate) {
  if constexpr (__is_same(T, ptx::BFloat)) {
    REWY_WGMMA_N64("bf16");
  } else {
    REWY_WGMMA_N64("f16");
  }
}
#undef REWY_WGMMA_N64

#define REWY_WGMMA_N128(type)                                                                                          \
  asm volatile(                                                                                                        \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "                                                      \
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, " \
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
      "%57, %58, %59, %60, %61, %62, %63}, "                                                                           \
      "{%64, %65, %66, %67}, %68, p, %70, 1, %71;\n}\n"                                                                \
      : "+f"(d.c[0][0]), "+f"(d.c[0][1]), "+f"(d.c[0][2]), "+f"(d.c[0][3]), "+f"(d.c[1][0]), "+f"(d.c[1][1]),          \
        "+f"(d.c[1][2]), "+f"(d.c[1][3]), "+f"(d.c[2][0]), "+f"(d.c[2][1]), "+f"(d.c[2][2]), "+f"(d.c[2][3]),          \
        "+f"(d.c[3][0]), "+f"(d.c[3][1]), "+f"(d.c[3][2]), "+f"(d.c[3][3]), "+f"(d.c[4][0]), "+f"(d.c[4][1]),          \
        "+f"(d.c[4][2]), "+f"(d.c[4][3]), "+f"(d.c[5][0]), "+f"(d.c[5][1]), "+f"(d.c[5][2]), "+f"(d.c[5][3]),          \
        "+f"(d.c[6][0]), "+f"(d.c[6][1]), "+f"(d.c[6][2]), "+f"(d.c[6][3]), "+f"(d.c[7][0]), "+f"(d.c[7][1]),          \
        "+f"(d.c[7][2]), "+f"(d.c[7][3]), "+f"(d.c[8][0]), "+f"(d.c[8][1]), "+f"(d.c[8][2]), "+f"(d.c[8][3]),          \
        "+f"(d.c[9][0]), "+f"(d.c[9][1]), "+f"(d.c[9][2]), "+f"(d.c[9][3]), "+f"(d.c[10][0]), "+f"(d.c[10][1]),        \
        "+f"(d.c[10][2]), "+f"(d.c[10][3]), "+f"(d.c[11][0]), "+f"(d.c[11][1]), "+f"(d.c[11][2]), "+f"(d.c[11][3]),    \
        "+f"(d.c[12][0]), "+f"(d.c[12][1]), "+f"(d.c[12][2]), "+f"(d.c[12][3]), "+f"(d.c[13][0]), "+f"(d.c[13][1]),    \
        "+f"(d.c[13][2]), "+f"(d.c[13][3]), "+f"(d.c[14][0]), "+f"(d.c[14][1]), "+f"(d.c[14][2]), "+f"(d.c[14][3]),    \
        "+f"(d.c[15][0]), "+f"(d.c[15][1]), "+f"(d.c[15][2]), "+f"(d.c[15][3])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kNegate ? -1 : 1),  \
        "n"(kTransposed ? 1 : 0))
/// d [64, 128] (+)= a b, a [64, 16] in registers, b [16, 128] in shared memory [wgmma.mma_async.m64n128k16].
template <class T, bool kTransposed, bool kNegate = false>
__device__ __forceinline__ void multiply_async(Accumulator<16>& d, const std::uint32_t (&a)[4], std::uint64_t b,
                                               bool accumulate) {
  if constexpr (__is_same(T, ptx::BFloat)) {
    REWY_WGMMA_N128("bf16");
  } else {
    REWY_WGMMA_N128("f16");
  }
}
#undef REWY_WGMMA_N128

}  // namespace rewy::cuda::wgmma
