// The scans over chunks with warpgroup products (docs/kernels/scan.md). The algorithm is that of sm80/scan.cu:
// everything transposed, value columns as rows, the accumulators of one product being the left operand of the next.
//
// Here one warpgroup holds 64 value columns and all features: 64 rows are what wgmma multiplies at once, with each
// operand read from shared memory once for all four warps. In mma.sync's form every warp reads every operand, and
// shared memory is what the step waits for.
//
// Two producer warps. One has whole chunks brought as tiles by the copy engine (TMA), one instruction each, which
// report to the stage's barrier; the chunk that ends a sequence it copies row by row, zeros behind its last token. The
// other makes the scalars: with both in one, the consumers wait for it.
//
// A step waits for three products, each needing the last: E S, R = A X, F^T R (backwards F dS, P = A^T dR, E^T P). What
// does not need the last one runs beside it: Qg S, Cq^T dO, Qg^T dO, the decay of the state.
#include "cuda/sm90a/scan.h"

#include "cuda/check.h"
#include "cuda/device/hopper.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/device/state.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sm90a/tensor_map.h"

namespace rewy::cuda::sm90a {
namespace {

using namespace scans;

constexpr int kWarpgroup = 128;           ///< threads
constexpr int kThreads = 3 * kWarpgroup;  ///< the chain, its follower, the producers
constexpr int kProducerThreads = 64;      ///< threads that fill a stage: a warp for the operands, one for the scalars
// Registers a thread: what a block of this size starts with is 168.
constexpr int kChainRegisters = 240, kProducerRegisters = 72;
constexpr int kWidth = 64;  ///< value columns a block
constexpr int kMostKeys = 128;

/// What the copy engine needs to know of every operand. `values` are v, or dO where the scan runs backwards.
struct Maps {
  CUtensorMap erase, write, query;  ///< scalar gates: k, unused, q
  CUtensorMap values[2];            ///< v, dO
  CUtensorMap strength;             ///< w
  CUtensorMap a, cq;
};

/// Step 2 for a whole chunk, by one thread: announces the bytes and starts the copies.
template <class C>
__device__ __forceinline__ void start_tiles(const Params& p, const Maps& maps, const Job& job, std::int64_t slot,
                                            const ChunkAt& at, Stage<C>& stage) {
  hopper::Barrier& full = stage.landed;
  const std::int64_t index = slot * p.HV + job.head;
  const bool strength = C::kIndependent && !job.reverse;
  const int operands = C::kKeyTiles * ((C::kVector ? 2 : 1) + (job.query ? 1 : 0));
  const int tiles = operands + 1 + (job.query ? 1 : 0) + 1 + (strength ? 1 : 0);
  hopper::expect_bytes(full, tiles * kTileBytes + (C::kVector ? p.K * static_cast<int>(sizeof(float)) : 0));
  const int token = static_cast<int>(at.token);
  const auto copy = [&](TileStorage& to, const CUtensorMap& map, int column, int head) {
    hopper::copy_box(ptx::shared_address(&to), map, column, head, token, at.batch, full);
  };
  const auto features = [&](int which, const CUtensorMap& map, int head) {
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) copy(stage.operand[which + tile], map, tile * kTile, head);
  };
  const int head = C::kVector ? job.head : job.key_head;
  features(job.reverse ? C::kWrite : C::kErase, job.reverse && C::kVector ? maps.write : maps.erase, head);
  const auto matrix = [&](TileStorage& to, const CUtensorMap& map) {
    hopper::copy_box(ptx::shared_address(&to), map, 0, 0, 0, static_cast<int>(index), full);
  };
  if (job.query) matrix(stage.cq, maps.cq);
  copy(stage.value[0], maps.values[job.reverse ? 1 : 0], job.column, job.head);
  if constexpr (C::kIndependent) {
    if (strength) copy(stage.value[1], maps.strength, job.column, job.head);
  }
  matrix(stage.a, maps.a);
  if (job.query) features(C::kQuery, maps.query, head);
  if constexpr (C::kVector) {
    features(job.reverse ? C::kErase : C::kWrite, job.reverse ? maps.erase : maps.write, head);
    hopper::copy_bytes(ptx::shared_address(stage.decay), p.decay + index * p.K, p.K * static_cast<int>(sizeof(float)),
                       full);
  }
}

/// Steps 1, 2 and 4: the warp that has the operands brought.
template <class C>
__device__ __forceinline__ void produce_tiles(const Params& p, const Maps& maps, const Job& job, Stage<C>* stages,
                                              int threads) {
  const Copies<C, 32> copies{p, job};
  int s = 0;
  for (int step = 0; step < job.chunks; ++step) {
    Stage<C>& stage = stages[s];
    const ChunkAt at = job.chunk(p, step);
    if (step >= job.stages) ptx::barrier_sync(kEmpty + s, threads);
    if (at.tokens == kTile) {
      if (hopper::elect()) start_tiles<C>(p, maps, job, job.slot(step), at, stage);
    } else {
      copies.start(job.slot(step), at, stage);
      ptx::copy_wait<0>();
      wgmma::publish_shared();
    }
    if (hopper::elect()) stage.chunk = at;
    __syncwarp();
    hopper::arrive(stage.landed);
    s = s + 1 == job.stages ? 0 : s + 1;
  }
}

/// Steps 1, 3 and 4: the warps that make the scalars take chunks in turn, each loading for its next chunk before it
/// waits for the stage of this one. Operators without scalars have them only arrive.
template <class C>
__device__ __forceinline__ void produce_scalars(const Params& p, const Job& job, Stage<C>* stages, int first,
                                                int threads) {
  constexpr bool kScalars = !(C::kVector && C::kIndependent);
  const int warps = job.stages % 3 == 0 ? 3 : 2;  // divides the stages: two to four
  if (first >= warps) return;
  RawScalars raw{};
  if constexpr (kScalars) {
    if (first < job.chunks) raw = load_scalars<C>(p, job, job.chunk(p, first));
  }
  for (int step = first; step < job.chunks; step += warps) {
    const int s = step % job.stages;
    Stage<C>& stage = stages[s];
    RawScalars next{};
    if constexpr (kScalars) {
      if (step + warps < job.chunks) next = load_scalars<C>(p, job, job.chunk(p, step + warps));
    }
    if (step >= job.stages) ptx::barrier_sync(kEmpty + s, threads);
    if constexpr (kScalars) store_scalars<C>(p, job, raw, stage);
    hopper::arrive(stage.landed);
    raw = next;
  }
}

/// Fragments [16, 64] as rows of 128 bytes in a warp's buffer, placed as tile.cuh does [stmatrix].
__device__ __forceinline__ void stage_rows(unsigned char* buffer, const std::uint32_t (&x)[4][4]) {
  const int l = threadIdx.x & 31;
  const std::uint32_t to = ptx::shared_address(buffer);
#pragma unroll
  for (int j = 0; j < 4; ++j) hopper::store_matrices(fragment_address(to, 0, 16 * j, l & 15, l >> 4), x[j]);
}

/// A warp's fragments [16, 64] as rows of `stride` elements in memory, in 16-byte pieces. Rows from valid_rows and
/// columns from valid_columns on are left out.
template <class T>
__device__ __forceinline__ void store_fragments(unsigned char* buffer, T* to, std::int64_t stride, int valid_rows,
                                                int valid_columns, const std::uint32_t (&x)[4][4]) {
  __syncwarp();  // the last rows have been read
  stage_rows(buffer, x);
  __syncwarp();
  const int row = static_cast<int>(threadIdx.x & 31) / 8, c = static_cast<int>(threadIdx.x % 8) * 8;
  const int left = c < valid_columns ? valid_rows - row : 0;
  to += row * stride + c;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    if (i < left) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(buffer + tile_offset(row + i, c));
    to += 4 * stride;
  }
}

