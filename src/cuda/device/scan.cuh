// What the scans share: what a block works on, the stages of its ring, copies and scalars, and the steps inside a
// chunk; and the producer warps of the portable form (docs/kernels/scan.md, steps 1 to 4).
//
// Four producer warps copy the operands of the coming chunks into a ring of stages in shared memory, the consumer warps
// multiply. Each stage has a barrier that says "full" and one that says "free". For scalar gates the operands are k and
// q as they lie, and the decays and beta scale rows of the products in FP32; for vector gates they are E, F and Qg
// (operands.cu).
#pragma once

#include <algorithm>

#include "cuda/device/chunk.cuh"
#include "cuda/traits.h"

namespace rewy::cuda::scans {

inline constexpr int kProducers = 128;  ///< threads
inline constexpr int kMostStages = 4;

template <class Element, Gate kGate_, Strength kStrength_, int kKeys_>
struct ScanConfig {
  using T = Element;
  static constexpr bool kVector = kGate_ == Gate::kVector;
  static constexpr bool kIndependent = kStrength_ == Strength::kIndependent;
  static constexpr int kKeys = kKeys_;             ///< K, rounded up
  static constexpr int kKeyTiles = kKeys / kTile;  ///< of 64 features
  // Operand tiles of a stage, one for each 64 features. Scalar gates write with the erase operand: both are k.
  static constexpr int kErase = 0;
  static constexpr int kQuery = kKeyTiles;
  static constexpr int kWrite = kVector ? 2 * kKeyTiles : kErase;
  static constexpr int kOperandTiles = (kVector ? 3 : 2) * kKeyTiles;
  static constexpr int kValueTiles = kIndependent ? 2 : 1;  ///< v (or dO) and w
};

struct alignas(1024) TileStorage {  // wgmma's swizzle counts from 1024-byte boundaries
  unsigned char bytes[kTileBytes];
};

template <class C>
struct Stage {
  TileStorage operand[C::kOperandTiles];      ///< [64 tokens, 64 features] each
  TileStorage a, cq;                          ///< [64, 64]
  TileStorage value[C::kValueTiles];          ///< [64 tokens, 64 value columns]
  float erase_scale[C::kVector ? 1 : kTile];  ///< scalar gates: gamma * beta   [64 tokens]
  float query_scale[C::kVector ? 1 : kTile];  ///< scalar gates: gamma * scale
  float write_scale[C::kVector ? 1 : kTile];  ///< scalar gates: decay to the end of the chunk
  alignas(16) float beta[kTile];
  float decay[C::kKeys];  ///< lambda by feature; scalar gates: element 0
  ChunkAt chunk;
  // What its readers report to, and on Hopper its copies; by part, of which only Hopper's form has two.
  ptx::Barrier free[2], landed[2];
};

enum NamedBarrier : int { kFull = 1, kOfConsumers = kFull + kMostStages };

/// What a block works on.
struct Job {
  std::int64_t sequence, first_slot;
  int head, key_head;
  int chunks;  ///< of the sequence
  int column;  ///< first value column
  int width;   ///< value columns, a multiple of 16
  int stages, threads;
  bool reverse;
  bool query;  ///< Cq and the queries are needed

