// What the scans multiply with for a vector gate, of every token, value head and feature:
//
//   E = gamma b k        gamma q        F = (decays after the token, to the end of the chunk) k
//
// gamma is the product of the chunk's decays up to and including the token, lambda that of all of them. A scan's blocks
// each have only some value columns of a head; they would all make the same operands, so those are made here, once.
//
// One block of 256 threads a (chunk slot, value head, 64 features). Each half of a warp has four tokens, its lanes four
// features each: all loads and stores are of whole rows of 128 or 256 bytes, and a thread waits once, for all it reads.
// Decays pass from warp to warp by way of shared memory: 2 KB. Bound by memory: 14 bytes an element, 16 with
// independent strengths.
//
// Steps as numbered in docs/kernels/operands.md.
#include "cuda/check.h"
#include "cuda/device/chunk.cuh"
#include "cuda/traits.h"

namespace rewy::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4;      ///< tokens of a thread; a warp has two such groups, one above the other
constexpr int kFeatures = 4;  ///< of a thread
constexpr int kLanes = kTile / kFeatures;
static_assert(kWarps * 2 * kRows == kTile && kLanes == 16);

template <class Element, Strength kStrengthTrait>
struct Config {
  using T = Element;
  static constexpr bool kIndependent = kStrengthTrait == Strength::kIndependent;
  /// On a multiprocessor: 96 KB or more on their way. From 10.0 on, ptxas fetches further ahead and spills where four
  /// are asked for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ <= 900
  static constexpr int kResidentBlocks = kIndependent ? 3 : 4;
#else
  static constexpr int kResidentBlocks = 3;
#endif
};

struct SharedStorage {
  float4 total[kWarps][kLanes];  ///< decays of a warp's eight tokens, by feature
  float beta[kTile];
};

__device__ __forceinline__ float4 operator*(float4 x, float4 y) {
  return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
}
__device__ __forceinline__ float4 operator*(float x, float4 y) {
  return {x * y.x, x * y.y, x * y.z, x * y.w};
}

template <class T>
__device__ __forceinline__ float4 unpack(uint2 x) {
  const float2 lower = cuda::unpack<T>(x.x), upper = cuda::unpack<T>(x.y);
  return {lower.x, lower.y, upper.x, upper.y};
}
template <class T>
__device__ __forceinline__ uint2 pack(float4 x) {
  return {cuda::pack<T>(x.x, x.y), cuda::pack<T>(x.z, x.w)};
}

