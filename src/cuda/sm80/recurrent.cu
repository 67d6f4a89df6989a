// The recurrence itself, token by token (docs/math.md, section 1), for decoding: few tokens for each state.
//
//   S- = diag(exp g) S    r = w v - S-^T (b k)    S = S- + k r^T    o = scale (S-^T q + <k, q> r)
//
// The last is S^T q: so written, the sums over the features that r and o need are one round of shuffles. One warp has
// all features of 8 value columns (4 where K > 128) of one sequence and head: its part of the state stays in registers
// over all tokens, and no warp waits for another. Each token's rows are loaded while the token before is computed. FP32
// throughout. Bound by memory: a state is read once and written once.
//
// Steps as numbered in docs/kernels/recurrent.md.
#include <algorithm>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device/chunk.cuh"
#include "cuda/recurrent.h"

namespace rewy::cuda {
namespace {

constexpr int kFour = 4;    ///< neighbouring features, and columns, of a lane
constexpr int kGroups = 2;  ///< of four features of a lane
constexpr int kMostWarps = 4;
/// On a multiprocessor. With no number to keep to, ptxas of CUDA 13.0 aims at four and spills.
constexpr int kResidentBlocks = 3;

/// kLanes lanes side by side have all features of four columns: lane l those from 4 l and from 4 (l + kLanes) on.
template <DType kStorage, Gate kGateTrait, Strength kStrengthTrait, int kFeatureLanes>
struct Config {
  static constexpr DType kType = kStorage;
  static constexpr bool kVectorGate = kGateTrait == Gate::kVector;
  static constexpr bool kIndependent = kStrengthTrait == Strength::kIndependent;
  static constexpr int kLanes = kFeatureLanes;
  static constexpr int kColumns = kFour * 32 / kLanes;  ///< of a warp
};
constexpr int features_of(int lanes) {
  return kGroups * kFour * lanes;
}
static_assert(features_of(32) == kMostTokenFeatures);

/// A warp's part of the problem.
struct Place {
  std::int64_t batch;   ///< of the tensors
  std::int64_t begin;   ///< first token
  std::int64_t end;     ///< behind the last; at most begin: none
  std::int64_t unused;  ///< first token after all sequences
  int sequence;         ///< of the states
  int head, query_head;
  int lane;    ///< of the kLanes
  int column;  ///< the lane's first
};

// ---- Four neighbours of a row ---------------------------------------------------------------------------------------

/// As stored; of 16-bit elements the first two words.
__device__ __forceinline__ uint4 load_four(const void* data, std::int64_t at, std::int64_t step, DType type, int valid,
                                           bool whole) {
  uint4 raw{};
  if (valid <= 0) return raw;
  if (type == DType::kF32) {
    const auto* from = static_cast<const std::uint32_t*>(data) + at;
    if (whole) return __ldg(reinterpret_cast<const uint4*>(from));
    raw.x = from[0];
    if (valid > 1) raw.y = from[step];
    if (valid > 2) raw.z = from[2 * step];
    if (valid > 3) raw.w = from[3 * step];
  } else {
    const auto* from = static_cast<const std::uint16_t*>(data) + at;
    if (whole) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
      return {words.x, words.y, 0, 0};
    }
    raw.x = from[0];
    if (valid > 1) raw.x |= static_cast<std::uint32_t>(from[step]) << 16;
    if (valid > 2) raw.y = from[2 * step];
    if (valid > 3) raw.y |= static_cast<std::uint32_t>(from[3 * step]) << 16;
  }
  return raw;
}

__device__ __forceinline__ void widen(uint4 raw, DType type, float (&x)[kFour]) {
  if (type == DType::kF32) {
    x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    return;
  }
  const bool brain = type == DType::kBF16;
  const float2 lower = brain ? unpack<ptx::BFloat>(raw.x) : unpack<ptx::Half>(raw.x);
  const float2 upper = brain ? unpack<ptx::BFloat>(raw.y) : unpack<ptx::Half>(raw.y);
  x[0] = lower.x, x[1] = lower.y, x[2] = upper.x, x[3] = upper.y;
}

template <DType kType>
__device__ __forceinline__ void store_four(void* data, std::int64_t at, std::int64_t step, int valid, bool whole,
                                           const float (&x)[kFour]) {
  if (whole) {
    if (valid <= 0) return;
    if constexpr (kType == DType::kF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = {x[0], x[1], x[2], x[3]};
    } else {
      using T = std::conditional_t<kType == DType::kBF16, ptx::BFloat, ptx::Half>;
      *reinterpret_cast<uint2*>(static_cast<T*>(data) + at) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (i < valid) store_scalar(data, at + i * step, kType, x[i]);
  }
}

// ---- The state ------------------------------------------------------------------------------------------------------

/// [group][feature][column] of a lane; zero outside [K, V].
using State = float[kGroups][kFour][kFour];

/// Calls four(element, stride of an element's neighbours in State, address) for pieces of four, or one(element,
/// address) for all elements, of what lies inside [K, V].
template <class C, class Fours, class One>
__device__ __forceinline__ void for_each_piece(const RecurrentParams& p, const States& states, StateAccess access,
                                               const Place& at, State& state, Fours&& four, One&& one) {
  float* base = states.data + at.sequence * states.sequence + at.head * states.head + at.column * states.value;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int feature = kFour * (at.lane + j * C::kLanes);
    float* from = base + feature * states.key;
    if (access == StateAccess::kValues) {
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        if (feature + i < p.K && at.column < p.V) four(&state[j][i][0], 1, from + i * states.key);
      }
    } else if (access == StateAccess::kKeys) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) {
        if (feature < p.K && at.column + c < p.V) four(&state[j][0][c], kFour, from + c * states.value);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
#pragma unroll
        for (int c = 0; c < kFour; ++c) {
          if (feature + i < p.K && at.column + c < p.V) one(state[j][i][c], from + i * states.key + c * states.value);
        }
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void load_state(const RecurrentParams& p, const Place& at, State& state) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) state[j][i][c] = 0.0f;
    }
  }
  if (p.initial_state.data == nullptr) return;
  for_each_piece<C>(
      p, p.initial_state, p.initial_access, at, state,
      [](float* x, int step, const float* from) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from));
        x[0] = four.x, x[step] = four.y, x[2 * step] = four.z, x[3 * step] = four.w;
      },
      [](float& x, const float* from) { x = *from; });
}

