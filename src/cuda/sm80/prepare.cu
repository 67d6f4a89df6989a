// A and Cq of every chunk: all of the forward and of the backward's recomputation that touches no state.
//
//   L_ij  = sum_f b_i[f] k_i[f] ratio_ij[f] k_j[f]      j < i      A = (I + L)^-1
//   Cq_ij = scale * sum_f q_i[f] ratio_ij[f] k_j[f]     j <= i     ratio_ij = product of the decays of tokens j+1 to i
//
// One block of 256 threads a (chunk slot, value head); features in tiles of 64. Every gate factor is a product of
// decays (each <= 1) between two positions, so no later token takes part in what belongs to an earlier one.
//
//   scalar gate: K K^T and Q K^T by the tensor cores, warp w having rows 16 (w % 4) and columns 32 (w / 4); each
//                element is multiplied by its ratio in FP32. Two stages of tiles: 38 KB of shared memory.
//   vector gate: blocks of 16 tokens. Below the diagonal by the tensor cores, operands with their decays in 16 bits, a
//                warp having three units [16, 8]; on the diagonal pair by pair in FP32, two warps a block. 71 KB, 75 KB
//                with independent strengths.
//
// Steps as numbered in docs/kernels/prepare.md.
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device/chunk.cuh"
#include "cuda/device/triangular.cuh"
#include "cuda/device/vector_operands.cuh"
#include "cuda/traits.h"

