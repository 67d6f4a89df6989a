// Unit queries and keys, log decays and strengths from raw projections, and the gradients (docs/math.md, section 7):
//
//   y = x rstd    g = -exp(A_log) softplus(x) or lower_bound sigmoid(exp(A_log) x)    beta = factor sigmoid(x)
//
// One launch a direction. A part (queries, keys, gate, strength) is a range of blocks, a block 64 tokens of one head,
// or of 256 heads where a token has one number a head. 256 threads; a row of features is that of 1 to 32 neighbouring
// threads, 8 features each, which are 16 bytes of a 16-bit type; a thread has up to 4 tokens on their way before it
// uses the first. Bound by memory. Gradients of A_log and dt_bias: sums of a block, 8 KB of shared memory, then of all
// blocks in a second launch.
//
// Steps as numbered in docs/kernels/activation.md.
#include "cuda/activation.h"
#include "cuda/check.h"
#include "cuda/device/tile.cuh"

namespace rewy::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Blocks of a multiprocessor. For three the loads on their way must fit in 80 registers a thread, which they do on
/// Hopper alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 2;
#endif
constexpr int kFeatures = 8;  ///< of a thread
static_assert(32 * kFeatures == kActivationWidth);

/// What the threads of a block share: one thread's eight sums, by row of threads and feature.
struct SharedStorage {
  float sums[kThreads * kFeatures];
  float warp[kWarps];
};

/// Where a block and a thread work.
struct Place {
  std::int64_t batch;
  std::int64_t token;  ///< the block's first
  std::int64_t slot;   ///< batch * tiles + tile
  int group;
  int tokens;   ///< of the block, 1 to 64
  int feature;  ///< the thread's first, in the group
  int valid;    ///< of its features; 0 or less: none
  int row;      ///< the thread's first token
  int rows;     ///< threads' rows side by side: the step to its next token
};

__device__ __forceinline__ Place locate(const ActivationParams& p, const ActivationPart& part, std::uint32_t block) {
  const std::uint32_t slot = block / part.groups, batch = slot / p.tiles;
  Place at;
  at.group = static_cast<int>(block - slot * part.groups);
  at.slot = slot;
  at.batch = batch;
  at.token = static_cast<std::int64_t>(slot - batch * p.tiles) * kActivationTokens;
  const std::int64_t left = p.T - at.token;
  at.tokens = left < kActivationTokens ? static_cast<int>(left) : kActivationTokens;
  at.feature = kFeatures * static_cast<int>(threadIdx.x & ((1u << part.lane_bits) - 1));
  at.valid = min(part.run, part.features - at.group * part.run) - at.feature;
  at.row = static_cast<int>(threadIdx.x) >> part.lane_bits;
  at.rows = kThreads >> part.lane_bits;
  return at;
}

// ---- Eight features of a token --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float widen(T x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return static_cast<float>(x);
  }
}

template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (__is_same(T, ptx::BFloat)) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

template <class T>
__device__ __forceinline__ T* address(const Elements& e, const Place& at, int row) {
  return static_cast<T*>(e.data) + at.batch * e.batch + (at.token + row) * e.token + at.group * e.group +
         at.feature * e.feature;
}

/// The features of one token on their way from memory: as they lie there where they are whole pieces of 16 bytes, so
/// that a token of a 16-bit type takes four registers until it is used.
template <class T, bool kWhole>
struct Piece {
  float x[kFeatures];
  __device__ __forceinline__ void widen_to(float (&to)[kFeatures]) const {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) to[i] = x[i];
  }
};
template <class T>
requires(sizeof(T) == 2) struct Piece<T, true> {
  uint4 words;
  __device__ __forceinline__ void widen_to(float (&to)[kFeatures]) const {
    const std::uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<T>(pairs[i]);
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
};

/// The features of the block's token `row`; zeros for what lies outside.
template <class T, bool kWhole>
__device__ __forceinline__ Piece<T, kWhole> load(const Elements& e, const Place& at, int row) {
  const bool inside = row < at.tokens;
  const T* from = address<const T>(e, at, row);
  Piece<T, kWhole> piece;
  if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i, from += e.feature) {
      piece.x[i] = inside && i < at.valid ? widen(*from) : 0.0f;
    }
  } else if constexpr (sizeof(T) == 4) {
    float4 a{}, b{};
    if (inside && at.valid > 0) {
      a = __ldg(reinterpret_cast<const float4*>(from));
      b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    }
    piece = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else {
    piece.words = {};
    if (inside && at.valid > 0) piece.words = __ldg(reinterpret_cast<const uint4*>(from));
  }
  return piece;
}