/// O of a warp's 16 columns from its transpose, in 16-byte pieces: two of a token's row.
template <class T>
__device__ __forceinline__ void store_output_rows(const Params& p, const Job& job, const ChunkAt& at, int column,
                                                  unsigned char* buffer, const Accumulator<8>& o) {
  const int l = threadIdx.x & 31;
  // Rows of 32 bytes; the two pieces change places every four rows, so that eight rows meet all banks once.
  const auto place = [](int row, int piece) { return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4); };
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const std::uint32_t x[4] = {pack<T>(o.c[n][0], o.c[n][1]), pack<T>(o.c[n][2], o.c[n][3]),
                                pack<T>(o.c[n + 1][0], o.c[n + 1][1]), pack<T>(o.c[n + 1][2], o.c[n + 1][3])};
    // Matrices: tokens 8 n on of the lower and upper columns, then tokens 8 n + 8 on.
    const int row = 8 * n + (l & 7) + (l >> 4) * 8;
    hopper::store_matrices_transposed(ptx::shared_address(buffer + place(row, (l >> 3) & 1)), x);
  }
  __syncwarp();
  const int row = l / 2, piece = l % 2;
  T* to = row_pointer<T>(p.o, at.batch, at.token + row, job.head) + column + 8 * piece;
  const int left = column + 8 * piece < p.V ? at.tokens - row : 0;
  const std::int64_t stride = 16 * p.o.token;