template <class C>
__device__ __forceinline__ void store_state(const RecurrentParams& p, const Place& at, State& state) {
  if (p.final_state.data == nullptr) return;
  for_each_piece<C>(
      p, p.final_state, p.final_access, at, state,
      [](const float* x, int step, float* to) {
        *reinterpret_cast<float4*>(to) = {x[0], x[step], x[2 * step], x[3 * step]};
      },
      [](float x, float* to) { *to = x; });
}

// ---- A token --------------------------------------------------------------------------------------------------------

/// What a lane loads of one token, as stored.
template <class C>
struct Token {
  uint4 q[kGroups], k[kGroups], g[kGroups], b[kGroups], v, w;
  float scalar_gate;
  std::uint32_t beta;
};

/// Where a lane's parts of the next token to be loaded lie.
struct Cursor {
  std::int64_t q, k, v, g, beta, b, w;

  __device__ __forceinline__ Cursor(const RecurrentParams& p, const Place& at) {
    const int feature = kFour * at.lane;
    const auto place = [&](const Elements& e, int head, int first) {
      return at.batch * e.batch + at.begin * e.token + head * e.group + first * e.feature;
    };
    q = place(p.q, at.query_head, feature);
    k = place(p.k, at.query_head, feature);
    v = place(p.v, at.head, at.column);
    g = place(p.g, at.head, feature);
    beta = place(p.beta, at.head, 0);
    b = place(p.b, at.head, feature);
    w = place(p.w, at.head, at.column);
  }
};