template <class T, bool kWhole>
__device__ __forceinline__ void store(const Elements& e, const Place& at, int row, const float (&x)[kFeatures]) {
  if (row >= at.tokens || at.valid <= 0) return;
  T* to = address<T>(e, at, row);
  if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i, to += e.feature) {
      if (i < at.valid) *to = narrow<T>(x[i]);
    }
  } else if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
  } else {
    *reinterpret_cast<uint4*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                                     pack<T>(x[6], x[7])};
  }
}

/// Tokens on their way at a time: as many as the registers of kBlocks blocks hold.
template <bool kWhole>
inline constexpr int kForwardBatch = kWhole ? 4 : 1;
template <class T, bool kWhole>
inline constexpr int kBackwardBatch = kWhole && sizeof(T) == 2 ? 2 : 1;

/// Step 2. A thread's tokens, `kBatch` at a time: all are loaded before the first is used. load and use are given the
/// place in the batch and the row.
template <int kBatch, class Load, class Use>
__device__ __forceinline__ void for_each_row(const Place& at, Load&& load, Use&& use) {
  for (int first = at.row; first - at.row < kActivationTokens; first += kBatch * at.rows) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load(i, first + i * at.rows);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) use(i, first + i * at.rows);
  }
}

// ---- The functions --------------------------------------------------------------------------------------------------

/// e = exp(-|x|), which never overflows: all that follows is made of it.
__device__ __forceinline__ float exp_of_distance(float x) {
  return expf(-fabsf(x));
}
/// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x, float e) {
  return __fdividef(x < 0.0f ? e : 1.0f, 1.0f + e);
}
/// Its derivative.
__device__ __forceinline__ float sigmoid_slope(float e) {
  return __fdividef(e, (1.0f + e) * (1.0f + e));
}
/// log(1 + exp(x)) = max(x, 0) + log(1 + e), and log(1 + e) = 2 atanh(s) with s = e / (2 + e), at most 1/3: as a series
/// in s^2 it keeps its last digits however small e is. The first term left out is below 2^-25.
__device__ __forceinline__ float softplus(float x, float e) {
  const float s = __fdividef(e, 2.0f + e), s2 = s * s;
  float series = 2.0f / 13;
  series = fmaf(series, s2, 2.0f / 11);
  series = fmaf(series, s2, 2.0f / 9);
  series = fmaf(series, s2, 2.0f / 7);
  series = fmaf(series, s2, 2.0f / 5);
  series = fmaf(series, s2, 2.0f / 3);
  return fmaxf(x, 0.0f) + fmaf(series * s2, s, s + s);
}
/// d * value, and 0 where d is 0 whatever the value is: a decay of -inf has the gradient 0, and so has what lies in
/// rows that nothing reads.
__device__ __forceinline__ float times_unless_zero(float d, float value) {
  return d == 0.0f ? 0.0f : __fmul_rn(d, value);  // not joined with the sum that follows in some instances only
}

// ---- Queries and keys -----------------------------------------------------------------------------------------------

/// Step 3. Over the threads of a row, in a tree.
__device__ __forceinline__ float sum_row(const ActivationPart& part, float x) {
  for (int step = 1 << part.lane_bits >> 1; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// Whether a row of threads has a gradient that is not 0. The whole warp calls it.
__device__ __forceinline__ bool any_in_row(const ActivationPart& part, const float (&d)[kFeatures]) {
  bool any = false;
#pragma unroll
  for (int f = 0; f < kFeatures; ++f) any = any || d[f] != 0.0f;
  const unsigned width = 1u << part.lane_bits;
  const unsigned lanes = (~0u >> (32 - width)) << (threadIdx.x & (32 - width));
  return (__ballot_sync(~0u, any) & lanes) != 0;
}

__device__ __forceinline__ float* rstd_address(const ActivationPart& part, const Place& at, int row) {
  return static_cast<float*>(part.rstd.data) + at.batch * part.rstd.batch + (at.token + row) * part.rstd.token +
         at.group * part.rstd.group;
}

template <class T, bool kWhole>
__device__ __forceinline__ void normalise(const ActivationPart& part, const Place& at) {
  constexpr float kEpsilon = 1e-6f;
  Piece<T, kWhole> raw[kForwardBatch<kWhole>];
  for_each_row<kForwardBatch<kWhole>>(
      at, [&](int i, int row) { raw[i] = load<T, kWhole>(part.raw, at, row); },
      [&](int i, int row) {
        float x[kFeatures], sum = 0.0f;
        raw[i].widen_to(x);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) sum = fmaf(x[f], x[f], sum);
        const float rstd = rsqrtf(sum_row(part, sum) + kEpsilon);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) x[f] *= rstd;
        store<T, kWhole>(part.result, at, row, x);
        if (part.rstd.data != nullptr && at.feature == 0 && row < at.tokens) *rstd_address(part, at, row) = rstd;
      });
}