#pragma unroll
  for (int i = 0; i < kTile; i += 16) {
    if (i < left) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(buffer + place(row + i, piece));
    to += stride;
  }
}

/// What a warp of the chain hands its partner among the followers: fragments as the lanes hold them, of two steps in
/// turn. Barriers of both warpgroups say that a step's are there, and that they have been taken.
template <class C>
struct alignas(128) Handover {
  uint4 state[2][C::kKeys / 16][32];  ///< the state before a step, rounded; once taken, its partner's buffer
  uint4 rows[2][4][32];               ///< R, or P
};
constexpr int kStateGiven = kFull, kStateTaken = kFull + 2, kRowsGiven = kOfConsumers, kRowsTaken = kOfConsumers + 2;
static_assert(kMostStages >= 4);

/// Lane by lane, conflict-free.
template <int kN>
__device__ __forceinline__ void give(uint4 (&to)[kN][32], int given, const std::uint32_t (&x)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) to[j][threadIdx.x & 31] = make_uint4(x[j][0], x[j][1], x[j][2], x[j][3]);
  ptx::barrier_arrive(given, 2 * kWarpgroup);
}
template <int kN>
__device__ __forceinline__ void take(const uint4 (&from)[kN][32], int given, std::uint32_t (&x)[kN][4]) {
  ptx::barrier_sync(given, 2 * kWarpgroup);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const uint4 y = from[j][threadIdx.x & 31];
    x[j][0] = y.x;
    x[j][1] = y.y;
    x[j][2] = y.z;
    x[j][3] = y.w;
  }
}

/// A and Cq among the tiles of a stage.
template <class C>
constexpr int kA = C::kOperandTiles;
template <class C>
constexpr int kCq = C::kOperandTiles + 1;

// Products with tiles of the stage whose descriptors start at `base`; each accumulates if told so.

/// acc += x tile^T, x [16, 64]: forwards through A and Cq.
template <class T>
__device__ __forceinline__ void multiply_rows(std::uint32_t base, int tile, const std::uint32_t (&x)[4][4],
                                              Accumulator<8>& acc, bool accumulate) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    wgmma::multiply_async<T, false>(acc, x[j], wgmma::rows_of(base, tile, 16 * j), accumulate || j > 0);
  }
}

/// One warp of the first warpgroup, on which all else waits: 16 value columns through the sequence, forwards or
/// backwards. Each fragment is given to the tensor cores as soon as it is rounded, so that rounding runs beside the
/// product it is for; scales are loaded a product before they are needed. Scalar gates without gates are kGated =
/// false: decays of 1 are left out.
template <class C, bool kReverse, bool kGated>
struct Chain {
  using T = typename C::T;
  using Products = Accumulator<8>;  ///< [16 value columns, 64 tokens]
  static constexpr int kKeySteps = C::kKeys / 16;
  static constexpr bool kVector = C::kVector;

  const Params& p;
  const Job& job;
  Handover<C>& handover;
  int column;                       ///< first value column of the warp
  int column_in_tile;               ///< the same in the stage's value tile
  Accumulator<C::kKeys / 8> state;  ///< S^T or dS^T   [16 value columns, K]
  // Of the coming step:
  float2 z[4][4];           ///< forwards: Z^T
  Scales erase_scale;       ///< forwards, scalar gates
  std::uint32_t d_o[4][4];  ///< backwards: dO^T
  float decay;              ///< scalar gates