/// Step 2. The token at the cursor, which moves on. What lies outside [K] and [V] is zero.
template <class C>
__device__ __forceinline__ Token<C> load_token(const RecurrentParams& p, const Place& at, Cursor& cursor) {
  Token<C> token;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int offset = j * kFour * C::kLanes, valid = p.K - kFour * at.lane - offset;
    const auto features = [&](const Elements& e, std::int64_t place, DType type) {
      return load_four(e.data, place + offset * e.feature, e.feature, type, valid, p.whole);
    };
    token.k[j] = features(p.k, cursor.k, C::kType);
    token.q[j] = features(p.q, cursor.q, C::kType);
    if constexpr (C::kVectorGate) token.g[j] = features(p.g, cursor.g, DType::kF32);
    if constexpr (C::kIndependent) token.b[j] = features(p.b, cursor.b, p.strength_dtype);
  }
  const int valid = p.V - at.column;
  token.v = load_four(p.v.data, cursor.v, p.v.feature, C::kType, valid, p.whole);
  if constexpr (C::kIndependent) {
    token.w = load_four(p.w.data, cursor.w, p.w.feature, p.strength_dtype, valid, p.whole);
  } else {
    token.beta = p.strength_dtype == DType::kF32 ? static_cast<const std::uint32_t*>(p.beta.data)[cursor.beta]
                                                 : static_cast<const std::uint16_t*>(p.beta.data)[cursor.beta];
  }
  if constexpr (!C::kVectorGate) {
    token.scalar_gate = p.g.data == nullptr ? 0.0f : static_cast<const float*>(p.g.data)[cursor.g];
  }
  cursor.q += p.q.token;
  cursor.k += p.k.token;
  cursor.v += p.v.token;
  cursor.g += p.g.token;
  cursor.beta += p.beta.token;
  cursor.b += p.b.token;
  cursor.w += p.w.token;
  return token;
}

/// Steps 3 to 5. The state after the token, and its outputs of the lane's columns.
template <class C>
__device__ __forceinline__ void update(const RecurrentParams& p, const Token<C>& token, State& state,
                                       float (&o)[kFour]) {
  // Step 3.
  float k[kGroups][kFour];
  float erased[kFour]{}, read[kFour]{}, key_query = 0.0f;  // sums over the lane's features, then over all
  const float scalar_decay = C::kVectorGate ? 1.0f : decay_of(token.scalar_gate);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    float q[kFour], e[kFour], g[kFour];
    widen(token.k[j], C::kType, k[j]);
    widen(token.q[j], C::kType, q);
    if constexpr (C::kVectorGate) widen(token.g[j], DType::kF32, g);
    if constexpr (C::kIndependent) widen(token.b[j], p.strength_dtype, e);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const float decay = C::kVectorGate ? decay_of(g[i]) : scalar_decay;
      e[i] = C::kIndependent ? e[i] * k[j][i] : k[j][i];  // a shared strength multiplies the sum
      key_query += k[j][i] * q[i];
#pragma unroll
      for (int c = 0; c < kFour; ++c) {
        const float decayed = decay * state[j][i][c];
        erased[c] += decayed * e[i];
        read[c] += decayed * q[i];
        state[j][i][c] = decayed;
      }
    }
  }

  // Step 4.
#pragma unroll
  for (int step = C::kLanes / 2; step > 0; step /= 2) {
    key_query += __shfl_xor_sync(~0u, key_query, step);
#pragma unroll
    for (int c = 0; c < kFour; ++c) {
      erased[c] += __shfl_xor_sync(~0u, erased[c], step);
      read[c] += __shfl_xor_sync(~0u, read[c], step);
    }
  }

  // Step 5.
  float v[kFour], w[kFour], r[kFour];
  widen(token.v, C::kType, v);
  if constexpr (C::kIndependent) widen(token.w, p.strength_dtype, w);
  const float beta = C::kIndependent ? 1.0f : scalar_from_bits(token.beta, p.strength_dtype);
#pragma unroll
  for (int c = 0; c < kFour; ++c) {
    r[c] = C::kIndependent ? w[c] * v[c] - erased[c] : beta * (v[c] - erased[c]);
    o[c] = p.scale * (read[c] + key_query * r[c]);
  }
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) state[j][i][c] += k[j][i] * r[c];
    }
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

/// Entry i of cu_seqlens, clamped to [0, T].
__device__ __forceinline__ std::int64_t offset_at(const RecurrentParams& p, std::int64_t i) {
  const std::int64_t at = i * p.offset_stride;
  const std::int64_t offset = p.offsets_are_i64 ? static_cast<const std::int64_t*>(p.cu_seqlens)[at]
                                                : static_cast<const std::int32_t*>(p.cu_seqlens)[at];
  return offset < 0 ? 0 : offset > p.T ? p.T : offset;
}

