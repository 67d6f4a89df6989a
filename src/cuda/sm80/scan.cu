// The scans over chunks (docs/kernels/scan.md). Of one sequence and value head, for 16 value columns a warp:
//
//   forwards    X = Z - E S        R = A X              S  <- diag(lambda) S + F^T R         (Z = w * v)
//               O = Qg S + Cq R                                                              (forward calls only)
//   backwards   dR = Cq^T dO + F dS                     P  = A^T dR
//               dS <- diag(lambda) dS + Qg^T dO - E^T P
//
// All of it is held transposed, value columns as rows: then the accumulators of one product are, once rounded, the
// left operand of the next, and a warp carries its columns through the whole sequence in registers alone. From K = 136
// on, two warps share 16 columns, each with half of the features, and add what they find of E S, Qg S or F dS.
//
// Roles: four producer warps fill a ring of stages in shared memory - copies, and for vector gates E, F and Qg computed
// from k, q and g on the way -, the consumer warps multiply. Named barriers, one "full" and one "empty" a stage.
// For scalar gates the operands are k and q as they lie; the decays and beta scale rows of the products in FP32.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/chunk.cuh"
#include "cuda/device/state.cuh"
#include "cuda/kernels.h"

namespace rewy::cuda {
namespace {

constexpr int kProducers = 128;    ///< threads
constexpr int kMostConsumers = 4;  ///< warps
constexpr int kMostStages = 4;
constexpr int kMostThreads = kProducers + 32 * kMostConsumers;

template <class Element, Gate kGate_, Strength kStrength_, int kKeys_>
struct ScanConfig {
  using T = Element;
  static constexpr bool kVector = kGate_ == Gate::kVector;
  static constexpr bool kIndependent = kStrength_ == Strength::kIndependent;
  static constexpr int kKeys = kKeys_;  ///< K, rounded up
  static constexpr int kKeyTiles = kKeys / kTile;
  static constexpr int kParts = kKeys / 128;         ///< warps that share 16 value columns
  static constexpr int kPartKeys = kKeys / kParts;   ///< features a warp holds
  // Operand tiles of a stage. Scalar gates write with the erase operand: both are k.
  static constexpr int kErase = 0;
  static constexpr int kQuery = kKeyTiles;
  static constexpr int kWrite = kVector ? 2 * kKeyTiles : kErase;
  static constexpr int kOperandTiles = (kVector ? 3 : 2) * kKeyTiles;
  static constexpr int kValueTiles = kIndependent ? 2 : 1;  ///< v (or dO) and w
};

struct alignas(128) TileStorage {
  unsigned char bytes[kTileBytes];
};

template <class C>
struct Stage {
  TileStorage operand[C::kOperandTiles];  ///< [64 tokens, 64 features] each
  TileStorage a, cq;                      ///< [64, 64]
  TileStorage value[C::kValueTiles];      ///< [64 tokens, 64 value columns]
  float erase_scale[kTile];               ///< scalar gates: gamma * beta   [64 tokens]
  float query_scale[kTile];               ///< scalar gates: gamma * scale
  float write_scale[kTile];               ///< scalar gates: decay to the end of the chunk
  float beta[kTile];
  float decay[C::kKeys];  ///< lambda by feature; scalar gates: element 0
  ChunkAt chunk;
};

template <class C>
struct SharedStorage {
  unsigned char staging[kMostConsumers][16 * C::kPartKeys * 2];  ///< rows a consumer warp stores in 16-byte pieces
  float4 partial[C::kParts > 1 ? 2 : 1][C::kParts > 1 ? kMostConsumers : 1][8][32];  ///< [exchange parity][warp]
  float half_decay[2][2][C::kKeys];                          ///< [step parity][half of the chunk][feature]
  Stage<C> stage[1];                                         ///< as many as the launch has room for
};

enum Barrier : int { kFull = 1, kEmpty = kFull + kMostStages, kHalves = kEmpty + kMostStages, kParts };

/// What a block works on.
struct Job {
  std::int64_t sequence, first_slot;
  int head;     ///< value head
  int chunks;   ///< of the sequence
  int column;   ///< first value column
  int stages;
  int consumers;  ///< warps of different columns
  int threads;    ///< of the block
  bool reverse;
  bool query;   ///< Cq and the queries are needed
};

__device__ __forceinline__ std::int64_t slot_of(const Job& job, int step) {
  return job.first_slot + (job.reverse ? job.chunks - 1 - step : step);
}

/// Step 2: the scalars of a chunk, by one warp, two tokens a lane. Every product is over a fixed grouping of positions.
template <class C>
__device__ __forceinline__ void make_scalars(const Params& p, const Job& job, const ChunkAt& at, Stage<C>& stage) {
  const int first = 2 * (threadIdx.x & 31);
  float decay[2], beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if constexpr (!C::kIndependent) stage.beta[first + e] = beta[e] = shared_strength(p, at, job.head, first + e);
    if constexpr (!C::kVector) decay[e] = scalar_decay(p, at, job.head, first + e);
  }
  if constexpr (!C::kVector) {
    const ScalarDecays d = scalar_decays(decay);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      stage.erase_scale[first + e] = d.from_start[e] * beta[e];
      stage.query_scale[first + e] = d.from_start[e] * p.scale;
      stage.write_scale[first + e] = d.to_end[e];
    }
    if (first == 0) stage.decay[0] = d.total;
  }
}

