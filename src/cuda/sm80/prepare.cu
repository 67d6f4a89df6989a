// A and Cq of every chunk: all of the forward and of the backward's recomputation that touches no state.
//
//   L_ij  = sum_f b_i[f] k_i[f] ratio_ij[f] k_j[f]      j < i      A = (I + L)^-1
//   Cq_ij = scale * sum_f q_i[f] ratio_ij[f] k_j[f]     j <= i     ratio_ij = product of the decays of tokens j+1 to i
//
// One block of 256 threads a (chunk slot, value head); features in tiles of 64. Every gate factor is a product of
// decays (each <= 1) between two positions, so no later token takes part in what belongs to an earlier one.
//
//   scalar gate: K K^T and Q K^T by the tensor cores, warp w having rows 16 (w % 4) and columns 32 (w / 4); each
//   product
//                is multiplied by its ratio in FP32. Two stages of tiles: 37 KB of shared memory.
//   vector gate: blocks of 16 tokens. Below the diagonal by the tensor cores, one block a warp, operands with their
//                decays in 16 bits; on the diagonal pair by pair in FP32, two warps a block. 58 KB, 66 KB with b.
//
// Steps as numbered in docs/kernels/prepare.md.
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device/chunk.cuh"
#include "cuda/device/triangular.cuh"
#include "cuda/kernels.h"

namespace rewy::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = kTile / kBlock;              ///< of 16 tokens in a chunk
constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;  ///< of blocks, below the diagonal
constexpr int kHalves = kTile / 8;                   ///< half blocks of 8 tokens, one a warp
constexpr int kBlockBytes = kTileBytes / kBlocks;    ///< of a tile's 16 rows
constexpr int kRatioStride = kBlock + 1;             ///< columns of different blocks in different banks
constexpr int kUnits = 3;                            ///< [16, 8] products of a warp below the diagonal
constexpr int kParkedUnits = 2;

template <class Element, Gate kGateTrait, Strength kStrengthTrait>
struct Config {
  using T = Element;
  static constexpr bool kVector = kGateTrait == Gate::kVector;
  static constexpr bool kIndependent = kStrengthTrait == Strength::kIndependent;
  static_assert(kVector || !kIndependent, "no operator has a scalar gate and independent strengths");
  static constexpr int kResidentBlocks = kVector ? 2 : 4;  ///< on a multiprocessor
};

/// L, then A, and Cq on its way out. It lies over the operands once they are used up.
struct Results {
  alignas(16) float triangular[kTile * kTriangularStride];
  alignas(128) unsigned char cq[kTileBytes];
};

struct ScalarOperands {
  alignas(128) unsigned char q[2][kTileBytes], k[2][kTileBytes];
};

template <class Config>
struct VectorOperands {
  alignas(128) unsigned char q[kTileBytes], k[kTileBytes], b[Config::kIndependent ? kTileBytes : 16];
  alignas(128) float decay[kTile * kTile];                         ///< g, then exp(g); see decay_offset
  alignas(128) unsigned char receive_q[kTileBytes - kBlockBytes];  ///< rows 16 to 63
  alignas(128) unsigned char receive_k[kTileBytes - kBlockBytes];
  alignas(128) unsigned char send[kPairs * kBlockBytes];  ///< a block of 16 rows for each pair
};

struct ScalarFactors {
  float decay[kTile];
  float ratio[kTile * kRatioStride];  ///< of row i and a column of its own block
  float prefix[kTile];                ///< decays of the block's first token to this one
  float suffix[kTile];                ///< decays of the next token to the block's last
};

struct VectorFactors {
  float4 parked[kParkedUnits][kThreads];           ///< accumulators from one tile to the next
  alignas(16) float half_product[kHalves][kTile];  ///< decays of 8 tokens, by feature
};

/// What a block works on. It stands in shared memory because the vector gates' sums need the registers.
struct Work {
  std::int64_t token;  ///< first of the chunk
  std::int32_t batch, tokens;
  std::int32_t value_head, query_head;

  template <class T>
  __device__ __forceinline__ T* rows(const Rows& of, std::int32_t head) const {
    return row_pointer<T>(of, batch, token, head);
  }
};

template <class Config>
struct SharedStorage {
  union {
    std::conditional_t<Config::kVector, VectorOperands<Config>, ScalarOperands> operands;
    Results results;
  };
  std::conditional_t<Config::kVector, VectorFactors, ScalarFactors> factors;
  float beta[kTile];
  Work work;
};