  /// What a step needs of its stage at once.
  __device__ __forceinline__ void load(const Stage<C>& stage) {
    if constexpr (kReverse) {
      load_output_gradient(stage, column_in_tile, d_o);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) load_values(stage, column_in_tile, n, z[n]);
      if constexpr (!kVector) erase_scale.load(stage.erase_scale);
    }
    if constexpr (!kVector && kGated) decay = stage.decay[0];
  }

  // What starts a product gives each fragment a group of its own: its registers may then be written while the products
  // before it are under way.

  /// The state rounded, given on, and acc (+)= state operand^T   [16, 64 tokens] under way; the state decays beside it.
  __device__ __forceinline__ void start_from_state(std::uint32_t base, int which, int step, const Stage<C>& stage,
                                                   Products& acc, bool accumulate) {
    std::uint32_t rounded[kKeySteps][4];
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      to_fragment<T>(state, j, rounded[j]);
      wgmma::begin(rounded[j]);
      wgmma::multiply_async<T, false>(acc, rounded[j], wgmma::rows_of(base, which + j / 4, 16 * (j % 4)),
                                      accumulate || j > 0);
      wgmma::commit();
    }
    const int i = step & 1;
    give(handover.state[i], kStateGiven + i, rounded);
    if constexpr (kVector) {
      scale_columns(state, stage.decay);
    } else if constexpr (kGated) {
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.c[n][e] *= decay;
      }
    }
  }

  /// The state's update under way: state + x operand forwards, state - x operand backwards; x is rows, with kScaled
  /// times scale[token]. The rows themselves are given on.
  template <bool kScaled>
  __device__ __forceinline__ void start_update(std::uint32_t base, int which, int step, const Scales& scale,
                                               const Products& rows) {
    std::uint32_t rounded[4][4], x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kScaled) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* y = &rows.c[2 * i + e / 2][2 * (e % 2)];
          x[i][e] = pack<T>(scale.x[2 * i + e / 2].x * y[0], scale.x[2 * i + e / 2].y * y[1]);
        }
      } else {
        to_fragment<T>(rows, i, rounded[i]);
      }
      wgmma::begin(kScaled ? x[i] : rounded[i]);
      wgmma::multiply_async<T, true, kReverse>(state, kScaled ? x[i] : rounded[i],
                                               wgmma::columns_of(base, which, 16 * i), true);
      wgmma::commit();
    }
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to_fragment<T>(rows, i, rounded[i]);
    }
    const int i = step & 1;
    give(handover.rows[i], kRowsGiven + i, rounded);
  }

  /// All of a step but the end of the state's update, which is under way.
  __device__ __forceinline__ void start_step_forward(int step, const Stage<C>& stage) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    constexpr bool kScaled = !kVector && kGated;
    Products es, r;
    start_from_state(base, C::kErase, step, stage, es, false);  // step 5: (E S)^T
    wgmma::wait<0>();
    wgmma::hold(es);
    std::uint32_t x[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // steps 6 and 7: X = Z - E S, R = A X
      subtract_from_values<T>(n, z[n], es, kVector ? nullptr : &erase_scale.x[2 * n], x[n]);
      wgmma::begin(x[n]);
      wgmma::multiply_async<T, false>(r, x[n], wgmma::rows_of(base, kA<C>, 16 * n), n > 0);
      wgmma::commit();
    }
    Scales write_scale;
    if constexpr (kScaled) write_scale.load(stage.write_scale);
    wgmma::wait<0>();
    wgmma::hold(r);
    start_update<kScaled>(base, C::kWrite, step, write_scale, r);  // step 9
  }

  __device__ __forceinline__ void start_step_reverse(int step, const Stage<C>& stage) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    // Step 10: dR = Cq^T dO + F dS. Scalar gates scale the second half before the two are added.
    Products d_r, from_state, sensitivity;
    wgmma::begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma::multiply_async<T, true>(d_r, d_o[i], wgmma::columns_of(base, kCq<C>, 16 * i), i > 0);
    }
    wgmma::commit();
    start_from_state(base, C::kWrite, step, stage, kVector ? d_r : from_state, kVector);
    Scales scale;
    if constexpr (!kVector) scale.load(stage.write_scale);
    wgmma::wait<0>();
    wgmma::hold(d_r);
    if constexpr (!kVector) wgmma::hold(from_state);
    std::uint32_t x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // step 11: P = A^T dR
      if constexpr (!kVector) {
#pragma unroll
        for (int n = 2 * i; n < 2 * i + 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) d_r.c[n][e] += (e % 2 == 0 ? scale.x[n].x : scale.x[n].y) * from_state.c[n][e];
        }
      }
      to_fragment<T>(d_r, i, x[i]);
      wgmma::begin(x[i]);
      wgmma::multiply_async<T, true>(sensitivity, x[i], wgmma::columns_of(base, kA<C>, 16 * i), i > 0);
      wgmma::commit();
    }
    // Step 12, its first half, beside it.
    if constexpr (!kVector) scale.load(stage.query_scale);
    std::uint32_t high[4][4], low[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale_output_gradient<C>(p, kVector ? nullptr : &scale.x[2 * i], d_o[i], high[i], low[i]);
      wgmma::begin(high[i]);
      wgmma::multiply_async<T, true>(state, high[i], wgmma::columns_of(base, C::kQuery, 16 * i), true);
      wgmma::commit();
    }
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma::begin(low[i]);
        wgmma::multiply_async<T, true>(state, low[i], wgmma::columns_of(base, C::kQuery, 16 * i), true);
        wgmma::commit();
      }
    }
    if constexpr (!kVector) scale.load(stage.erase_scale);
    wgmma::wait<kGated ? 8 : 4>();
    wgmma::hold(sensitivity);
    start_update<!kVector>(base, C::kErase, step, scale, sensitivity);
  }

  /// `initial` and `last`: the state, or its gradient, that enters and that leaves, where there is one.
  __device__ __forceinline__ void run(Stage<C>* stages, int threads, const States& initial, const States& last) {
    load_state(initial, job.sequence, job.head, 0, column, p.K, p.V, state);
    if constexpr (kReverse) rescale_gradient<C>(job, 1.0f / p.scale_rest, state);
    int s = 0, parity = 0;
    if (job.chunks > 0) {
      hopper::wait(stages[0].landed, 0);
      load(stages[0]);
    }
    for (int step = 0; step < job.chunks; ++step) {
      if (step >= 2) {  // here, because nothing that waits may come between products under way
        ptx::barrier_sync(kStateTaken + (step & 1), 2 * kWarpgroup);
        ptx::barrier_sync(kRowsTaken + (step & 1), 2 * kWarpgroup);
      }
      wgmma::wait<0>();  // nothing is under way: said here, it keeps ptxas from waiting before each product
      wgmma::hold(state);
      if constexpr (kReverse) {
        start_step_reverse(step, stages[s]);
      } else {
        start_step_forward(step, stages[s]);
      }
      const int used = s;
      if (++s == job.stages) {
        s = 0;
        parity ^= 1;
      }
      if (step + 1 < job.chunks) hopper::wait(stages[s].landed, parity);
      load(stages[s]);  // beside the update; behind the last step it is not used
      wgmma::wait<0>();
      wgmma::hold(state);
      if (step + job.stages < job.chunks) ptx::barrier_arrive(kEmpty + used, threads);
    }
    if constexpr (kReverse) rescale_gradient<C>(job, p.scale_rest, state);
    store_state_fp32(last, job.sequence, job.head, 0, column, p.K, p.V, state);
  }
};