  __device__ __forceinline__ std::int64_t slot(int step) const {
    return first_slot + (reverse ? chunks - 1 - step : step);
  }
  /// The chunk of a step. Unpacked ones follow from the step alone.
  __device__ __forceinline__ ChunkAt chunk(const Params& p, int step) const {
    if (p.cu_seqlens != nullptr) return p.chunk_table[slot(step)];
    const int number = reverse ? chunks - 1 - step : step;
    const std::int64_t token = static_cast<std::int64_t>(number) * kTile;
    const auto batch = static_cast<std::int32_t>(sequence);
    const auto left = static_cast<int>(p.T - token);
    return {token, batch, batch, min(left, kTile), number + 1 == chunks ? 1 : 0};
  }
  /// Where the step's chunk and this head stand in the arrays between the kernels.
  __device__ __forceinline__ std::int64_t index(const Params& p, int step) const { return slot(step) * p.HV + head; }
};

/// Blocks: [sequence][value head][value columns], and with both directions those innermost.
template <bool kOutput>
__device__ __forceinline__ Job find_job(const Params& p, unsigned block_index, int width, int stages, bool both) {
  Job job;
  job.stages = stages;
  job.threads = static_cast<int>(blockDim.x);
  job.width = width;
  std::int64_t block = block_index;
  job.reverse = !kOutput;
  if (both) {
    job.reverse = (block & 1) != 0;
    block >>= 1;
  }
  job.query = kOutput || job.reverse;
  const int slices = (p.V + width - 1) / width;
  job.column = static_cast<int>(block % slices) * width;
  block /= slices;
  job.head = static_cast<int>(block % p.HV);
  job.key_head = job.head / (p.HV / p.H);
  job.sequence = block / p.HV;
  if (p.cu_seqlens != nullptr) {
    job.first_slot = p.first_chunk[job.sequence];
    job.chunks = static_cast<int>(p.first_chunk[job.sequence + 1] - job.first_slot);
  } else {
    job.chunks = static_cast<int>((p.T + kTile - 1) / kTile);
    job.first_slot = job.sequence * job.chunks;
  }
  return job;
}

/// Two tokens' gate and strength as they lie in memory: loaded a step ahead, converted when needed.
struct RawScalars {
  float g[2];
  std::uint32_t beta[2];
  int tokens;  ///< of the chunk
};

/// Nothing here waits for a load: lanes past the tail load the last token again, and are masked when the values are
/// used.
template <class C>
__device__ __forceinline__ RawScalars load_scalars(const Params& p, const Job& job, const ChunkAt& at) {
  RawScalars raw{};
  raw.tokens = at.tokens;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const std::int64_t token = at.token + min(2 * static_cast<int>(threadIdx.x & 31) + e, at.tokens - 1);
    if constexpr (!C::kVector) {
      if (p.g.data != nullptr) raw.g[e] = *row_pointer<const float>(p.g, at.batch, token, job.head);
    }
    if constexpr (!C::kIndependent) {
      const std::int64_t place = at.batch * p.beta.batch + token * p.beta.token + job.head * p.beta.head;
      if (p.strength_dtype == DType::kF32) {
        raw.beta[e] = static_cast<const std::uint32_t*>(p.beta.data)[place];
      } else {
        raw.beta[e] = static_cast<const std::uint16_t*>(p.beta.data)[place];
      }
    }
  }
  return raw;
}

/// Step 3: the scalars of a chunk, by one warp, two tokens a lane.
template <class C>
__device__ __forceinline__ void store_scalars(const Params& p, const Job& job, const RawScalars& raw, Stage<C>& stage) {
  const int first = 2 * static_cast<int>(threadIdx.x & 31);
  float beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool valid = first + e < raw.tokens;
    stage.beta[first + e] = beta[e] = valid ? scalar_from_bits(raw.beta[e], p.strength_dtype) : 0.0f;
  }
  if constexpr (!C::kVector) {
    const float decay[2] = {first < raw.tokens ? decay_of(raw.g[0]) : 1.0f,
                            first + 1 < raw.tokens ? decay_of(raw.g[1]) : 1.0f};
    const ScalarDecays d = scalar_decays(decay);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Backwards the state is divided by scale_rest (params.h).
      stage.erase_scale[first + e] = d.from_start[e] * (job.reverse ? beta[e] / p.scale_rest : beta[e]);
      stage.query_scale[first + e] = d.from_start[e] * (job.reverse ? p.scale_power : p.scale);
      stage.write_scale[first + e] = d.to_end[e] * (job.reverse ? p.scale_rest : 1.0f);
    }
    if (first == 0) stage.decay[0] = d.total;
  }
}

/// Step 2: the copies of a chunk, by kThreads threads, as copy_tile counts them.
template <class C, int kThreads>
struct Copies {
  using T = typename C::T;
  const Params& p;
  const Job& job;

  __device__ __forceinline__ void tile(TileStorage& to, const T* from, std::int64_t stride, int rows,
                                       int columns) const {
    copy_tile<kThreads>(ptx::shared_address(&to), from, stride, rows, columns);
  }