/// 32 rows of one pair of features.
struct GateRows {
  float2 decay[32];
  std::uint32_t k[32];
};

template <class C>
__device__ __forceinline__ void load_gate_rows(const Params& p, const Job& job, const ChunkAt& at, int feature,
                                               int first_row, GateRows& rows) {
  using T = typename C::T;
  const int key_head = job.head / (p.HV / p.H);
  const float* g = row_pointer<const float>(p.g, at.batch, at.token, job.head) + feature;
  const T* k = row_pointer<const T>(p.k, at.batch, at.token, key_head) + feature;
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    const int row = first_row + r;
    const bool valid = row < at.tokens && feature < p.K;
    rows.decay[r] = valid ? *reinterpret_cast<const float2*>(g + row * p.g.token) : make_float2(0.0f, 0.0f);
    rows.k[r] = valid ? *reinterpret_cast<const std::uint32_t*>(k + row * p.k.token) : 0u;
  }
}

/// Step 3, vector gates: E = gamma b k, Qg = gamma q and F = (decay to the end) k of one pair of features and 32 rows.
template <class C>
__device__ __forceinline__ void make_operands(const Params& p, const Job& job, const ChunkAt& at, int feature, int half,
                                              int parity, GateRows& rows, SharedStorage<C>& shared, Stage<C>& stage) {
  using T = typename C::T;
  const int key_head = job.head / (p.HV / p.H);
  const int first_row = half * 32;
  float2 total = {1.0f, 1.0f};
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    rows.decay[r] = {decay_of(rows.decay[r].x), decay_of(rows.decay[r].y)};
    total.x *= rows.decay[r].x;
    total.y *= rows.decay[r].y;
  }
  float2* exchange = reinterpret_cast<float2*>(&shared.half_decay[parity][0][0]) + feature / 2;
  exchange[half * (C::kKeys / 2)] = total;
  ptx::barrier_sync(kHalves, kProducers);  // also publishes stage.beta
  const float2 other = exchange[(1 - half) * (C::kKeys / 2)];
  if (half == 0) *reinterpret_cast<float2*>(&stage.decay[feature]) = {total.x * other.x, total.y * other.y};

  const int tile = feature / kTile, column = feature % kTile;
  unsigned char* erase = stage.operand[C::kErase + tile].bytes;
  unsigned char* query = stage.operand[C::kQuery + tile].bytes;
  unsigned char* write = stage.operand[C::kWrite + tile].bytes;
  const T* q = row_pointer<const T>(p.q, at.batch, at.token, key_head) + feature;
  const T* b = C::kIndependent ? row_pointer<const T>(p.b, at.batch, at.token, job.head) + feature : nullptr;
  float2 gamma = half == 0 ? make_float2(1.0f, 1.0f) : other;
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    const int row = first_row + r;
    const bool valid = row < at.tokens && feature < p.K;
    gamma.x *= rows.decay[r].x;
    gamma.y *= rows.decay[r].y;
    float2 strength;
    if constexpr (C::kIndependent) {
      strength = unpack<T>(valid ? *reinterpret_cast<const std::uint32_t*>(b + row * p.b.token) : 0u);
    } else {
      strength.x = strength.y = stage.beta[row];
    }
    const float2 k = unpack<T>(rows.k[r]);
    const std::uint32_t at_row = tile_offset(row, column);
    *reinterpret_cast<std::uint32_t*>(erase + at_row) = pack<T>(gamma.x * (strength.x * k.x), gamma.y * (strength.y * k.y));
    if (job.query) {
      const float2 x = unpack<T>(valid ? *reinterpret_cast<const std::uint32_t*>(q + row * p.q.token) : 0u);
      *reinterpret_cast<std::uint32_t*>(query + at_row) =
          pack<T>(gamma.x * (p.scale * x.x), gamma.y * (p.scale * x.y));
    }
  }
  float2 end = half == 1 ? make_float2(1.0f, 1.0f) : other;