template <class T, bool kWhole>
__device__ __forceinline__ void normalise_backward(const ActivationPart& part, const Place& at) {
  Piece<T, kWhole> raw[kBackwardBatch<T, kWhole>], d_result[kBackwardBatch<T, kWhole>];
  float rstd[kBackwardBatch<T, kWhole>];
  for_each_row<kBackwardBatch<T, kWhole>>(
      at,
      [&](int i, int row) {
        raw[i] = load<T, kWhole>(part.raw, at, row);
        d_result[i] = load<T, kWhole>(part.result, at, row);
        rstd[i] = row < at.tokens ? __ldg(rstd_address(part, at, row)) : 0.0f;
      },
      [&](int i, int row) {
        float y[kFeatures], dy[kFeatures], along = 0.0f;  // <dy, y>
        raw[i].widen_to(y);
        d_result[i].widen_to(dy);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          y[f] *= rstd[i];
          along = fmaf(dy[f], y[f], along);
        }
        along = sum_row(part, along);
        if (__any_sync(~0u, isnan(along))) {
          const bool unread = !any_in_row(part, dy);
          if (isnan(along) && unread) {  // nothing reads such a row: it may hold anything
            along = rstd[i] = 0.0f;
#pragma unroll
            for (int f = 0; f < kFeatures; ++f) y[f] = 0.0f;
          }
        }
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) y[f] = rstd[i] * fmaf(-along, y[f], dy[f]);
        store<T, kWhole>(part.d_raw, at, row, y);
      });
}

// ---- The gate -------------------------------------------------------------------------------------------------------

/// dt_bias and exp(A_log) of a thread's features: of a vector gate the head's, of a scalar gate each its own.
template <bool kVector>
struct GateParameters {
  float bias[kFeatures], rates[kVector ? 1 : kFeatures];
  __device__ __forceinline__ float rate(int f) const { return rates[kVector ? 0 : f]; }
};

template <bool kVector>
__device__ __forceinline__ GateParameters<kVector> gate_parameters(const ActivationParams& p,
                                                                   const ActivationPart& part, const Place& at) {
  GateParameters<kVector> use;
  const std::int64_t first = static_cast<std::int64_t>(at.group) * part.run + at.feature;
  const auto rate_of = [&](std::int64_t head) {  // finite: times a vanishing softplus, or x = 0, infinity would be NaN
    constexpr float kMost = 0x1.fffffep127f;
    const float rate = p.A_log.data != nullptr ? expf(__ldg(p.A_log.data + head * p.A_log.step)) : 1.0f;
    return rate > kMost ? kMost : rate;
  };
  if constexpr (kVector) use.rates[0] = rate_of(at.group);
#pragma unroll
  for (int i = 0; i < kFeatures; ++i) {
    const bool inside = i < at.valid;
    use.bias[i] = inside && p.dt_bias.data != nullptr ? __ldg(p.dt_bias.data + (first + i) * p.dt_bias.step) : 0.0f;
    if constexpr (!kVector) use.rates[i] = inside ? rate_of(first + i) : 1.0f;
  }
  return use;
}

template <class T, bool kWhole, bool kVector>
__device__ __forceinline__ void gate(const ActivationParams& p, const ActivationPart& part, const Place& at) {
  const GateParameters<kVector> use = gate_parameters<kVector>(p, part, at);
  Piece<T, kWhole> raw[kForwardBatch<kWhole>];
  for_each_row<kForwardBatch<kWhole>>(
      at, [&](int i, int row) { raw[i] = load<T, kWhole>(part.raw, at, row); },
      [&](int i, int row) {
        float x[kFeatures];
        raw[i].widen_to(x);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          const float sum = x[f] + use.bias[f];
          if (p.bounded) {
            const float z = use.rate(f) * sum;
            x[f] = p.lower_bound * sigmoid(z, exp_of_distance(z));
          } else {
            x[f] = -use.rate(f) * softplus(sum, exp_of_distance(sum));
          }
        }
        store<float, kWhole>(part.result, at, row, x);
      });
}

