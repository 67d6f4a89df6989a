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

constexpr int kProducerThreads = 64;  ///< threads: a warp for the operands, a warp for the scalars
constexpr int kConsumers = 128;       ///< threads, one warpgroup
constexpr int kWidth = 64;            ///< value columns a block
constexpr int kMostKeys = 128;

/// What the copy engine needs to know of every operand. `values` are v, or dO where the scan runs backwards.
struct Maps {
  CUtensorMap erase, write, query;  ///< scalar gates: k, unused, q
  CUtensorMap values[2];            ///< v, dO
  CUtensorMap strength;             ///< w
  CUtensorMap a, cq;
};

/// Of one consumer warp: rows it stores in 16-byte pieces.
struct WarpBuffer {
  unsigned char rows[16 * kTile * 2];
};

template <class C>
constexpr int shared_bytes(int stages) {
  return static_cast<int>(stages * sizeof(Stage<C>) + kConsumers / 32 * sizeof(WarpBuffer));
}

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
__device__ __forceinline__ void produce_tiles(const Params& p, const Maps& maps, const Job& job, Stage<C>* stages) {
  const Copies<C, 32> copies{p, job};
  const bool leads = threadIdx.x % 32 == 0;
  int s = 0;
  for (int step = 0; step < job.chunks; ++step) {
    Stage<C>& stage = stages[s];
    const ChunkAt at = job.chunk(p, step);
    if (step >= job.stages) ptx::barrier_sync(kEmpty + s, kProducerThreads + kConsumers);
    if (at.tokens == kTile) {
      if (leads) start_tiles<C>(p, maps, job, job.slot(step), at, stage);
    } else {
      copies.start(job.slot(step), at, stage);
      ptx::copy_wait<0>();
      wgmma::publish_shared();
    }
    if (leads) stage.chunk = at;
    __syncwarp();
    if (leads) hopper::arrive(stage.landed);
    s = s + 1 == job.stages ? 0 : s + 1;
  }
}