#pragma unroll
  for (int r = 31; r >= 0; --r) {
    const float2 k = unpack<T>(rows.k[r]);
    *reinterpret_cast<std::uint32_t*>(write + tile_offset(first_row + r, column)) = pack<T>(end.x * k.x, end.y * k.y);
    end.x *= rows.decay[r].x;
    end.y *= rows.decay[r].y;
  }
}

template <class C>
__device__ __forceinline__ void copy_stage(const Params& p, const Job& job, std::int64_t slot, const ChunkAt& at,
                                           Stage<C>& stage) {
  using T = typename C::T;
  const int thread = threadIdx.x;
  const int key_head = job.head / (p.HV / p.H);
  const std::int64_t index = slot * p.HV + job.head;
  const auto copy = [&](TileStorage& tile, const T* from, std::int64_t stride, int rows, int columns) {
    copy_tile(ptx::shared_address(&tile), from, stride, kTile, rows, columns, thread, kProducers);
  };
  copy(stage.a, static_cast<const T*>(p.a) + index * kTile * kTile, kTile, kTile, kTile);
  if (job.query) copy(stage.cq, static_cast<const T*>(p.cq) + index * kTile * kTile, kTile, kTile, kTile);
  const int columns = min(16 * job.consumers, p.V - job.column);
  const Rows& values = job.reverse ? p.d_o : p.v;
  copy(stage.value[0], row_pointer<const T>(values, at.batch, at.token, job.head) + job.column, values.token, at.tokens,
       columns);
  if constexpr (C::kIndependent) {
    if (!job.reverse) {
      copy(stage.value[1], row_pointer<const T>(p.w, at.batch, at.token, job.head) + job.column, p.w.token, at.tokens,
           columns);
    }
  }
  if constexpr (!C::kVector) {
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) {
      const int first = tile * kTile;
      copy(stage.operand[C::kErase + tile], row_pointer<const T>(p.k, at.batch, at.token, key_head) + first, p.k.token,
           at.tokens, p.K - first);
      if (job.query) {
        copy(stage.operand[C::kQuery + tile], row_pointer<const T>(p.q, at.batch, at.token, key_head) + first,
             p.q.token, at.tokens, p.K - first);
      }
    }
  }
  ptx::copy_commit();
}

/// Steps 1 to 4. Copies of a stage are announced one step late where there are stages enough, so that two are under way.
template <class C>
__device__ __forceinline__ void produce(const Params& p, const Job& job, SharedStorage<C>& shared) {
  const int thread = threadIdx.x;
  const bool late = !C::kVector && job.stages > 1;
  const int feature = 2 * (thread % 64), half = thread / 64;
  int s = 0;
  for (int step = 0; step < job.chunks; ++step) {
    const std::int64_t slot = slot_of(job, step);
    const ChunkAt at = locate(p, slot);
    Stage<C>& stage = shared.stage[s];
    // One tile of gates is loaded before the wait; where there are two, registers do not suffice.
    constexpr bool kAhead = C::kKeys == 128;
    GateRows rows;
    if constexpr (C::kVector && kAhead) load_gate_rows<C>(p, job, at, feature, half * 32, rows);
    if (step >= job.stages) ptx::barrier_sync(kEmpty + s, job.threads);
    copy_stage<C>(p, job, slot, at, stage);
    if (thread < 32) make_scalars<C>(p, job, at, stage);
    if (thread == 32) stage.chunk = at;
    if constexpr (C::kVector) {
#pragma unroll 1
      for (int first = 0; first < C::kKeys; first += 128) {
        if constexpr (!kAhead) load_gate_rows<C>(p, job, at, first + feature, half * 32, rows);
        make_operands<C>(p, job, at, first + feature, half, step & 1, rows, shared, stage);
      }
    }
    if (late) {
      if (step > 0) {
        ptx::copy_wait<1>();
        ptx::barrier_arrive(kFull + (s == 0 ? job.stages - 1 : s - 1), job.threads);
      }
    } else {
      ptx::copy_wait<0>();
      ptx::barrier_arrive(kFull + s, job.threads);
    }
    s = s + 1 == job.stages ? 0 : s + 1;
  }
  if (late && job.chunks > 0) {
    ptx::copy_wait<0>();
    ptx::barrier_arrive(kFull + (s == 0 ? job.stages - 1 : s - 1), job.threads);
  }
}