  __device__ __forceinline__ void features(TileStorage* to, const Rows& rows, int head, const ChunkAt& at) const {
    const T* from = row_pointer<const T>(rows, at.batch, at.token, head);
#pragma unroll
    for (int part = 0; part < C::kKeyTiles; ++part) {
      tile(to[part], from + part * kTile, rows.token, at.tokens, p.K - part * kTile);
    }
  }

  __device__ __forceinline__ void start(std::int64_t slot, const ChunkAt& at, Stage<C>& stage) const {
    const std::int64_t index = slot * p.HV + job.head;
    const int columns = min(job.width, p.V - job.column);
    if constexpr (C::kVector) {
      features(stage.operand + C::kErase, p.erase, job.head, at);
      features(stage.operand + C::kWrite, p.write, job.head, at);
      if (job.query) features(stage.operand + C::kQuery, p.query, job.head, at);
      // Features past K get a decay of 0: their states are zero, and stay numbers.
      const int first = 4 * (static_cast<int>(threadIdx.x) % kThreads);
      if (first < C::kKeys) {
        ptx::copy_async_16(ptx::shared_address(&stage.decay[first]), p.decay + index * p.K + first, first < p.K);
      }
    } else {
      features(stage.operand + C::kErase, p.k, job.key_head, at);
      if (job.query) features(stage.operand + C::kQuery, p.q, job.key_head, at);
    }
    tile(stage.a, static_cast<const T*>(p.a) + index * kTile * kTile, kTile, kTile, kTile);
    if (job.query) tile(stage.cq, static_cast<const T*>(p.cq) + index * kTile * kTile, kTile, kTile, kTile);
    // Columns beyond the block's are never read.
    if (static_cast<int>(threadIdx.x) % 8 * 8 < job.width) {
      const Rows& values = job.reverse ? p.d_o : p.v;
      tile(stage.value[0], row_pointer<const T>(values, at.batch, at.token, job.head) + job.column, values.token,
           at.tokens, columns);
      if constexpr (C::kIndependent) {
        if (!job.reverse) {
          tile(stage.value[1], row_pointer<const T>(p.w, at.batch, at.token, job.head) + job.column, p.w.token,
               at.tokens, columns);
        }
      }
    }
    ptx::copy_commit();
  }
};

/// The ring's stage of a step, and the parity of its barriers' phase, step after step.
struct Place {
  int s = 0, parity = 0;
  /// At most as many steps as there are stages.
  __device__ __forceinline__ void advance(int stages, int steps = 1) {
    s += steps;
    const bool wraps = s >= stages;
    s -= wraps ? stages : 0;
    parity ^= wraps ? 1 : 0;
  }
};

/// Step 1: the stage's part has been read.
template <class C>
__device__ __forceinline__ void wait_until_free(const Job& job, int step, const Place& at, int part, Stage<C>& stage) {
  if (step >= job.stages) ptx::wait(stage.free[part], at.parity ^ 1);
}

/// This thread's copies but the last kPending groups have landed; the barrier's arrival publishes them.
template <int kPending>
__device__ __forceinline__ void announce(int barrier, int threads) {
  ptx::copy_wait<kPending>();
  ptx::barrier_arrive(barrier, threads);
}

/// Steps 1 to 4. A stage is announced one step late where there are stages enough, so that two are under way.
template <class C>
__device__ __forceinline__ void produce(const Params& p, const Job& job, Stage<C>* stages) {
  if (job.chunks == 0) return;
  const bool late = job.stages > 2;
  const Copies<C, kProducers> copies{p, job};
  const bool has_scalars = threadIdx.x < 32 && !(C::kVector && C::kIndependent);
  ChunkAt at = job.chunk(p, 0);
  RawScalars raw{};
  if (has_scalars) raw = load_scalars<C>(p, job, at);
  Place place;
  for (int step = 0; step < job.chunks; ++step) {
    const int s = place.s;
    Stage<C>& stage = stages[s];
    wait_until_free(job, step, place, 0, stage);
    copies.start(job.slot(step), at, stage);
    if (threadIdx.x == 32) stage.chunk = at;
    if (has_scalars) store_scalars<C>(p, job, raw, stage);
    if (step + 1 < job.chunks) {
      at = job.chunk(p, step + 1);
      if (has_scalars) raw = load_scalars<C>(p, job, at);
    }
    if (!late) {
      announce<0>(kFull + s, job.threads);
    } else if (step > 0) {
      announce<1>(kFull + (s == 0 ? job.stages - 1 : s - 1), job.threads);
    }
    place.advance(job.stages);
  }
  if (late) announce<0>(kFull + (place.s == 0 ? job.stages - 1 : place.s - 1), job.threads);
}