/// One warp of the second warpgroup: what follows from the states and rows that its partner gives. It stores them where
/// they are wanted, and makes O.
template <class C>
struct Follower {
  using T = typename C::T;
  static constexpr int kKeySteps = C::kKeys / 16;

  const Params& p;
  const Job& job;
  Handover<C>& handover;
  int column;

  __device__ __forceinline__ void take_state(int step, std::uint32_t (&state)[kKeySteps][4]) {
    take(handover.state[step & 1], kStateGiven + (step & 1), state);
  }
  __device__ __forceinline__ void take_rows(int step, std::uint32_t (&rows)[4][4]) {
    take(handover.rows[step & 1], kRowsGiven + (step & 1), rows);
    if (step + 2 < job.chunks) ptx::barrier_arrive(kRowsTaken + (step & 1), 2 * kWarpgroup);
  }
  /// By which rows become 16-byte pieces: where the step's state was, which is given back at the end of the step.
  __device__ __forceinline__ unsigned char* buffer(int step) {
    return reinterpret_cast<unsigned char*>(handover.state[step & 1]);
  }
  __device__ __forceinline__ void finish_step(int step) {
    if (step + 2 < job.chunks) ptx::barrier_arrive(kStateTaken + (step & 1), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void store_state(void* states, int step, const std::uint32_t (&state)[kKeySteps][4]) {
    if (states == nullptr) return;
    T* to = static_cast<T*>(states) + (job.index(p, step) * p.V + column) * p.K;
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) {
      store_fragments(buffer(step), to + tile * kTile, p.K, p.V - column, p.K - tile * kTile,
                      reinterpret_cast<const std::uint32_t(&)[4][4]>(state[4 * tile]));
    }
  }
  __device__ __forceinline__ void store_tokens(void* values, int step, const std::uint32_t (&x)[4][4]) {
    if (values == nullptr) return;
    store_fragments(buffer(step), static_cast<T*>(values) + (job.index(p, step) * p.V + column) * kTile, kTile,
                    p.V - column, kTile, x);
  }

  /// Step 8: O = Qg S + Cq R.
  __device__ __forceinline__ void run_output(Stage<C>* stages, int threads) {
    int s = 0, parity = 0;
    for (int step = 0; step < job.chunks; ++step) {
      const Stage<C>& stage = stages[s];
      const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
      hopper::wait(stages[s].landed, parity);
      std::uint32_t state[kKeySteps][4], rows[4][4];
      Accumulator<8> o;
      take_state(step, state);
      wgmma::begin();
#pragma unroll
      for (int j = 0; j < kKeySteps; ++j) {
        wgmma::multiply_async<T, false>(o, state[j], wgmma::rows_of(base, C::kQuery + j / 4, 16 * (j % 4)), j > 0);
      }
      wgmma::commit();
      const ChunkAt at = stage.chunk;
      store_state(p.state_t, step, state);
      wgmma::wait<0>();
      wgmma::hold(o);
      scale_output(p, stage, o);
      take_rows(step, rows);
      wgmma::begin();
      multiply_rows<T>(base, kCq<C>, rows, o, true);
      wgmma::commit();
      store_tokens(p.r_t, step, rows);
      wgmma::wait<0>();
      wgmma::hold(o);
      if (step + job.stages < job.chunks) ptx::barrier_arrive(kEmpty + s, threads);
      store_output_rows<T>(p, job, at, column, buffer(step), o);
      finish_step(step);
      if (++s == job.stages) {
        s = 0;
        parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void run_stores() {
    void* states = job.reverse ? p.dstate_t : p.state_t;
    void* tokens = job.reverse ? p.p_t : p.r_t;
    for (int step = 0; step < job.chunks; ++step) {
      std::uint32_t state[kKeySteps][4], rows[4][4];
      take_state(step, state);
      store_state(states, step, state);
      take_rows(step, rows);
      store_tokens(tokens, step, rows);
      finish_step(step);
    }
  }
};

template <class C, bool kOutput>
__global__ void __launch_bounds__(kThreads, 1)
    scan(const __grid_constant__ Params p, const __grid_constant__ Maps maps, const int stages, const bool both) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Job job = find_job<kOutput>(p, kWidth, stages, both);
  auto* ring = reinterpret_cast<Stage<C>*>(memory);
  auto* handovers = reinterpret_cast<Handover<C>*>(ring + stages);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) hopper::initialise(ring[s].landed, kProducerThreads);
    hopper::publish_barriers();
  }
  if constexpr (C::kVector) {
    // Features past K decay to 0: their states are zero, and stay numbers.
    for (int i = p.K + static_cast<int>(threadIdx.x); i < C::kKeys; i += kThreads) {
      for (int s = 0; s < stages; ++s) ring[s].decay[i] = 0.0f;
    }
  }
  __syncthreads();
  constexpr int kReaders = (kOutput ? 2 : 1) * kWarpgroup;  // of a stage
  if (warp < 4) {
    wgmma::take_registers<kChainRegisters>();
    const auto run = [&]<bool kReverse, bool kGated>(const States& initial, const States& last) {
      Chain<C, kReverse, kGated> chain{p, job, handovers[warp], job.column + 16 * warp, 16 * warp, {}, {}, {}, {}, {}};
      chain.run(ring, kProducerThreads + kReaders, initial, last);
    };
    const auto run_gated = [&]<bool kReverse>(const States& initial, const States& last) {
      if (is_gated<C>(p)) {
        run.template operator()<kReverse, true>(initial, last);
      } else if constexpr (!C::kVector) {
        run.template operator()<kReverse, false>(initial, last);
      }
    };
    if (kOutput || !job.reverse) {
      run_gated.template operator()<false>(p.initial_state, p.final_state);
    } else {
      run_gated.template operator()<true>(p.d_final_state, p.d_initial_state);
    }
  } else if (warp < 8) {
    Follower<C> follower{p, job, handovers[warp - 4], job.column + 16 * (warp - 4)};
    if constexpr (kOutput) {
      follower.run_output(ring, kProducerThreads + kReaders);
    } else {
      follower.run_stores();
    }
  } else {
    wgmma::give_registers<kProducerRegisters>();
    if (warp == 8) {
      produce_tiles<C>(p, maps, job, ring, kProducerThreads + kReaders);
    } else {
      produce_scalars<C>(p, job, ring, warp - 9, kProducerThreads + kReaders);
    }
  }
}

/// False where the copy engine cannot read an operand.
template <class C>
bool describe(const Params& p, bool output, Maps& maps) {
  const auto rows = [&](CUtensorMap& map, const Rows& of, std::int64_t heads, std::int64_t width) {
    return of.data == nullptr || describe_rows(map, of, p.B, p.T, heads, width);
  };
  if (p.chunks == 0) return true;
  const bool operands = C::kVector ? rows(maps.erase, p.erase, p.HV, p.K) && rows(maps.write, p.write, p.HV, p.K) &&
                                         rows(maps.query, p.query, p.HV, p.K)
                                   : rows(maps.erase, p.k, p.H, p.K) && rows(maps.query, p.q, p.H, p.K);
  return operands && rows(maps.values[0], p.v, p.HV, p.V) && (output || rows(maps.values[1], p.d_o, p.HV, p.V)) &&
         rows(maps.strength, p.w, p.HV, p.V) && describe_matrices(maps.a, p.a, p.chunks * p.HV) &&
         describe_matrices(maps.cq, p.cq, p.chunks * p.HV);
}

template <class C>
constexpr int shared_bytes(int stages) {
  return static_cast<int>(stages * sizeof(Stage<C>) + 4 * sizeof(Handover<C>));
}

/// Whether it could launch.
template <class C, bool kOutput>
bool launch(const Params& p, const DeviceLimits& device, bool both, cudaStream_t stream) {
  const std::int64_t blocks = p.sequences * p.HV * ((p.V + kWidth - 1) / kWidth) * (both ? 2 : 1);
  if (blocks == 0) return true;
  Maps maps{};
  if (!describe<C>(p, kOutput, maps)) return false;
  int stages = kMostStages;
  while (stages > 2 && shared_bytes<C>(stages) > device.shared_bytes_per_block) --stages;
  const int bytes = shared_bytes<C>(stages);
  const auto kernel = scan<C, kOutput>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "scan");
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p, maps, stages, both);
  check_launch("scan");
  return true;
}

}  // namespace

bool scans_serve(const Params& p, const DeviceLimits& device) {
  return device.compute_capability == 90 && p.K <= kMostKeys;
}

bool launch_scan_output(const Params& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  bool launched = false;
  with_config<kMostKeys>(p.K, kind, [&]<class C>() { launched = launch<C, true>(p, device, false, stream); });
  return launched;
}

bool launch_scan_both(const Params& p, const Kind& kind, const DeviceLimits& device, bool states_saved,
                      cudaStream_t stream) {
  bool launched = false;
  with_config<kMostKeys>(p.K, kind, [&]<class C>() { launched = launch<C, false>(p, device, !states_saved, stream); });
  return launched;
}

}  // namespace rewy::cuda::sm90a