/// 4 bytes from global to shared memory; zero if !valid [cp.async]. FP32 rows may start at any element.
__device__ __forceinline__ void copy_async_4(const float* to, const float* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(ptx::shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

/// x, as if computed here: what follows from it is not kept in registers from one feature tile to the next, where the
/// addresses of all steps would crowd out the sums.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Place of a row's feature among the decays. A row's even 4-float pieces lie in its first half, the odd ones in the
/// second, rotated: without bank conflicts for lanes that take one or two features each, in order, and for lanes that
/// take eight as two pieces.
__device__ __forceinline__ int decay_offset(int row, int feature) {
  const int piece = feature >> 2;
  return row * kTile + (((piece >> 1) ^ ((piece & 1) * 12)) << 2) + (feature & 3);
}

/// The number of 8 x 8 half blocks of columns... see step 6: what is kept of 8 columns from `first` on in `row`.
__device__ __forceinline__ void store_piece(void* matrix, int row, int first, int tokens, std::uint32_t (&x)[4]) {
  const int kept = row < tokens ? row + 1 - first : 0;  // columns up to the diagonal
#pragma unroll
  for (int w = 0; w < 4; ++w) x[w] = kept >= 2 * w + 2 ? x[w] : kept == 2 * w + 1 ? x[w] & 0xffffu : 0u;
  *reinterpret_cast<uint4*>(static_cast<unsigned char*>(matrix) + (row * kTile + first) * 2) = {x[0], x[1], x[2], x[3]};
}

/// beta of token `threadIdx.x`.
template <class Config>
__device__ __forceinline__ void load_beta(const Params& p, SharedStorage<Config>& shared) {
  const Work& work = shared.work;
  const int thread = threadIdx.x;
  const std::int64_t at =
      work.batch * p.beta.batch + (work.token + thread) * p.beta.token + work.value_head * p.beta.head;
  shared.beta[thread] = thread < work.tokens ? load_scalar(p.beta.data, at, p.strength_dtype) : 0.0f;
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
  const int thread = threadIdx.x, warp = thread >> 5, tokens = work.tokens;
  const T* q = work.rows<T>(p.q, work.query_head);
  const T* k = work.rows<T>(p.k, work.query_head);
  auto& operands = shared.operands;
  const int tiles = (p.K + kTile - 1) / kTile;

  const auto copy = [&](int tile) {  // step 1; a group even where nothing is left, so that groups can be counted
    if (tile < tiles) {
      const int stage = tile & 1, column = tile * kTile;
      copy_tile(ptx::shared_address(operands.q[stage]), q + column, p.q.token, kTile, tokens, p.K - column, thread,
                kThreads);
      copy_tile(ptx::shared_address(operands.k[stage]), k + column, p.k.token, kTile, tokens, p.K - column, thread,
                kThreads);
    }
    ptx::copy_commit();
  };
  copy(0);
  copy(1);

  ScalarFactors& f = shared.factors;
  if (thread < kTile) {
    const bool valid = thread < tokens;
    const float* g = work.rows<float>(p.g, work.value_head);
    f.decay[thread] = valid && p.g.data != nullptr ? decay_of(g[thread * p.g.token]) : 1.0f;
    load_beta(p, shared);
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

/// Step 4: the 16-bit operands of the blocks below the diagonal. Warp h has rows 8 h to 8 h + 7, its lane two features.
template <class Config>
__device__ __forceinline__ void stage_operands(VectorOperands<Config>& operands, const VectorFactors& factors,
                                               int thread) {
  using T = typename Config::T;
  const int half = thread >> 5, block = half >> 1, feature = 2 * (thread & 31);
  const auto product = [&](int h) { return *reinterpret_cast<const float2*>(&factors.half_product[h][feature]); };
  const auto decay = [&](int r) {
    return *reinterpret_cast<const float2*>(operands.decay + decay_offset(8 * half + r, feature));
  };
  const auto word = [&](unsigned char* tile, int row) -> std::uint32_t& {
    return *reinterpret_cast<std::uint32_t*>(tile + tile_offset(row, feature));
  };

  if (block > 0) {  // receive: from the block's first row
    float2 run = half & 1 ? product(half - 1) : float2{1.0f, 1.0f};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = 8 * half + r;
      const float2 a = decay(r);
      run = {run.x * a.x, run.y * a.y};
      const float2 query = unpack<T>(word(operands.q, row));
      float2 key = unpack<T>(word(operands.k, row));
      if constexpr (Config::kIndependent) {
        const float2 b = unpack<T>(word(operands.b, row));
        key = {key.x * b.x, key.y * b.y};
      }
      word(operands.receive_q, row - kBlock) = pack<T>(query.x * run.x, query.y * run.y);
      word(operands.receive_k, row - kBlock) = pack<T>(key.x * run.x, key.y * run.y);
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
      const float2 key = unpack<T>(word(operands.k, 8 * half + r));
#pragma unroll
      for (int n = 0; n < kBlocks - 1; ++n) {
        if (n < later) {
          word(operands.send, kBlock * (first + n) + 8 * (half & 1) + r) =
              pack<T>(key.x * (run.x * between[n].x), key.y * (run.y * between[n].y));
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

/// Step 5: one feature tile of a unit.
template <class T>
__device__ __forceinline__ void unit_product(float (&sum)[4], std::uint32_t receive, std::uint32_t send,
                                             const Unit& unit) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int depth = 0; depth < kTile; depth += 32) {
    std::uint32_t rows[4], columns[4];
    // Eight columns at a depth of 32: of load_b's lanes, 16 to 31 are moved on in depth and not in columns.
    ptx::load_matrices(send + tile_offset(unit.send_row + (lane & 7), depth + (lane >> 3) * 8), columns);
    load_a(receive, kBlock * (unit.receiver - 1), depth, rows);
    ptx::multiply_add<T>(sum, rows, columns[0], columns[1]);
    load_a(receive, kBlock * (unit.receiver - 1), depth + 16, rows);
    ptx::multiply_add<T>(sum, rows, columns[2], columns[3]);
  }
}

/// Eight 16-bit elements, as FP32.
template <class T>
__device__ __forceinline__ void load_eight(const unsigned char* tile, int row, int piece, float (&x)[8]) {
  const uint4 word = *reinterpret_cast<const uint4*>(tile + tile_offset(row, 8 * piece));
  const float2 a = unpack<T>(word.x), b = unpack<T>(word.y), c = unpack<T>(word.z), d = unpack<T>(word.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

/// How a thread goes through its 15 pairs of a diagonal block: first those of column `low`, then those of column
/// 15 - low. Lanes l and l ^ 1, 2, 4 share pairs and have eight features each.
struct DiagonalPairs {
  int first_row;  ///< of the block
  int low;
  __device__ __forceinline__ explicit DiagonalPairs(int thread)
      : first_row(kBlock * (thread >> 6)), low((thread & 63) >> 3) {}
  __device__ __forceinline__ int high() const { return kBlock - 1 - low; }
  __device__ __forceinline__ bool in_high(int step) const { return step >= high(); }
  __device__ __forceinline__ int row(int step) const { return in_high(step) ? step + 1 : low + 1 + step; }
  __device__ __forceinline__ int column(int step) const { return in_high(step) ? high() : low; }
};

/// Sums over pairs of a thread's eight features: [step] for L, [16 + step] for Cq; [15] and [31] are Cq's diagonal
/// entries of columns low and 15 - low.
using PairSums = float[2 * kBlock];

/// Step 6: key j, decayed on its way down its column by one multiplication a row.
template <class Config>
__device__ __forceinline__ void diagonal_pairs(const VectorOperands<Config>& operands, PairSums& sums, int thread) {
  using T = typename Config::T;
  const DiagonalPairs pairs(thread);
  const int piece = thread & 7, base = pairs.first_row;
  float sent[8], x[8];
  const auto dot = [&](float& sum) {
#pragma unroll
    for (int f = 0; f < 8; ++f) sum += x[f] * sent[f];
  };
  load_eight<T>(operands.k, base + pairs.high(), piece, sent);
  load_eight<T>(operands.q, base + pairs.high(), piece, x);
  dot(sums[2 * kBlock - 1]);
  load_eight<T>(operands.k, base + pairs.low, piece, sent);
  load_eight<T>(operands.q, base + pairs.low, piece, x);
  dot(sums[kBlock - 1]);
#pragma unroll
  for (int step = 0; step < kBlock - 1; ++step) {
    if (step % 2 == 0) __syncwarp();
    // high() is at least 8: earlier steps need not look.
    if (step >= kBlock / 2 && step == pairs.high()) load_eight<T>(operands.k, base + pairs.high(), piece, sent);
    const int row = base + (step >= kBlock / 2 ? pairs.row(step) : pairs.low + 1 + step);
    const float4 even = *reinterpret_cast<const float4*>(operands.decay + decay_offset(row, 8 * piece));
    const float4 odd = *reinterpret_cast<const float4*>(operands.decay + decay_offset(row, 8 * piece + 4));
    sent[0] *= even.x, sent[1] *= even.y, sent[2] *= even.z, sent[3] *= even.w;
    sent[4] *= odd.x, sent[5] *= odd.y, sent[6] *= odd.z, sent[7] *= odd.w;
    load_eight<T>(operands.q, row, piece, x);
    dot(sums[kBlock + step]);
    load_eight<T>(operands.k, row, piece, x);
    if constexpr (Config::kIndependent) {
      float b[8];
      load_eight<T>(operands.b, row, piece, b);
#pragma unroll
      for (int f = 0; f < 8; ++f) x[f] *= b[f];
    }
    dot(sums[step]);
  }
}

/// Adds the sums of the eight lanes that share pairs. Each halving of the group halves what a lane keeps: lane l ends
/// with sums 4 l to 4 l + 3 in its first four.
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

template <class Config>
__device__ __forceinline__ void vector_products(const Params& p, SharedStorage<Config>& shared) {
  using T = typename Config::T;
  auto& operands = shared.operands;

  if (const int thread = threadIdx.x; thread < kTile) {
    if constexpr (Config::kIndependent) {
      shared.beta[thread] = 1.0f;  // b is in the products
    } else {
      load_beta(p, shared);
    }
  }

  Accumulator<kUnits - kParkedUnits> units;
#pragma unroll
  for (int u = 0; u < kParkedUnits; ++u) shared.factors.parked[u][threadIdx.x] = {0.0f, 0.0f, 0.0f, 0.0f};
  PairSums sums;
  units.clear();
#pragma unroll
  for (int i = 0; i < 2 * kBlock; ++i) sums[i] = 0.0f;

  for (int column = 0; column < p.K; column += kTile) {
    const int width = p.K - column, thread = fresh(threadIdx.x), warp = thread >> 5, lane = thread & 31;
    const Work& work = shared.work;
    const int tokens = work.tokens;
    // Step 1. Each warp copies the gates of the eight rows whose decays it forms.
    const float* g = work.rows<float>(p.g, work.value_head) + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 8 * warp + (i >> 1), feature = lane + 32 * (i & 1);
      const bool valid = row < tokens && feature < width;
      copy_async_4(operands.decay + decay_offset(row, feature), valid ? g + row * p.g.token + feature : g, valid);
    }
    ptx::copy_commit();
    copy_tile(ptx::shared_address(operands.q), work.rows<T>(p.q, work.query_head) + column, p.q.token, kTile, tokens,
              width, thread, kThreads);
    copy_tile(ptx::shared_address(operands.k), work.rows<T>(p.k, work.query_head) + column, p.k.token, kTile, tokens,
              width, thread, kThreads);
    if constexpr (Config::kIndependent) {
      copy_tile(ptx::shared_address(operands.b), work.rows<T>(p.b, work.value_head) + column, p.b.token, kTile, tokens,
                width, thread, kThreads);
    }
    ptx::copy_commit();

    // Step 2. The zeros of what lies outside become decays of 1.
    ptx::copy_wait<1>();
    __syncwarp();
    float2 product = {1.0f, 1.0f};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float2& place = *reinterpret_cast<float2*>(operands.decay + decay_offset(8 * warp + r, 2 * lane));
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
      if (u < kParkedUnits) {
        float4& parked = shared.factors.parked[u][thread];
        float sum[4] = {parked.x, parked.y, parked.z, parked.w};
        unit_product<T>(sum, receive, send, unit);
        parked = {sum[0], sum[1], sum[2], sum[3]};
      } else {
        unit_product<T>(units.c[u - kParkedUnits], receive, send, unit);
      }
    }
    diagonal_pairs(operands, sums, thread);
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
          u < kParkedUnits ? *(reinterpret_cast<const float2*>(&shared.factors.parked[u][thread]) + e / 2) : float2{};
      const float x = u < kParkedUnits ? parked.x : units.c[u - kParkedUnits][e];
      const float y = u < kParkedUnits ? parked.y : units.c[u - kParkedUnits][e + 1];
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
    const ChunkAt at = locate(p, slot);
    shared.work = {at.token, at.batch, at.tokens, value_head, value_head / (p.HV / p.H)};
  }
  __syncthreads();
  if (shared.work.tokens == 0) return;

  if constexpr (Config::kVector) {
    vector_products<Config>(p, shared);
  } else {
    scalar_products<Config>(p, shared);
  }
  __syncthreads();

  // Step 8: four warps substitute, the other four store Cq.
  const int tokens = shared.work.tokens;
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

template <class T>
void launch_operator(const Params& p, Operator op, cudaStream_t stream) {
  switch (op) {
    case Operator::kDeltaNet:
    case Operator::kGdn: return launch<Config<T, Gate::kScalar, Strength::kShared>>(p, stream);
    case Operator::kKda: return launch<Config<T, Gate::kVector, Strength::kShared>>(p, stream);
    case Operator::kGdn2: return launch<Config<T, Gate::kVector, Strength::kIndependent>>(p, stream);
  }
}

}  // namespace

void launch_prepare(const Params& p, const Kind& kind, const DeviceLimits&, cudaStream_t stream) {
  if (p.chunks == 0 || p.HV == 0) return;
  if (kind.dtype == DType::kBF16) {
    launch_operator<ptx::BFloat>(p, kind.op, stream);
  } else {
    launch_operator<ptx::Half>(p, kind.op, stream);
  }
}

}  // namespace rewy::cuda