/// The accumulators' columns, tokens or features, times scale[column].
template <int kN>
__device__ __forceinline__ void scale_columns(Accumulator<kN>& acc, const float* scale) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 x = *reinterpret_cast<const float2*>(&scale[8 * n + lane_column()]);
    acc.c[n][0] *= x.x;
    acc.c[n][1] *= x.y;
    acc.c[n][2] *= x.x;
    acc.c[n][3] *= x.y;
  }
}

/// Whether anything decays.
template <class C>
__device__ __forceinline__ bool is_gated(const Params& p) {
  return C::kVector || p.g.data != nullptr;
}

/// Scalar gates: the state's gradient as it is kept (params.h) from what it is, and back, by `factor`.
template <class C, int kN>
__device__ __forceinline__ void rescale_gradient(const Job& job, float factor, Accumulator<kN>& state) {
  if constexpr (!C::kVector) {
    if (!job.reverse || job.chunks == 0) return;  // without chunks it passes through in bits
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.c[n][e] *= factor;
    }
  }
}

/// O's first half, (Qg S)^T, from its product with queries not yet scaled.
template <class C>
__device__ __forceinline__ void scale_output(const Params& p, const Stage<C>& stage, Accumulator<8>& o) {
  if constexpr (C::kVector) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o.c[n][e] *= p.scale;
    }
  } else {
    scale_columns(o, stage.query_scale);
  }
}

/// Fragments of an accumulator [16, 64].
template <class T>
__device__ __forceinline__ void to_fragments(const Accumulator<8>& acc, std::uint32_t (&x)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) to_fragment<T>(acc, n, x[n]);
}

/// Scales of 64 tokens by pairs, as an accumulator's columns lie; those of fragment n from 2 n on.
struct Scales {
  float2 x[8];
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = *reinterpret_cast<const float2*>(&from[8 * n + lane_column()]);
  }
};

/// Z^T of the warp's columns and tokens 16 n to 16 n + 15, FP32, in a fragment's order; `column` is the warp's first
/// one in the tile, `strength` beta where it is shared.
template <class C>
__device__ __forceinline__ void load_values(const Stage<C>& stage, int column, int n, const Scales& strength,
                                            float2 (&z)[4]) {
  using T = typename C::T;
  std::uint32_t v[4], w[4];
  load_a_transposed(ptx::shared_address(&stage.value[0]), 16 * n, column, v);
  if constexpr (C::kIndependent) load_a_transposed(ptx::shared_address(&stage.value[1]), 16 * n, column, w);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 value = unpack<T>(v[e]);
    const float2 by = C::kIndependent ? unpack<T>(w[e]) : strength.x[2 * n + e / 2];
    z[e] = {by.x * value.x, by.y * value.y};
  }
}

/// Step 6: the fragment n of X = Z - E S that z is of, subtracted in FP32, rounded once. es holds E S, for scalar gates
/// still without the scale of its rows, which `scale` has for both halves of the fragment.
template <class T>
__device__ __forceinline__ void subtract_from_values(int n, const float2 (&z)[4], const Accumulator<8>& es,
                                                     const float2* scale, std::uint32_t (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float* minus = &es.c[2 * n + e / 2][2 * (e % 2)];
    const float2 s = scale == nullptr ? make_float2(1.0f, 1.0f) : scale[e / 2];
    x[e] = pack<T>(z[e].x - s.x * minus[0], z[e].y - s.y * minus[1]);
  }
}

/// dO^T of the warp's columns, as fragments [16, 64 tokens].
template <class C>
__device__ __forceinline__ void load_output_gradient(const Stage<C>& stage, int column, std::uint32_t (&d_o)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) load_a_transposed(ptx::shared_address(&stage.value[0]), 16 * i, column, d_o[i]);
}

