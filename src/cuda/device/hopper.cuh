// Hopper's bulk tensor copies, the barriers they report to, and stores of fragments (PTX ISA: cp.async.bulk, mbarrier,
// stmatrix). Only for sm_90 and up.
#pragma once

#include <cuda.h>

#include "cuda/device/ptx.cuh"

namespace rewy::cuda::hopper {

/// Makes initialised barriers visible to the copy engine [fence.mbarrier_init].
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Announces bytes without arriving [mbarrier.expect_tx].
__device__ __forceinline__ void expect_bytes(ptx::Barrier& barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
/// True in one lane of a whole warp, and known to be so: what follows may use uniform registers [elect.sync].
__device__ __forceinline__ bool elect() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}
/// A box of a [d, c, b, a] tensor at coordinates a (innermost) to d, as its map says [cp.async.bulk.tensor].
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int a, int b, int c, int d,
                                         ptx::Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(ptx::shared_address(&barrier)), "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
/// Contiguous bytes, a multiple of 16, from and to multiples of 16 [cp.async.bulk].
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const void* from, int bytes, ptx::Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(ptx::shared_address(&barrier))
               : "memory");
}
/// A box from shared memory into a tensor; what lies outside is left out [cp.async.bulk.tensor, bulk_group].
__device__ __forceinline__ void store_box(const CUtensorMap& map, int a, int b, int c, int d, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(from)
               : "memory");
}
/// Waits until this thread's stores have read shared memory [cp.async.bulk.wait_group.read].
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Four 8 x 8 matrices of 16-bit elements into shared memory; lane l gives the address of row l % 8 of matrix l / 8
/// [stmatrix].
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace rewy::cuda::hopper