namespace rewy::cuda {
namespace {

constexpr int kRatioStride = kBlock + 1;  ///< columns of different blocks in different banks

template <class Element, Gate kGateTrait, Strength kStrengthTrait>
struct Config {
  using T = Element;
  static constexpr bool kVector = kGateTrait == Gate::kVector;
  static constexpr bool kIndependent = kStrengthTrait == Strength::kIndependent;
  static_assert(kVector || !kIndependent, "no operator has a scalar gate and independent strengths");
  /// On a multiprocessor. Only 9.0 has both the shared memory for three blocks of a vector gate and a ptxas that does
  /// not spill under the bound; elsewhere it fetches far ahead.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  static constexpr int kResidentBlocks = kVector ? 3 : 4;
#else
  static constexpr int kResidentBlocks = kVector ? 1 : 2;
#endif
};

/// L, then A, and Cq on its way out. It lies over the operands once they are used up.
struct Results {
  alignas(16) float triangular[kTile * kTriangularStride];
  alignas(128) unsigned char cq[kTileBytes];
};

struct ScalarOperands {
  alignas(128) unsigned char q[2][kTileBytes], k[2][kTileBytes];
};

struct ScalarFactors {
  float decay[kTile];
  float ratio[kTile * kRatioStride];  ///< of row i and a column of its own block
  float prefix[kTile];                ///< decays of the block's first token to this one
  float suffix[kTile];                ///< decays of the next token to the block's last
};

/// What a block works on. It stands in shared memory because the vector gates' sums need the registers.
struct Work {
  ChunkAt at;
  std::int32_t value_head, query_head;
};

template <class Config>
struct SharedStorage {
  union {
    std::conditional_t<Config::kVector, VectorOperands<Config>, ScalarOperands> operands;
    Results results;
  };
  std::conditional_t<Config::kVector, VectorFactors<Config>, ScalarFactors> factors;
  float beta[kTile];
  Work work;
};

/// 4 bytes from global to shared memory; zero, and nothing read, if !valid [cp.async].
__device__ __forceinline__ void copy_async_4(const void* to, const float* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(ptx::shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

/// Step 1: [64, 64] 16-bit elements from `column` on, zero past the tail and past K. Rows of 128 bytes, swizzled for
/// ldmatrix or plain.
template <class T, bool kSwizzled>
__device__ __forceinline__ void copy_rows(unsigned char* tile, const Rows& rows, const ChunkAt& at, int head,
                                          int column, int width, int thread) {
  const int row = thread >> 3, first = (thread & 7) * 8;
  const T* from = row_pointer<T>(rows, at.batch, at.token + row, head) + column + first;
  const std::uint32_t to =
      ptx::shared_address(tile) + (kSwizzled ? tile_offset(row, first) : row * kRowBytes + 2 * first);
#pragma unroll
  for (int r = 0; r < kTile; r += kThreads / 8, from += kThreads / 8 * rows.token) {
    ptx::copy_async_16(to + r * kRowBytes, from, row + r < at.tokens && column + first < width);
  }
}

/// Stores 8 columns from `first` on of a row, without what is above the diagonal or past the tail.
__device__ __forceinline__ void store_piece(void* matrix, int row, int first, int tokens, std::uint32_t (&x)[4]) {
  const int kept = row < tokens ? row + 1 - first : 0;  // columns up to the diagonal
#pragma unroll
  for (int w = 0; w < 4; ++w) x[w] = kept >= 2 * w + 2 ? x[w] : kept == 2 * w + 1 ? x[w] & 0xffffu : 0u;
  *reinterpret_cast<uint4*>(static_cast<unsigned char*>(matrix) + (row * kTile + first) * 2) = {x[0], x[1], x[2], x[3]};
}

// Scalar gates -------------------------------------------------------------------------------------------------------

/// Step 2: every factor of the ratios, from the decays. Threads 0 to 63 have a column each, 64 to 127 a row.
__device__ __forceinline__ void scalar_factors(ScalarFactors& f) {
  const int token = threadIdx.x & (kTile - 1), first = token & ~(kBlock - 1), local = token - first;
  if (threadIdx.x < kTile) {
    float running = 1.0f;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      if (r > local) running *= f.decay[first + r];
      f.ratio[(first + r) * kRatioStride + local] = running;  // 1 on the diagonal; above it unused
    }
    f.suffix[token] = running;
  } else if (threadIdx.x < 2 * kTile) {
    float running = 1.0f;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      if (r <= local) running *= f.decay[first + r];
    }
    f.prefix[token] = running;
  }
}

template <class Config>
__device__ __forceinline__ void scalar_products(const Params& p, SharedStorage<Config>& shared) {
  using T = typename Config::T;
  const Work& work = shared.work;
  const int thread = threadIdx.x, warp = thread >> 5;
  auto& operands = shared.operands;
  const int tiles = (p.K + kTile - 1) / kTile;

  const auto copy = [&](int tile) {  // step 1; a group even where nothing is left, so that groups can be counted
    if (tile < tiles) {
      const int stage = tile & 1, column = tile * kTile;
      copy_rows<T, true>(operands.q[stage], p.q, work.at, work.query_head, column, p.K, thread);
      copy_rows<T, true>(operands.k[stage], p.k, work.at, work.query_head, column, p.K, thread);
    }
    ptx::copy_commit();
  };
  copy(0);
  copy(1);

  ScalarFactors& f = shared.factors;
  if (thread < kTile) {
    f.decay[thread] = scalar_decay(p, work.at, work.value_head, thread);
    shared.beta[thread] = shared_strength(p, work.at, work.value_head, thread);
  }
  __syncthreads();
  scalar_factors(f);

  // Step 3. Rows of the keys are the columns of both products.
  const int block = warp & 3, half = warp >> 2;
  Accumulator<4> kk, qk;
  kk.clear();
  qk.clear();
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::copy_wait<1>();
    __syncthreads();
    const std::uint32_t q_tile = ptx::shared_address(operands.q[tile & 1]);
    const std::uint32_t k_tile = ptx::shared_address(operands.k[tile & 1]);
#pragma unroll
    for (int depth = 0; depth < kTile; depth += 16) {
      if (2 * half > block) break;  // above the diagonal
      std::uint32_t key[4], query[4], columns[4];
      load_a(k_tile, kBlock * block, depth, key);
      load_a(q_tile, kBlock * block, depth, query);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * half + j > block) break;
        load_b(k_tile, kBlock * (2 * half + j), depth, columns);
        multiply_pair<T>(kk, 2 * j, key, columns);
        multiply_pair<T>(qk, 2 * j, query, columns);
      }
    }
    __syncthreads();  // the stage is free, after the last tile for the results
    copy(tile + 2);
  }

  // Step 4.
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int other = 2 * half + j;
    if (other > block) break;
    float between = 1.0f;
    for (int b = other + 1; b < block; ++b) between *= f.prefix[b * kBlock + kBlock - 1];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = kBlock * other + 8 * n + lane_column();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = kBlock * block + lane_row() + 8 * h;
        float ratio[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          ratio[e] = other == block ? f.ratio[row * kRatioStride + 8 * n + lane_column() + e]
                                    : f.prefix[row] * between * f.suffix[column + e];
        }
        const float* x = kk.c[2 * j + n] + 2 * h;
        const float* y = qk.c[2 * j + n] + 2 * h;
        const float beta = shared.beta[row];
        *reinterpret_cast<float2*>(shared.results.triangular + triangular_offset(row, column)) = {
            beta * (ratio[0] * x[0]), beta * (ratio[1] * x[1])};
        *reinterpret_cast<std::uint32_t*>(shared.results.cq + tile_offset(row, column)) =
            pack<T>(p.scale * (ratio[0] * y[0]), p.scale * (ratio[1] * y[1]));
      }
    }
  }
}