/// A fragment of dO^T times the scale of the queries - for scalar gates its power of two, and gamma of the tokens,
/// which `scale` has for both halves of the fragment -, as the sum of two: the state's gradient at the start of a
/// sequence is a sum of few such terms, where a rounding would not average out. Without a gate the second is zero, and
/// its product left out.
template <class C>
__device__ __forceinline__ void scale_output_gradient(const Params& p, const float2* scale,
                                                      const std::uint32_t (&d_o)[4], std::uint32_t (&high)[4],
                                                      std::uint32_t (&low)[4]) {
  using T = typename C::T;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 s = C::kVector ? make_float2(p.scale, p.scale) : scale[e / 2], value = unpack<T>(d_o[e]);
    const float2 exact = {value.x * s.x, value.y * s.y};
    high[e] = pack<T>(exact.x, exact.y);
    const float2 stored = unpack<T>(high[e]);
    low[e] = pack<T>(exact.x - stored.x, exact.y - stored.y);
  }
}

/// Stores fragments [16, 64] as rows of `stride` elements, in 16-byte pieces by way of 2 KB of shared memory. Rows from
/// valid_rows and columns from valid_columns on are left out.
template <class T, class Fragment>
__device__ __forceinline__ void store_rows(unsigned char* buffer, T* to, std::int64_t stride, int valid_rows,
                                           int valid_columns, Fragment&& fragment) {
  __syncwarp();  // the last rows have been read
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    std::uint32_t a[4];
    fragment(j, a);
    const int c = 16 * j + lane_column();
    *reinterpret_cast<std::uint32_t*>(buffer + tile_offset(lane_row(), c)) = a[0];
    *reinterpret_cast<std::uint32_t*>(buffer + tile_offset(lane_row() + 8, c)) = a[1];
    *reinterpret_cast<std::uint32_t*>(buffer + tile_offset(lane_row(), c + 8)) = a[2];
    *reinterpret_cast<std::uint32_t*>(buffer + tile_offset(lane_row() + 8, c + 8)) = a[3];
  }
  __syncwarp();
  const int first = static_cast<int>(threadIdx.x & 31) / 8, c = static_cast<int>(threadIdx.x % 8) * 8;
  const int left = c < valid_columns ? valid_rows - first : 0;
  to += first * stride + c;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (4 * i < left) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(buffer + tile_offset(first + 4 * i, c));
    }
    to += 4 * stride;
  }
}

/// O of the warp's 16 columns, from its transpose.
template <class T>
__device__ __forceinline__ void store_output(const Params& p, const Job& job, const ChunkAt& at, int column,
                                             const Accumulator<8>& o) {
  T* to = row_pointer<T>(p.o, at.batch, at.token + lane_row(), job.head) + column + lane_column();
  const std::int64_t stride = 8 * p.o.token;
  const int left = at.tokens - lane_row();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const std::uint32_t lower = ptx::transpose_8x8(pack<T>(o.c[n][0], o.c[n][1]));
    const std::uint32_t upper = ptx::transpose_8x8(pack<T>(o.c[n][2], o.c[n][3]));
    if (8 * n < left) {
      if (column < p.V) *reinterpret_cast<std::uint32_t*>(to) = lower;
      if (column + 8 < p.V) *reinterpret_cast<std::uint32_t*>(to + 8) = upper;
    }
    to += stride;
  }
}

/// Calls fn with the config of a call; kMostKeys bounds what its architecture has instances for.
template <int kMostKeys, class Fn>
void with_config(std::int64_t K, const Kind& kind, Fn&& fn) {
  with_traits(kind, [&]<class T, Gate kGate, Strength kStrength>() {
    if (K <= 64) return fn.template operator()<ScanConfig<T, kGate, kStrength, 64>>();
    if (K <= 128) return fn.template operator()<ScanConfig<T, kGate, kStrength, 128>>();
    if constexpr (kMostKeys > 128) fn.template operator()<ScanConfig<T, kGate, kStrength, 256>>();
  });
}

}  // namespace rewy::cuda::scans