/// One consumer warp: 16 value columns through the sequence.
template <class C>
struct Consumer {
  using T = typename C::T;
  static constexpr int kKeySteps = C::kPartKeys / 16;

  const Params& p;
  const Job& job;
  SharedStorage<C>& shared;
  int warp;    ///< among those of different columns
  int part;    ///< which features
  int column;  ///< first value column of this warp
  int parity;  ///< of the exchange between the parts
  Accumulator<C::kPartKeys / 8> state;  ///< S^T or dS^T   [16 value columns, features of the part]

  __device__ __forceinline__ bool leads() const { return C::kParts == 1 || part == 0; }

  __device__ __forceinline__ std::uint32_t operand(const Stage<C>& stage, int which, int key_step) const {
    return ptx::shared_address(&stage.operand[which + part * (C::kPartKeys / kTile) + key_step / 4]);
  }

  /// acc[16, 64 tokens] = state operand^T, over all parts.
  __device__ __forceinline__ void multiply_state(const Stage<C>& stage, int which, Accumulator<8>& acc) {
    acc.clear();
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      std::uint32_t a[4], b[4];
      to_fragment<T>(state, j, a);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_b(operand(stage, which, j), 16 * n, 16 * (j % 4), b);
        multiply_pair<T>(acc, 2 * n, a, b);
      }
    }
    if constexpr (C::kParts > 1) {
      // Both warps add in the same order: their sums stay equal in bits.
      const int lane = threadIdx.x & 31;
      auto& mine = shared.partial[parity][2 * warp + part];
      const auto& other = shared.partial[parity][2 * warp + 1 - part];
#pragma unroll
      for (int n = 0; n < 8; ++n) mine[n][lane] = {acc.c[n][0], acc.c[n][1], acc.c[n][2], acc.c[n][3]};
      ptx::barrier_sync(kParts + warp, 32 * C::kParts);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 x = other[n][lane];
        acc.c[n][0] += x.x;
        acc.c[n][1] += x.y;
        acc.c[n][2] += x.z;
        acc.c[n][3] += x.w;
      }
      parity ^= 1;
    }
  }

  /// state[16, K] += x operand, x [16, 64 tokens] in fragments.
  __device__ __forceinline__ void add_to_state(const Stage<C>& stage, int which, const std::uint32_t (&x)[4][4]) {
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t b[4];
        load_b_transposed(operand(stage, which, j), 16 * i, 16 * (j % 4), b);
        multiply_pair<T>(state, 2 * j, x[i], b);
      }
    }
  }

  __device__ __forceinline__ void decay_state(const Stage<C>& stage) {
#pragma unroll
    for (int n = 0; n < C::kPartKeys / 8; ++n) {
      float2 decay;
      if constexpr (C::kVector) {
        decay = *reinterpret_cast<const float2*>(&stage.decay[part * C::kPartKeys + 8 * n + lane_column()]);
      } else {
        decay.x = decay.y = stage.decay[0];
      }
      state.c[n][0] *= decay.x;
      state.c[n][1] *= decay.y;
      state.c[n][2] *= decay.x;
      state.c[n][3] *= decay.y;
    }
  }

  /// acc[n] *= scale[token], tokens being columns.
  __device__ __forceinline__ static void scale_columns(Accumulator<8>& acc, const float* scale) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(&scale[8 * n + lane_column()]);
      acc.c[n][0] *= x.x;
      acc.c[n][1] *= x.y;
      acc.c[n][2] *= x.x;
      acc.c[n][3] *= x.y;
    }
  }

  /// Stores [16, 64 kTiles] fragments as rows of `stride` elements, in 16-byte pieces by way of shared memory.
  template <int kTiles, class Fragment>
  __device__ __forceinline__ void store_rows(T* to, std::int64_t stride, int columns, Fragment&& fragment) const {
    unsigned char* buffer = shared.staging[warp * C::kParts + part];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4 * kTiles; ++j) {
      std::uint32_t a[4];
      fragment(j, a);
      unsigned char* tile = buffer + j / 4 * 2048;
      const int c = 16 * (j % 4) + lane_column();
      *reinterpret_cast<std::uint32_t*>(tile + tile_offset(lane_row(), c)) = a[0];
      *reinterpret_cast<std::uint32_t*>(tile + tile_offset(lane_row() + 8, c)) = a[1];
      *reinterpret_cast<std::uint32_t*>(tile + tile_offset(lane_row(), c + 8)) = a[2];
      *reinterpret_cast<std::uint32_t*>(tile + tile_offset(lane_row() + 8, c + 8)) = a[3];
    }
    __syncwarp();