template <class C>
__global__ void __launch_bounds__(32 * kMostWarps, kResidentBlocks)
    recurrent(const __grid_constant__ RecurrentParams p) {
  // Step 1.
  const unsigned slices = (p.V + C::kColumns - 1) / C::kColumns;
  const unsigned warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const unsigned scan = warp / slices, sequence = scan / p.HV;
  const unsigned sequences = max(p.sequences, 1);  // without any, the rows of none are zeroed all the same
  if (sequence >= sequences) return;
  Place at;
  at.sequence = static_cast<int>(sequence);
  at.head = static_cast<int>(scan - sequence * p.HV);
  at.query_head = at.head / (p.HV / p.H);
  at.lane = threadIdx.x & (C::kLanes - 1);
  at.column = static_cast<int>(warp - scan * slices) * C::kColumns + kFour * ((threadIdx.x & 31) / C::kLanes);
  const bool first_lane = at.lane == 0;
  const bool packed = p.cu_seqlens != nullptr;

  State state;
  if (p.sequences > 0) load_state<C>(p, at, state);
  at.batch = packed ? 0 : at.sequence;
  at.begin = packed ? offset_at(p, at.sequence) : 0;
  at.end = !packed ? p.T : p.sequences > 0 ? offset_at(p, at.sequence + 1) : 0;
  at.unused = packed ? offset_at(p, p.sequences) : p.T;

  std::int64_t to = at.batch * p.o.batch + at.begin * p.o.token + at.head * p.o.group + at.column * p.o.feature;
  const auto store_row = [&](std::int64_t place, const float(&o)[kFour]) {
    if (first_lane) store_four<C::kType>(p.o.data, place, p.o.feature, p.V - at.column, p.whole, o);
  };
  if (at.begin < at.end) {
    Cursor cursor(p, at);
    Token<C> token = load_token<C>(p, at, cursor);
    for (std::int64_t left = at.end - at.begin; left > 0; --left) {
      Token<C> next = token;
      if (left > 1) next = load_token<C>(p, at, cursor);
      float o[kFour];
      update<C>(p, token, state, o);
      store_row(to, o);
      to += p.o.token;
      token = next;
    }
  }
  // Step 6.
  if (p.sequences > 0) store_state<C>(p, at, state);
  const float zero[kFour]{};
  const std::int64_t column = at.head * p.o.group + at.column * p.o.feature;
  for (std::int64_t t = at.unused + at.sequence; t < p.T; t += sequences) store_row(t * p.o.token + column, zero);
}

template <class C>
void launch(const RecurrentParams& p, const DeviceLimits& device, cudaStream_t stream) {
  const std::int64_t scans = std::int64_t{std::max(p.sequences, 1)} * p.HV;
  const std::int64_t warps = scans * ((p.V + C::kColumns - 1) / C::kColumns);
  // Blocks of one warp spread over all multiprocessors; where there are enough, four share the rows in the first level
  // of cache.
  const std::int64_t enough = 2 * std::max(device.multiprocessors, 1);
  const auto each = static_cast<int>(std::clamp<std::int64_t>(warps / enough, 1, kMostWarps));
  recurrent<C><<<static_cast<unsigned>((warps + each - 1) / each), 32 * each, 0, stream>>>(p);
  check_launch("recurrent");
}

template <DType kType>
void launch_type(const RecurrentParams& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  const auto with_lanes = [&]<Gate kGate, Strength kStrength>() {
    if (p.K <= features_of(16)) {
      launch<Config<kType, kGate, kStrength, 16>>(p, device, stream);
    } else {
      launch<Config<kType, kGate, kStrength, 32>>(p, device, stream);
    }
  };
  if (strength_of(kind.op) == Strength::kIndependent) {
    with_lanes.template operator()<Gate::kVector, Strength::kIndependent>();
  } else if (gate_of(kind.op) == Gate::kVector) {
    with_lanes.template operator()<Gate::kVector, Strength::kShared>();
  } else {
    with_lanes.template operator()<Gate::kScalar, Strength::kShared>();
  }
}

}  // namespace

void launch_recurrent(const RecurrentParams& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  if (p.sequences == 0 && p.T == 0) return;
  switch (kind.dtype) {
    case DType::kBF16: return launch_type<DType::kBF16>(p, kind, device, stream);
    case DType::kF16: return launch_type<DType::kF16>(p, kind, device, stream);
    default: return launch_type<DType::kF32>(p, kind, device, stream);
  }
}

}  // namespace rewy::cuda