/// Steps 1, 3 and 4: the warp that makes the scalars. Operators without scalars have it only arrive.
template <class C>
__device__ __forceinline__ void produce_scalars(const Params& p, const Job& job, Stage<C>* stages) {
  if (job.chunks == 0) return;
  constexpr bool kScalars = !(C::kVector && C::kIndependent);
  RawScalars raw{};
  if constexpr (kScalars) raw = load_scalars<C>(p, job, job.chunk(p, 0));
  int s = 0;
  for (int step = 0; step < job.chunks; ++step) {
    Stage<C>& stage = stages[s];
    RawScalars next{};
    if constexpr (kScalars) {
      if (step + 1 < job.chunks) next = load_scalars<C>(p, job, job.chunk(p, step + 1));
    }
    if (step >= job.stages) ptx::barrier_sync(kEmpty + s, kProducerThreads + kConsumers);
    if constexpr (kScalars) store_scalars<C>(p, job, raw, stage);
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(stage.landed);
    raw = next;
    s = s + 1 == job.stages ? 0 : s + 1;
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

/// One warp of the warpgroup: 16 value columns through the sequence.
template <class C>
struct Consumer {
  using T = typename C::T;
  using Products = Accumulator<8>;  ///< [16 value columns, 64 tokens]
  static constexpr int kKeySteps = C::kKeys / 16;
  static constexpr bool kVector = C::kVector;

  const Params& p;
  const Job& job;
  unsigned char* buffer;
  int column;                           ///< first value column of the warp
  int column_in_tile;                   ///< the same in the stage's value tile
  Accumulator<C::kKeys / 8> state;      ///< S^T or dS^T   [16 value columns, K]
  std::uint32_t rounded[kKeySteps][4];  ///< the state before the step, as fragments

  // Tiles of a stage by number.
  static constexpr int kA = C::kOperandTiles, kCq = kA + 1;

  // Products with tiles of the stage whose descriptors start at `base`; each accumulates if told so.

  /// acc += state operand^T   [16, 64 tokens].
  __device__ __forceinline__ void multiply_state(std::uint32_t base, int which, Products& acc, bool accumulate) const {
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      wgmma::multiply_async<T, false>(acc, rounded[j], wgmma::rows_of(base, which + j / 4, 16 * (j % 4)),
                                      accumulate || j > 0);
    }
  }
  /// acc += x tile^T, x [16, 64 tokens]: forwards through A and Cq.
  __device__ __forceinline__ static void multiply_rows(std::uint32_t base, int tile, const std::uint32_t (&x)[4][4],
                                                       Products& acc, bool accumulate) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wgmma::multiply_async<T, false>(acc, x[j], wgmma::rows_of(base, tile, 16 * j), accumulate || j > 0);
    }
  }
  /// acc += x tile: backwards through A and Cq.
  __device__ __forceinline__ static void multiply_columns(std::uint32_t base, int tile, const std::uint32_t (&x)[4][4],
                                                          Products& acc, bool accumulate) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma::multiply_async<T, true>(acc, x[i], wgmma::columns_of(base, tile, 16 * i), accumulate || i > 0);
    }
  }
  /// state +- x operand.
  template <bool kNegate>
  __device__ __forceinline__ void add_to_state(std::uint32_t base, int which, const std::uint32_t (&x)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma::multiply_async<T, true, kNegate>(state, x[i], wgmma::columns_of(base, which, 16 * i), true);
    }
  }

  __device__ __forceinline__ void decay_state(const Stage<C>& stage) {
    if constexpr (kVector) {
      scale_columns(state, stage.decay);
    } else {
      const float decay = stage.decay[0];
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.c[n][e] *= decay;
      }
    }
  }

  __device__ __forceinline__ void round_state() {
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) to_fragment<T>(state, j, rounded[j]);
  }
  /// Stores the state before the step, as rounded, where it is wanted.
  __device__ __forceinline__ void store_state(void* states, int step) const {
    if (states == nullptr) return;
    T* to = static_cast<T*>(states) + (job.index(p, step) * p.V + column) * p.K;
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) {
      store_fragments(buffer, to + tile * kTile, p.K, p.V - column, p.K - tile * kTile,
                      reinterpret_cast<const std::uint32_t(&)[4][4]>(rounded[4 * tile]));
    }
  }

  __device__ __forceinline__ void store_tokens(void* values, int step, const std::uint32_t (&x)[4][4]) const {
    if (values == nullptr) return;
    store_fragments(buffer, static_cast<T*>(values) + (job.index(p, step) * p.V + column) * kTile, kTile, p.V - column,
                    kTile, x);
  }

  template <bool kOutput>
  __device__ __forceinline__ void step_forward(int step, const Stage<C>& stage) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    round_state();
    Products acc, o;
    wgmma::begin();
    multiply_state(base, C::kErase, acc, false);  // step 5: (E S)^T
    wgmma::commit();
    if constexpr (kOutput) {
      multiply_state(base, C::kQuery, o, false);  // step 8, its first half: (Qg S)^T
      wgmma::commit();
    }
    store_state(p.state_t, step);
    if constexpr (kOutput) {
      wgmma::wait<1>();
    } else {
      wgmma::wait<0>();
    }
    wgmma::hold(acc);
    std::uint32_t x[4][4];
    subtract_from_values(stage, column_in_tile, acc, x);  // step 6
    wgmma::begin();
    multiply_rows(base, kA, x, acc, false);  // step 7: R = A X
    wgmma::commit();
    decay_state(stage);
    wgmma::wait<0>();
    wgmma::hold(acc);
    std::uint32_t r[4][4];
    to_fragments<T>(acc, r);
    if constexpr (!kVector) scale_columns(acc, stage.write_scale);
    to_fragments<T>(acc, x);
    if constexpr (kOutput) {
      wgmma::hold(o);
      scale_output(p, stage, o);
    }
    wgmma::begin();
    if constexpr (kOutput) {
      multiply_rows(base, kCq, r, o, true);  // step 8: O = Qg S + Cq R
      wgmma::commit();
    }
    add_to_state<false>(base, C::kWrite, x);  // step 9
    wgmma::commit();
    store_tokens(p.r_t, step, r);
    if constexpr (kOutput) {
      wgmma::wait<1>();
      wgmma::hold(o);
      store_output_rows<T>(p, job, stage.chunk, column, buffer, o);
    }
    wgmma::wait<0>();
    wgmma::hold(state);
  }

  __device__ __forceinline__ void step_reverse(int step, const Stage<C>& stage) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    round_state();
    std::uint32_t d_o[4][4], x[4][4];
    load_output_gradient(stage, column_in_tile, d_o);
    // Step 10: dR = Cq^T dO + F dS. Scalar gates scale the second half before the two are added.
    Products acc;
    if constexpr (kVector) {
      wgmma::begin();
      multiply_columns(base, kCq, d_o, acc, false);
      multiply_state(base, C::kWrite, acc, true);
      wgmma::commit();
      store_state(p.dstate_t, step);
      wgmma::wait<0>();
      wgmma::hold(acc);
    } else {
      Products from_state;
      wgmma::begin();
      multiply_state(base, C::kWrite, from_state, false);
      multiply_columns(base, kCq, d_o, acc, false);
      wgmma::commit();
      store_state(p.dstate_t, step);
      wgmma::wait<0>();
      wgmma::hold(acc);
      wgmma::hold(from_state);
      scale_columns(from_state, stage.write_scale);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc.c[n][e] += from_state.c[n][e];
      }
    }
    to_fragments<T>(acc, x);
    wgmma::begin();
    multiply_columns(base, kA, x, acc, false);  // step 11: P = A^T dR
    wgmma::commit();
    decay_state(stage);
    std::uint32_t d_o_low[4][4];
    scale_output_gradient(p, stage, d_o, d_o_low);
    wgmma::begin();
    add_to_state<false>(base, C::kQuery, d_o);  // step 12
    if (has_low_half<C>(p)) {
      wgmma::begin();
      add_to_state<false>(base, C::kQuery, d_o_low);
    }
    wgmma::commit();
    wgmma::wait<1>();
    wgmma::hold(acc);
    std::uint32_t sensitivity[4][4];
    to_fragments<T>(acc, sensitivity);
    if constexpr (!kVector) scale_columns(acc, stage.erase_scale);
    to_fragments<T>(acc, x);
    wgmma::begin();
    add_to_state<true>(base, C::kErase, x);
    wgmma::commit();
    store_tokens(p.p_t, step, sensitivity);
    wgmma::wait<0>();
    wgmma::hold(state);
  }

  template <bool kOutput>
  __device__ __forceinline__ void run(Stage<C>* stages) {
    load_state(job.reverse ? p.d_final_state : p.initial_state, job.sequence, job.head, 0, column, p.K, p.V, state);
    rescale_gradient<C>(job, 1.0f / p.scale_rest, state);
    int s = 0, parity = 0;
    for (int step = 0; step < job.chunks; ++step) {
      hopper::wait(stages[s].landed, parity);
      if constexpr (kOutput) {
        step_forward<true>(step, stages[s]);
      } else if (job.reverse) {
        step_reverse(step, stages[s]);
      } else {
        step_forward<false>(step, stages[s]);
      }
      if (step + job.stages < job.chunks) ptx::barrier_arrive(kEmpty + s, kProducerThreads + kConsumers);
      if (++s == job.stages) {
        s = 0;
        parity ^= 1;
      }
    }
    if (kOutput || job.reverse) {
      rescale_gradient<C>(job, p.scale_rest, state);
      store_state_fp32(kOutput ? p.final_state : p.d_initial_state, job.sequence, job.head, 0, column, p.K, p.V, state);
    }
  }
};