#pragma unroll
    for (int piece = 0; piece < 4 * kTiles; ++piece) {
      const int at = piece * 32 + (threadIdx.x & 31);
      const int tile = at / 128, row = at % 128 / 8, c = at % 8 * 8;
      if (column + row < p.V && tile * kTile + c < columns) {
        *reinterpret_cast<uint4*>(to + row * stride + tile * kTile + c) =
            *reinterpret_cast<const uint4*>(buffer + tile * 2048 + tile_offset(row, c));
      }
    }
  }

  __device__ __forceinline__ std::int64_t index(int step) const { return slot_of(job, step) * p.HV + job.head; }

  __device__ __forceinline__ void store_state(void* states, int step) const {
    if (states == nullptr) return;
    const int first = part * C::kPartKeys;
    store_rows<C::kPartKeys / kTile>(static_cast<T*>(states) + (index(step) * p.V + column) * p.K + first, p.K,
                                     p.K - first, [&](int j, std::uint32_t(&a)[4]) { to_fragment<T>(state, j, a); });
  }

  __device__ __forceinline__ void store_tokens(void* values, int step, const std::uint32_t (&x)[4][4]) const {
    if (values == nullptr || !leads()) return;
    store_rows<1>(static_cast<T*>(values) + (index(step) * p.V + column) * kTile, kTile, kTile,
                  [&](int j, std::uint32_t(&a)[4]) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) a[e] = x[j][e];
                  });
  }

  __device__ __forceinline__ void store_output(const ChunkAt& at, const Accumulator<8>& o) const {
    T* to = row_pointer<T>(p.o, at.batch, at.token, job.head) + column + lane_column();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int token = 8 * n + lane_row();
      const std::uint32_t lower = ptx::transpose_8x8(pack<T>(o.c[n][0], o.c[n][1]));
      const std::uint32_t upper = ptx::transpose_8x8(pack<T>(o.c[n][2], o.c[n][3]));
      if (token >= at.tokens) continue;
      if (column < p.V) *reinterpret_cast<std::uint32_t*>(to + token * p.o.token) = lower;
      if (column + 8 < p.V) *reinterpret_cast<std::uint32_t*>(to + token * p.o.token + 8) = upper;
    }
  }

  template <bool kOutput>
  __device__ __forceinline__ void step_forward(int step, const Stage<C>& stage) {
    store_state(p.state_t, step);
    Accumulator<8> acc;
    multiply_state(stage, C::kErase, acc);  // step 5: (E S)^T
    if constexpr (!C::kVector) scale_columns(acc, stage.erase_scale);
    // Step 6: X = Z - E S, subtracted in FP32, rounded once.
    std::uint32_t x[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      std::uint32_t v[4], w[4];
      load_a_transposed(ptx::shared_address(&stage.value[0]), 16 * n, 16 * warp, v);
      if constexpr (C::kIndependent) load_a_transposed(ptx::shared_address(&stage.value[1]), 16 * n, 16 * warp, w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 value = unpack<T>(v[e]);
        float2 strength;
        if constexpr (C::kIndependent) {
          strength = unpack<T>(w[e]);
        } else {
          strength = *reinterpret_cast<const float2*>(&stage.beta[16 * n + 8 * (e / 2) + lane_column()]);
        }
        const float* es = &acc.c[2 * n + e / 2][2 * (e % 2)];
        x[n][e] = pack<T>(strength.x * value.x - es[0], strength.y * value.y - es[1]);
      }
    }
    // Step 7: R = A X.
    acc.clear();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int j = 0; j <= n; ++j) {
        std::uint32_t b[4];
        load_b(ptx::shared_address(&stage.a), 16 * n, 16 * j, b);
        multiply_pair<T>(acc, 2 * n, x[j], b);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) to_fragment<T>(acc, n, x[n]);
    store_tokens(p.r_t, step, x);
    if constexpr (kOutput) {
      // Step 8: O = Qg S + Cq R.
      Accumulator<8> o;
      multiply_state(stage, C::kQuery, o);
      if constexpr (!C::kVector) scale_columns(o, stage.query_scale);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j <= n; ++j) {
          std::uint32_t b[4];
          load_b(ptx::shared_address(&stage.cq), 16 * n, 16 * j, b);
          multiply_pair<T>(o, 2 * n, x[j], b);
        }
      }
      if (leads()) store_output(stage.chunk, o);
    }
    // Step 9: the next state.
    if constexpr (!C::kVector) {
      scale_columns(acc, stage.write_scale);
#pragma unroll
      for (int n = 0; n < 4; ++n) to_fragment<T>(acc, n, x[n]);
    }
    decay_state(stage);
    add_to_state(stage, C::kWrite, x);
  }

  __device__ __forceinline__ void step_reverse(int step, const Stage<C>& stage) {
    store_state(p.dstate_t, step);
    Accumulator<8> acc;
    multiply_state(stage, C::kWrite, acc);  // step 10: (F dS)^T
    if constexpr (!C::kVector) scale_columns(acc, stage.write_scale);
    std::uint32_t d_o[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_a_transposed(ptx::shared_address(&stage.value[0]), 16 * i, 16 * warp, d_o[i]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = n; i < 4; ++i) {
        std::uint32_t b[4];
        load_b_transposed(ptx::shared_address(&stage.cq), 16 * i, 16 * n, b);
        multiply_pair<T>(acc, 2 * n, d_o[i], b);
      }
    }
    // Step 11: P = A^T dR.
    std::uint32_t x[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) to_fragment<T>(acc, n, x[n]);
    acc.clear();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = n; i < 4; ++i) {
        std::uint32_t b[4];
        load_b_transposed(ptx::shared_address(&stage.a), 16 * i, 16 * n, b);
        multiply_pair<T>(acc, 2 * n, x[i], b);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) to_fragment<T>(acc, n, x[n]);
    store_tokens(p.p_t, step, x);
    // Step 12: the state gradient before the chunk.
    if constexpr (C::kVector) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] ^= 0x80008000u;  // -P
      }
    } else {
      scale_columns(acc, stage.erase_scale);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        to_fragment<T>(acc, n, x[n]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[n][e] ^= 0x80008000u;
          const float2 scale = *reinterpret_cast<const float2*>(&stage.query_scale[16 * n + 8 * (e / 2) + lane_column()]);
          const float2 value = unpack<T>(d_o[n][e]);
          d_o[n][e] = pack<T>(value.x * scale.x, value.y * scale.y);
        }
      }
    }
    decay_state(stage);
    add_to_state(stage, C::kQuery, d_o);
    add_to_state(stage, C::kErase, x);
  }

  template <bool kOutput>
  __device__ __forceinline__ void run() {
    const int first = part * C::kPartKeys;
    load_state(job.reverse ? p.d_final_state : p.initial_state, job.sequence, job.head, first, column, p.K, p.V, state);
      int s = 0;
    for (int step = 0; step < job.chunks; ++step) {
      ptx::barrier_sync(kFull + s, job.threads);
      const Stage<C>& stage = shared.stage[s];
      if constexpr (kOutput) {
        step_forward<true>(step, stage);
      } else if (job.reverse) {
        step_reverse(step, stage);
      } else {
        step_forward<false>(step, stage);
      }
      if (step + job.stages < job.chunks) ptx::barrier_arrive(kEmpty + s, job.threads);
      s = s + 1 == job.stages ? 0 : s + 1;
    }
    if (kOutput || job.reverse) {
      store_state_fp32(kOutput ? p.final_state : p.d_initial_state, job.sequence, job.head, first, column, p.K, p.V,
                       state);
    }
  }
};