/// Step 4. Sums of the block by feature: first down the rows of threads, first to last.
__device__ __forceinline__ void add_rows(const ActivationPart& part, const Place& at, const float (&x)[kFeatures],
                                         SharedStorage& shared, float* to) {
  const int width = kFeatures << part.lane_bits;
#pragma unroll
  for (int i = 0; i < kFeatures; ++i) shared.sums[at.row * width + at.feature + i] = x[i];
  __syncthreads();
  const int feature = static_cast<int>(threadIdx.x);
  if (feature < min(part.run, part.features - at.group * part.run)) {
    float sum = 0.0f;
    const int rows = min(at.rows, kActivationTokens);
    for (int row = 0; row < rows; ++row) sum += shared.sums[row * width + feature];
    to[at.group * part.run + feature] = sum;
  }
  __syncthreads();
}

/// Step 4. The sum of the block, in a tree.
__device__ __forceinline__ void add_block(float x, SharedStorage& shared, float* to) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.warp[warp];
    *to = sum;
  }
}

template <class T, bool kWhole, bool kVector>
__device__ __forceinline__ void gate_backward(const ActivationParams& p, const ActivationPart& part, const Place& at,
                                              SharedStorage& shared) {
  const GateParameters<kVector> use = gate_parameters<kVector>(p, part, at);
  Piece<T, kWhole> raw[kBackwardBatch<T, kWhole>];
  Piece<float, kWhole> d_result[kBackwardBatch<T, kWhole>];
  float bias_sum[kFeatures] = {}, rate_sum[kVector ? 1 : kFeatures] = {};  // of a vector gate the head's
  for_each_row<kBackwardBatch<T, kWhole>>(
      at,
      [&](int i, int row) {
        raw[i] = load<T, kWhole>(part.raw, at, row);
        d_result[i] = load<float, kWhole>(part.result, at, row);
      },
      [&](int i, int row) {
        float x[kFeatures], dg[kFeatures];
        raw[i].widen_to(x);
        d_result[i].widen_to(dg);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          const float sum = x[f] + use.bias[f];
          float d_raw, d_A_log;
          if (p.bounded) {
            const float z = use.rate(f) * sum;
            const float dz = times_unless_zero(dg[f] * p.lower_bound, sigmoid_slope(exp_of_distance(z)));
            d_raw = times_unless_zero(dz, use.rate(f));
            d_A_log = times_unless_zero(dz, z);
          } else {
            const float e = exp_of_distance(sum);
            d_raw = times_unless_zero(dg[f], -use.rate(f) * sigmoid(sum, e));
            d_A_log = times_unless_zero(dg[f], -use.rate(f) * softplus(sum, e));
          }
          x[f] = d_raw;
          bias_sum[f] += d_raw;
          rate_sum[kVector ? 0 : f] += d_A_log;
        }
        if (part.d_raw.data != nullptr) store<T, kWhole>(part.d_raw, at, row, x);
      });
  if (p.bias_sums == nullptr) return;
  // Rows and features outside had dg = 0 and added 0.
  add_rows(part, at, bias_sum, shared, p.bias_sums + at.slot * p.bias_width);
  float* rates = p.rate_sums + at.slot * p.rate_width;
  if constexpr (kVector) {
    add_block(rate_sum[0], shared, rates + at.group);
  } else {
    add_rows(part, at, rate_sum, shared, rates);
  }
}

// ---- The strength ---------------------------------------------------------------------------------------------------

template <class T, class Result, bool kWhole>
__device__ __forceinline__ void strength(const ActivationParams& p, const ActivationPart& part, const Place& at) {
  Piece<T, kWhole> raw[1];
  for_each_row<1>(
      at, [&](int i, int row) { raw[i] = load<T, kWhole>(part.raw, at, row); },
      [&](int i, int row) {
        float x[kFeatures];
        raw[i].widen_to(x);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) x[f] = p.strength_factor * sigmoid(x[f], exp_of_distance(x[f]));
        store<Result, kWhole>(part.result, at, row, x);
      });
}

template <class T, class Result, bool kWhole>
__device__ __forceinline__ void strength_backward(const ActivationParams& p, const ActivationPart& part,
                                                  const Place& at) {
  Piece<T, kWhole> raw[1];
  Piece<Result, kWhole> d_result[1];
  for_each_row<1>(
      at,
      [&](int i, int row) {
        raw[i] = load<T, kWhole>(part.raw, at, row);
        d_result[i] = load<Result, kWhole>(part.result, at, row);
      },
      [&](int i, int row) {
        float x[kFeatures], dbeta[kFeatures];
        raw[i].widen_to(x);
        d_result[i].widen_to(dbeta);
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          x[f] = times_unless_zero(dbeta[f] * p.strength_factor, sigmoid_slope(exp_of_distance(x[f])));
        }
        store<T, kWhole>(part.d_raw, at, row, x);
      });
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