// Vector gates -------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void vector_products(const Params& p, SharedStorage<Config>& shared) {
  using T = typename Config::T;
  auto& operands = shared.operands;

  if (threadIdx.x < kTile) {
    const Work& work = shared.work;
    shared.beta[threadIdx.x] = Config::kIndependent
                                   ? 1.0f
                                   : shared_strength(p, work.at, work.value_head, threadIdx.x);  // b is in the products
  }

  constexpr int kParked = VectorFactors<Config>::kParked;
  float units[kUnits][4] = {};  // the parked ones are not used
#pragma unroll
  for (int u = 0; u < kParked; ++u) shared.factors.parked[u][threadIdx.x] = {0.0f, 0.0f, 0.0f, 0.0f};
  PairSums sums;
#pragma unroll
  for (int i = 0; i < 2 * kBlock; ++i) sums[i] = 0.0f;

  for (int column = 0; column < p.K; column += kTile) {
    const int width = p.K - column, thread = fresh(threadIdx.x), warp = thread >> 5, lane = thread & 31;
    // Step 1. Each warp copies the gates of the eight rows whose decays it forms.
    const Work& work = shared.work;
    const int tokens = work.at.tokens;
    const float* g = row_pointer<float>(p.g, work.at.batch, work.at.token + 8 * warp, work.value_head) + column + lane;
#pragma unroll
    for (int r = 0; r < 8; ++r, g += p.g.token) {
#pragma unroll
      for (int f = 0; f < kTile; f += 32) {
        copy_async_4(operands.decay + decay_offset(8 * warp, lane + f) + r * kDecayRowBytes, g + f,
                     8 * warp + r < tokens && lane + f < width);
      }
    }
    ptx::copy_commit();
    copy_rows<T, false>(operands.q, p.q, work.at, work.query_head, column, p.K, thread);
    copy_rows<T, false>(operands.k, p.k, work.at, work.query_head, column, p.K, thread);
    if constexpr (Config::kIndependent)
      copy_rows<T, false>(operands.b, p.b, work.at, work.value_head, column, p.K, thread);
    ptx::copy_commit();

    // Step 2. The zeros of what lies outside become decays of 1.
    ptx::copy_wait<1>();
    __syncwarp();
    float2 product = {1.0f, 1.0f};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float2& place =
          *reinterpret_cast<float2*>(operands.decay + decay_offset(8 * warp, 2 * lane) + r * kDecayRowBytes);
      place = {decay_of(place.x), decay_of(place.y)};
      product = {product.x * place.x, product.y * place.y};
    }
    *reinterpret_cast<float2*>(&shared.factors.half_product[warp][2 * lane]) = product;
    ptx::copy_wait<0>();
    __syncthreads();  // step 3

    stage_operands(operands, shared.factors, thread);
    __syncthreads();

    // Step 5.
    const std::uint32_t send = ptx::shared_address(operands.send);
    const std::uint32_t receive = ptx::shared_address(Unit::of_cq() ? operands.receive_q : operands.receive_k);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const Unit unit(u, thread);
      if (u < kParked) {
        float4& parked = shared.factors.parked[u][thread];
        float sum[4] = {parked.x, parked.y, parked.z, parked.w};
        unit_product<T>(sum, receive, send, unit, thread);
        parked = {sum[0], sum[1], sum[2], sum[3]};
      } else {
        unit_product<T>(units[u], receive, send, unit, thread);
      }
    }
    add_diagonal_pairs<T, Config::kIndependent>(operands.q, operands.k, operands.b, operands.decay, sums, thread);
    __syncthreads();  // the operands are used up: the next tile's, or the results, take their place
  }

  // Step 7.
  const int thread = threadIdx.x, lane = thread & 31;
  float* triangular = shared.results.triangular;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit(u, thread);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = kBlock * unit.receiver + lane_row() + 4 * e, to = unit.column + lane_column();
      const float2 parked =
          u < kParked ? *(reinterpret_cast<const float2*>(&shared.factors.parked[u][thread]) + e / 2) : float2{};
      const float x = u < kParked ? parked.x : units[u][e];
      const float y = u < kParked ? parked.y : units[u][e + 1];
      if (Unit::of_cq()) {
        *reinterpret_cast<std::uint32_t*>(shared.results.cq + tile_offset(row, to)) = pack<T>(p.scale * x, p.scale * y);
      } else {
        const float beta = shared.beta[row];
        *reinterpret_cast<float2*>(triangular + triangular_offset(row, to)) = {beta * x, beta * y};
      }
    }
  }
  reduce_scatter(sums);
  const DiagonalPairs pairs(thread);
  const bool of_cq = (lane & 4) != 0;
  const auto store_cq = [&](int row, int to, float x) {
    *reinterpret_cast<std::uint16_t*>(shared.results.cq + tile_offset(row, to)) =
        static_cast<std::uint16_t>(pack<T>(p.scale * x, 0.0f));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int step = 4 * (lane & 3) + i;
    const int row = pairs.first_row + pairs.row(step), to = pairs.first_row + pairs.column(step);
    if (step == kBlock - 1) {
      const int diagonal = pairs.first_row + (of_cq ? pairs.high() : pairs.low);
      store_cq(diagonal, diagonal, sums[i]);
    } else if (of_cq) {
      store_cq(row, to, sums[i]);
    } else {
      triangular[triangular_offset(row, to)] = shared.beta[row] * sums[i];
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kResidentBlocks) prepare(const __grid_constant__ Params p) {
  using T = typename Config::T;
  extern __shared__ __align__(128) unsigned char bytes[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);

  const int thread = threadIdx.x, warp = thread >> 5;
  if (thread == 0) {
    const int slot = static_cast<int>(blockIdx.x) / p.HV, value_head = static_cast<int>(blockIdx.x) - slot * p.HV;
    shared.work = {locate(p, slot), value_head, value_head / (p.HV / p.H)};
  }
  __syncthreads();
  if (shared.work.at.tokens == 0) return;

  if constexpr (Config::kVector) {
    vector_products<Config>(p, shared);
  } else {
    scalar_products<Config>(p, shared);
  }
  __syncthreads();

  // Step 8: four warps substitute, the other four store Cq.
  const int tokens = shared.work.at.tokens;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * (kTile * kTile);
  float* triangular = shared.results.triangular;
  if (warp < kBlocks) {
    invert_diagonal_block(triangular, kBlock * warp);
  } else {
    T* cq = static_cast<T*>(p.cq) + index;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int piece = thread - kThreads / 2 + i * (kThreads / 2), row = piece >> 3, first = (piece & 7) * 8;
      const uint4 x = *reinterpret_cast<const uint4*>(shared.results.cq + tile_offset(row, first));
      std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
      store_piece(cq, row, first, tokens, words);
    }
  }
  __syncthreads();
  if (warp < kBlocks / 2) merge_16(triangular, 2 * kBlock * warp);
  __syncthreads();
  merge_32(triangular, warp);
  __syncthreads();

  // Step 9.
  T* a = static_cast<T*>(p.a) + index;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int piece = thread + i * kThreads, row = piece >> 3, first = (piece & 7) * 8;
    const float* from = triangular + triangular_offset(row, first);
    const float4 x = *reinterpret_cast<const float4*>(from), y = *reinterpret_cast<const float4*>(from + 4);
    std::uint32_t words[4] = {pack<T>(x.x, x.y), pack<T>(x.z, x.w), pack<T>(y.x, y.y), pack<T>(y.z, y.w)};
    store_piece(a, row, first, tokens, words);
  }
}

template <class Config>
void launch(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= 99 * 1024, "more than a block of compute capability 8.6 or 12.0 may have");
  check(cudaFuncSetAttribute(prepare<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "prepare");
  prepare<Config><<<static_cast<unsigned>(p.chunks * p.HV), kThreads, kBytes, stream>>>(p);
  check_launch("prepare");
}

}  // namespace

void launch_prepare(const Params& p, const Kind& kind, const DeviceLimits&, cudaStream_t stream) {
  if (p.chunks == 0 || p.HV == 0) return;
  with_traits(kind, [&]<class T, Gate kGate, Strength kStrength>() { launch<Config<T, kGate, kStrength>>(p, stream); });
}

}  // namespace rewy::cuda