/// Blocks: [sequence][value head][slice of value columns], and with both directions those innermost.
template <class C, bool kOutput>
__global__ void __launch_bounds__(kMostThreads, 1)
    scan(const __grid_constant__ Params p, const int stages, const bool both) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(memory);
  Job job;
  job.stages = stages;
  job.threads = static_cast<int>(blockDim.x);
  job.consumers = (job.threads - kProducers) / (32 * C::kParts);
  std::int64_t block = blockIdx.x;
  job.reverse = !kOutput;
  if (both) {
    job.reverse = (block & 1) != 0;
    block >>= 1;
  }
  job.query = kOutput || job.reverse;
  const int width = 16 * job.consumers;
  const int slices = (p.V + width - 1) / width;
  job.column = static_cast<int>(block % slices) * width;
  block /= slices;
  job.head = static_cast<int>(block % p.HV);
  job.sequence = block / p.HV;
  if (p.cu_seqlens != nullptr) {
    job.first_slot = p.first_chunk[job.sequence];
    job.chunks = p.first_chunk[job.sequence + 1] - p.first_chunk[job.sequence];
  } else {
    job.chunks = static_cast<int>((p.T + kTile - 1) / kTile);
    job.first_slot = job.sequence * job.chunks;
  }
  if (threadIdx.x < kProducers) {
    produce<C>(p, job, shared);
  } else {
    const int warp = (static_cast<int>(threadIdx.x) - kProducers) / 32;
    const int columns = warp / C::kParts;
    Consumer<C> consumer{p, job, shared, columns, warp % C::kParts, job.column + 16 * columns, 0, {}};
    consumer.template run<kOutput>();
  }
}