/// The features of a thread's rows, zero from row `valid` on.
template <class T, class Features>
__device__ __forceinline__ void load_rows(const Rows& rows, const ChunkAt& at, int head, int first_row, int feature,
                                          int valid, Features (&x)[kRows]) {
  const T* from = row_pointer<const T>(rows, at.batch, at.token + first_row, head) + feature;
#pragma unroll
  for (int r = 0; r < kRows; ++r, from += rows.token) {
    x[r] = r < valid ? __ldg(reinterpret_cast<const Features*>(from)) : Features{};
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kResidentBlocks) operands(const __grid_constant__ Params p) {
  using T = typename Config::T;
  __shared__ SharedStorage shared;

  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & (kLanes - 1);
  const bool upper = (thread & kLanes) != 0;  // has the later tokens of its warp
  const unsigned tiles = (p.K + kTile - 1) / kTile, matrix = blockIdx.x / tiles;
  const int slot = static_cast<int>(matrix) / p.HV, value_head = static_cast<int>(matrix) - slot * p.HV;
  const ChunkAt at = locate(p, slot);
  if (at.tokens == 0) return;
  const int query_head = value_head / (p.HV / p.H);
  const int first_row = kRows * (thread / kLanes);
  const int feature = static_cast<int>(blockIdx.x - matrix * tiles) * kTile + kFeatures * lane;
  const int valid = feature < p.K ? at.tokens - first_row : 0;  // of the thread's rows

  // Step 1. Everything is under way before anything is waited for.
  float4 decay[kRows];
  uint2 k[kRows], q[kRows], b[kRows];
  load_rows<float>(p.g, at, value_head, first_row, feature, valid, decay);
  load_rows<T>(p.k, at, query_head, first_row, feature, valid, k);
  load_rows<T>(p.q, at, query_head, first_row, feature, valid, q);
  if constexpr (Config::kIndependent) {
    load_rows<T>(p.b, at, value_head, first_row, feature, valid, b);
  } else if (thread < kTile) {
    shared.beta[thread] = shared_strength(p, at, value_head, thread);
  }

  // Step 2. The zeros of what lies outside become decays of 1.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    decay[r] = {decay_of(decay[r].x), decay_of(decay[r].y), decay_of(decay[r].z), decay_of(decay[r].w)};
  }
  const float4 total = (decay[0] * decay[1]) * (decay[2] * decay[3]);
  float4 other;  // of the warp's other half
  other.x = __shfl_xor_sync(~0u, total.x, kLanes);
  other.y = __shfl_xor_sync(~0u, total.y, kLanes);
  other.z = __shfl_xor_sync(~0u, total.z, kLanes);
  other.w = __shfl_xor_sync(~0u, total.w, kLanes);
  if (!upper) shared.total[warp][lane] = total * other;
  __syncthreads();

  // Step 3. Each product has one order for a row, given by its place in the chunk.
  const float4 one = {1.0f, 1.0f, 1.0f, 1.0f};
  float4 gamma = one;
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) {
    if (w < warp) gamma = gamma * shared.total[w][lane];
  }
  gamma = gamma * (upper ? other : one);

  // Step 4, down the rows.
  T* erase = row_pointer<T>(p.erase, at.batch, at.token + first_row, value_head) + feature;
  T* query = row_pointer<T>(p.query, at.batch, at.token + first_row, value_head) + feature;
#pragma unroll
  for (int r = 0; r < kRows; ++r, erase += p.erase.token, query += p.query.token) {
    gamma = gamma * decay[r];
    float4 key = unpack<T>(k[r]);
    if constexpr (Config::kIndependent) {
      key = unpack<T>(b[r]) * key;
    } else {
      key = shared.beta[first_row + r] * key;
    }
    if (r < valid) {
      *reinterpret_cast<uint2*>(erase) = pack<T>(gamma * key);
      *reinterpret_cast<uint2*>(query) = pack<T>(gamma * (unpack<T>(q[r])));
    }
  }
  if (warp == kWarps - 1 && upper && feature < p.K) {
    *reinterpret_cast<float4*>(p.decay + static_cast<std::int64_t>(matrix) * p.K + feature) = gamma;
  }

  // Step 5, up again.
  float4 to_end = one;
#pragma unroll
  for (int w = kWarps - 1; w > 0; --w) {
    if (w > warp) to_end = to_end * shared.total[w][lane];
  }
  to_end = to_end * (upper ? one : other);
  T* write = row_pointer<T>(p.write, at.batch, at.token + first_row + kRows - 1, value_head) + feature;
#pragma unroll
  for (int r = kRows - 1; r >= 0; --r, write -= p.write.token) {
    if (r < valid) *reinterpret_cast<uint2*>(write) = pack<T>(to_end * unpack<T>(k[r]));
    to_end = to_end * decay[r];
  }
}

template <class Config>
void launch(const Params& p, cudaStream_t stream) {
  // No grid is too large: 2^29 pairs of a slot and a head have 4 TiB of A alone.
  const std::int64_t blocks = p.chunks * p.HV * ((p.K + kTile - 1) / kTile);
  operands<Config><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  check_launch("operands");
}

}  // namespace

void launch_operands(const Params& p, const Kind& kind, cudaStream_t stream) {
  if (p.chunks == 0 || p.HV == 0) return;
  with_traits(kind, [&]<class T, Gate kGate, Strength kStrength>() {
    // With scalar gates k and q serve as they lie, the decays scale rows of the products.
    if constexpr (kGate == Gate::kVector) launch<Config<T, kStrength>>(p, stream);
  });
}

}  // namespace rewy::cuda