/// Calls use.operator()<T, kWhole>(): the same for all threads of a block.
template <class Use>
__device__ __forceinline__ void with_layout(const ActivationPart& part, Use&& use) {
  const auto of_type = [&]<class T>() {
    if (part.whole) {
      use.template operator()<T, true>();
    } else {
      use.template operator()<T, false>();
    }
  };
  switch (part.raw_dtype) {
    case DType::kBF16: of_type.template operator()<ptx::BFloat>(); break;
    case DType::kF16: of_type.template operator()<ptx::Half>(); break;
    default: of_type.template operator()<float>(); break;
  }
}

template <Direction kDirection>
__global__ void __launch_bounds__(kThreads, kBlocks) activation(const __grid_constant__ ActivationParams p) {
  constexpr bool kForward = kDirection == Direction::kForward;
  __shared__ SharedStorage shared;
  // Step 1. The part and the place.
  int index = 0;
  std::uint32_t begin = 0;
  while (blockIdx.x >= p.parts[index].end) begin = p.parts[index++].end;
  const ActivationPart& part = p.parts[index];
  const Place at = locate(p, part, blockIdx.x - begin);

  // Steps 2 to 4.
  with_layout(part, [&]<class T, bool kWhole>() {
    switch (part.kind) {
      case PartKind::kNormalise:
        if constexpr (kForward) {
          normalise<T, kWhole>(part, at);
        } else {
          normalise_backward<T, kWhole>(part, at);
        }
        break;
      case PartKind::kGate: {
        const auto of_gate = [&]<bool kVector>() {
          if constexpr (kForward) {
            gate<T, kWhole, kVector>(p, part, at);
          } else {
            gate_backward<T, kWhole, kVector>(p, part, at, shared);
          }
        };
        if (p.vector_gate) {
          of_gate.template operator()<true>();
        } else {
          of_gate.template operator()<false>();
        }
        break;
      }
      case PartKind::kStrength: {
        const auto of_result = [&]<class Result>() {
          if constexpr (kForward) {
            strength<T, Result, kWhole>(p, part, at);
          } else {
            strength_backward<T, Result, kWhole>(p, part, at);
          }
        };
        if (part.result_dtype == DType::kF32) {
          of_result.template operator()<float>();
        } else {
          of_result.template operator()<T>();
        }
        break;
      }
    }
  });
}

constexpr int kSumColumns = 32;  ///< of a block: 128 bytes of a slot
constexpr int kSumRows = 32;     ///< slots side by side

__host__ __device__ constexpr std::uint32_t blocks_of(std::int32_t width) {
  return static_cast<std::uint32_t>(width - 1) / kSumColumns + 1;
}

/// Step 5. The sums over all slots, in FP64: a thread takes every 32nd slot in order, a tree adds the threads.
__global__ void __launch_bounds__(kSumColumns* kSumRows) activation_sums(const __grid_constant__ ActivationParams p) {
  __shared__ double shared[kSumRows][kSumColumns];
  const std::uint32_t bias_blocks = blocks_of(p.bias_width);
  const bool bias = blockIdx.x < bias_blocks;
  const float* from = bias ? p.bias_sums : p.rate_sums;
  const int width = bias ? p.bias_width : p.rate_width;
  const Vector1& to = bias ? p.d_dt_bias : p.d_A_log;
  const int lane = threadIdx.x % kSumColumns, row = threadIdx.x / kSumColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x - (bias ? 0 : bias_blocks)) * kSumColumns + lane;
  if (to.data == nullptr) return;

  double sum = 0.0;
  if (column < width) {
#pragma unroll 8
    for (std::int64_t slot = row; slot < p.slots; slot += kSumRows) {
      sum += static_cast<double>(__ldg(from + slot * width + column));
    }
  }
  shared[row][lane] = sum;
#pragma unroll
  for (int step = kSumRows / 2; step > 0; step /= 2) {
    __syncthreads();
    if (row < step) shared[row][lane] += shared[row + step][lane];
  }
  if (row == 0 && column < width) to.data[column * to.step] = static_cast<float>(shared[0][lane]);
}

}  // namespace

void launch_activation(const ActivationParams& p, Direction direction, std::uint32_t blocks, cudaStream_t stream) {
  if (blocks == 0) return;
  if (direction == Direction::kForward) {
    activation<Direction::kForward><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    activation<Direction::kBackward><<<blocks, kThreads, 0, stream>>>(p);
  }
  check_launch("activation");
}

void launch_activation_sums(const ActivationParams& p, cudaStream_t stream) {
  activation_sums<<<blocks_of(p.bias_width) + blocks_of(p.rate_width), kSumColumns * kSumRows, 0, stream>>>(p);
  check_launch("activation_sums");
}

}  // namespace rewy::cuda