template <class C>
int shared_bytes(int stages) {
  return static_cast<int>(sizeof(SharedStorage<C>) + (stages - 1) * sizeof(Stage<C>));
}

template <class C, bool kOutput>
void launch(const Params& p, const DeviceLimits& device, bool both, cudaStream_t stream) {
  const std::int64_t heads = p.sequences * p.HV;
  if (heads == 0) return;
  // Few heads: fewer columns a block, until every multiprocessor has one. Each column's warp takes the same time.
  const auto blocks_of = [&](int warps) { return heads * ((p.V + 16 * warps - 1) / (16 * warps)) * (both ? 2 : 1); };
  int warps = 1;
  while (warps * C::kParts < kMostConsumers && 16 * warps < p.V && blocks_of(warps) > device.multiprocessors) warps *= 2;
  int stages = kMostStages;
  while (stages > 1 && shared_bytes<C>(stages) > device.shared_bytes_per_block) --stages;
  const int bytes = shared_bytes<C>(stages);
  const auto kernel = scan<C, kOutput>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "scan");
  kernel<<<static_cast<unsigned>(blocks_of(warps)), kProducers + 32 * C::kParts * warps, bytes, stream>>>(p, stages, both);
  check_launch("scan");
}

template <class Fn>
void with_config(const Params& p, const Kind& kind, Fn&& fn) {
  const auto with_keys = [&]<class T, Gate kGate, Strength kStrength>() {
    if (p.K <= 128) return fn.template operator()<ScanConfig<T, kGate, kStrength, 128>>();
    return fn.template operator()<ScanConfig<T, kGate, kStrength, 256>>();
  };
  const auto with_traits = [&]<class T>() {
    if (strength_of(kind.op) == Strength::kIndependent) {
      return with_keys.template operator()<T, Gate::kVector, Strength::kIndependent>();
    }
    if (gate_of(kind.op) == Gate::kVector) return with_keys.template operator()<T, Gate::kVector, Strength::kShared>();
    return with_keys.template operator()<T, Gate::kScalar, Strength::kShared>();
  };
  if (kind.dtype == DType::kBF16) return with_traits.template operator()<ptx::BFloat>();
  return with_traits.template operator()<ptx::Half>();
}

}  // namespace

int scan_shared_bytes(const Kind& kind, std::int64_t K) {
  Params p{};
  p.K = static_cast<std::int32_t>(K);
  int bytes = 0;
  with_config(p, kind, [&]<class C>() { bytes = shared_bytes<C>(1); });
  return bytes;
}

void launch_scan_output(const Params& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  with_config(p, kind, [&]<class C>() { launch<C, true>(p, device, false, stream); });
}

void launch_scan_both(const Params& p, const Kind& kind, const DeviceLimits& device, bool states_saved,
                      cudaStream_t stream) {
  with_config(p, kind, [&]<class C>() { launch<C, false>(p, device, !states_saved, stream); });
}

}  // namespace rewy::cuda