template <class C, bool kOutput>
__global__ void __launch_bounds__(kProducerThreads + kConsumers, 1)
    scan(const __grid_constant__ Params p, const __grid_constant__ Maps maps, const int stages, const bool both) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Job job = find_job<kOutput>(p, kWidth, stages, both);
  auto* ring = reinterpret_cast<Stage<C>*>(memory);
  auto* buffers = reinterpret_cast<WarpBuffer*>(ring + stages);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) hopper::initialise(ring[s].landed, 2);
    hopper::publish_barriers();
  }
  if constexpr (C::kVector) {
    // Features past K decay to 0: their states are zero, and stay numbers.
    for (int i = p.K + static_cast<int>(threadIdx.x); i < C::kKeys; i += kProducerThreads + kConsumers) {
      for (int s = 0; s < stages; ++s) ring[s].decay[i] = 0.0f;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {  // a warpgroup starts at a multiple of four warps
    if (threadIdx.x < kConsumers + 32) {
      produce_tiles<C>(p, maps, job, ring);
    } else {
      produce_scalars<C>(p, job, ring);
    }
  } else {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    Consumer<C> consumer{p, job, buffers[warp].rows, job.column + 16 * warp, 16 * warp, {}, {}};
    consumer.template run<kOutput>(ring);
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

/// Whether it could launch.
template <class C, bool kOutput>
bool launch(const Params& p, const DeviceLimits& device, bool both, cudaStream_t stream) {
  const std::int64_t blocks = p.sequences * p.HV * ((p.V + kWidth - 1) / kWidth) * (both ? 2 : 1);
  if (blocks == 0) return true;
  Maps maps{};
  if (!describe<C>(p, kOutput, maps)) return false;
  int stages = kMostStages;
  while (stages > 1 && shared_bytes<C>(stages) > device.shared_bytes_per_block) --stages;
  const int bytes = shared_bytes<C>(stages);
  const auto kernel = scan<C, kOutput>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "scan");
  kernel<<<static_cast<unsigned>(blocks), kProducerThreads + kConsumers, bytes, stream>>>(p, maps, stages, both);
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
