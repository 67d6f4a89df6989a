// Hopper's bulk tensor copies and the barriers they report to (PTX ISA: mbarrier, cp.async.bulk). Only for sm_90 and up.
#pragma once

#include <cuda.h>

#include "cuda/device/ptx.cuh"

namespace rewy::cuda::tma {

/// A barrier in shared memory: a phase ends when the arrivals have come and all announced bytes have landed.
using Barrier = std::uint64_t;

__device__ __forceinline__ void initialise(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(&barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine [fence.mbarrier_init].
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Announces bytes without arriving [mbarrier.expect_tx].
__device__ __forceinline__ void expect_bytes(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(ptx::shared_address(&barrier)) : "memory");
}
/// Waits for the end of the phase of this parity [mbarrier.try_wait].
__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(ptx::shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

/// A box of a [d, c, b, a] tensor at coordinates a (innermost) to d, as its map says [cp.async.bulk.tensor].
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int a, int b, int c, int d,
                                         Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(ptx::shared_address(&barrier)), "r"(a), "r"(b), "r"(c),
      "r"(d)
      : "memory");
}
/// Contiguous bytes, a multiple of 16, from and to multiples of 16 [cp.async.bulk].
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(ptx::shared_address(&barrier))
               : "memory");
}
/// Fetches a map before its first use [prefetch.tensormap].
__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

}  // namespace rewy::cuda::tma
