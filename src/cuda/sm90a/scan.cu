// The scans over chunks with warpgroup products (docs/kernels/scan.md). The algorithm is that of sm80/scan.cu:
// everything transposed, value columns as rows, the accumulators of one product being the left operand of the next.
//
// Here one warpgroup, the chain, holds 64 value columns and all features: 64 rows are what wgmma multiplies at once,
// with each operand read from shared memory once for all four warps. In mma.sync's form every warp reads every operand,
// and shared memory is what the step waits for.
//
// A step waits for three products, each needing the last: E S, R = A X, F^T R (backwards F dS, P = A^T dR, E^T P). What
// does not need the last one runs beside it: Qg S, Cq R, Cq^T dO, Qg^T dO, the decay of the state. Copies in and out,
// and the scalars, are other warps' work.
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

constexpr int kChainThreads = 128;  ///< one warpgroup
constexpr int kScalarWarps = 2;
constexpr int kThreads = kChainThreads + 32 * (2 + kScalarWarps);  ///< and a warp for copies in, one for copies out
constexpr int kWidth = 64;                                         ///< value columns a block
constexpr int kMostKeys = 128;

/// What the copy engine needs to know of every operand. `values` are v, or dO where the scan runs backwards.
struct Maps {
  CUtensorMap erase, write, query;  ///< scalar gates: k, unused, q
  CUtensorMap values[2];            ///< v, dO
  CUtensorMap strength;             ///< w
  CUtensorMap a, cq;
  CUtensorMap states[2], rows[2];  ///< stored: S^T and R^T, dS^T and P^T
  CUtensorMap output;
};

/// What the chain has stored: tiles, each free again when it has been read.
template <class C>
struct Outbox {
  TileStorage state[C::kKeyTiles];  ///< [64 value columns, 64 features] each: the state before a step
  TileStorage rows;                 ///< [64 value columns, 64 tokens]: R^T, or P^T
  TileStorage output;               ///< [64 tokens, 64 value columns]: O
};
/// Barriers of the chain and the warp that stores: given, and taken.
enum Parcel : int { kStateParcel, kRowsParcel, kOutputParcel, kParcels };
__device__ constexpr int given(Parcel parcel) {
  return 1 + parcel;
}
__device__ constexpr int taken(Parcel parcel) {
  return 1 + kParcels + parcel;
}
constexpr int kParcelThreads = kChainThreads + 32;

/// A stage is filled and freed in parts. With vector gates what the first products need is the front, free in the
/// middle of a step: forwards E, Qg, v and the scalars, backwards Cq, dO and F. Scalar gates read k to the end: one
/// part.
template <class C>
constexpr int kParts = C::kVector ? 2 : 1;

/// Step 2 for a part of a whole chunk, by one thread: announces the bytes and starts the copies.
template <class C>
__device__ __forceinline__ void start_tiles(const Params& p, const Maps& maps, const Job& job, std::int64_t slot,
                                            const ChunkAt& at, int part, Stage<C>& stage) {
  ptx::Barrier& full = stage.landed[part];
  const auto index = static_cast<int>(slot * p.HV + job.head);
  const int token = static_cast<int>(at.token), head = C::kVector ? job.head : job.key_head;
  const auto expect = [&](int tiles, int more = 0) { hopper::expect_bytes(full, tiles * kTileBytes + more); };
  const auto copy = [&](TileStorage& to, const CUtensorMap& map, int column, int of_head) {
    hopper::copy_box(ptx::shared_address(&to), map, column, of_head, token, at.batch, full);
  };
  const auto features = [&](int which, const CUtensorMap& map) {
#pragma unroll
    for (int tile = 0; tile < C::kKeyTiles; ++tile) copy(stage.operand[which + tile], map, tile * kTile, head);
  };
  const auto matrix = [&](TileStorage& to, const CUtensorMap& map) {
    hopper::copy_box(ptx::shared_address(&to), map, 0, 0, 0, index, full);
  };
  constexpr bool kBoth = kParts<C> == 1;
  const int operands = C::kKeyTiles;
  if (kBoth || part == 0) {
    const int decay = C::kVector ? p.K * static_cast<int>(sizeof(float)) : 0;
    if (job.reverse) {
      expect(operands + 2 + (kBoth ? operands + 1 : 0), decay);
      features(C::kWrite, C::kVector ? maps.write : maps.erase);
      matrix(stage.cq, maps.cq);
      copy(stage.value[0], maps.values[1], job.column, job.head);
    } else {
      const int queries = job.query ? operands : 0;
      expect(operands + queries + C::kValueTiles + (kBoth ? 1 + (job.query ? 1 : 0) : 0), decay);
      features(C::kErase, maps.erase);
      copy(stage.value[0], maps.values[0], job.column, job.head);
      if constexpr (C::kIndependent) copy(stage.value[1], maps.strength, job.column, job.head);
      if (job.query) features(C::kQuery, maps.query);
    }
    if constexpr (C::kVector) {
      hopper::copy_bytes(ptx::shared_address(stage.decay), p.decay + static_cast<std::int64_t>(index) * p.K, decay,
                         full);
    }
  }
  if (kBoth || part == 1) {
    if (job.reverse) {
      if constexpr (!kBoth) expect(2 * operands + 1);
      matrix(stage.a, maps.a);
      features(C::kQuery, maps.query);
      if constexpr (C::kVector) features(C::kErase, maps.erase);
    } else {
      if constexpr (!kBoth) expect(operands + 1 + (job.query ? 1 : 0));
      matrix(stage.a, maps.a);
      if constexpr (C::kVector) features(C::kWrite, maps.write);
      if (job.query) matrix(stage.cq, maps.cq);
    }
  }
}

/// Steps 1, 2 and 4: the warp that has the operands brought.
template <class C>
__device__ __forceinline__ void produce_tiles(const Params& p, const Maps& maps, const Job& job, Stage<C>* stages) {
  const Copies<C, 32> copies{p, job};
  Place place;
  for (int step = 0; step < job.chunks; ++step) {
    Stage<C>& stage = stages[place.s];
    const ChunkAt at = job.chunk(p, step);
    if (at.tokens == kTile) {
#pragma unroll
      for (int part = 0; part < kParts<C>; ++part) {
        wait_until_free(job, step, place, part, stage);
        if (hopper::elect()) start_tiles<C>(p, maps, job, job.slot(step), at, part, stage);
        __syncwarp();
        ptx::arrive(stage.landed[part]);
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts<C>; ++part) wait_until_free(job, step, place, part, stage);
      copies.start(job.slot(step), at, stage);
      ptx::copy_wait<0>();
      wgmma::publish_shared();
#pragma unroll
      for (int part = 0; part < kParts<C>; ++part) ptx::arrive(stage.landed[part]);
    }
    place.advance(job.stages);
  }
}

/// Steps 1, 3 and 4: the warps that make the scalars take chunks in turn, each loading for its next chunk before it
/// waits for the stage of this one. Operators without scalars have them only arrive.
template <class C>
__device__ __forceinline__ void produce_scalars(const Params& p, const Job& job, Stage<C>* stages, int first) {
  constexpr bool kScalars = !(C::kVector && C::kIndependent);
  RawScalars raw{};
  if constexpr (kScalars) {
    if (first < job.chunks) raw = load_scalars<C>(p, job, job.chunk(p, first));
  }
  Place place;
  place.advance(job.stages, first);
  for (int step = first; step < job.chunks; step += kScalarWarps) {
    Stage<C>& stage = stages[place.s];
    RawScalars next{};
    if constexpr (kScalars) {
      if (step + kScalarWarps < job.chunks) next = load_scalars<C>(p, job, job.chunk(p, step + kScalarWarps));
    }
    wait_until_free(job, step, place, kScalars ? kParts<C> - 1 : 0, stage);
    if constexpr (kScalars) store_scalars<C>(p, job, raw, stage);
    ptx::arrive(stage.landed[0]);
    raw = next;
    place.advance(job.stages, kScalarWarps);
  }
}

/// The warp that has tiles stored, in the order in which the chain gives them. The last chunk of a sequence, where a
/// box would reach into the next sequence's tokens, it copies row by row.
template <class C, bool kOutput>
__device__ __forceinline__ void store_parcels(const Params& p, const Maps& maps, const Job& job, Outbox<C>& outbox) {
  using T = typename C::T;
  const int side = job.reverse ? 1 : 0;
  const auto take = [&](Parcel parcel, int step, auto&& store) {
    ptx::barrier_sync(given(parcel), kParcelThreads);
    wgmma::publish_shared();  // what the chain wrote, to the copy engine
    store();
    __syncwarp();
    if (step + 1 < job.chunks) ptx::barrier_arrive(taken(parcel), kParcelThreads);
  };
  const auto store_output = [&](int step) {
    if (p.o.data == nullptr) return;
    const ChunkAt at = job.chunk(p, step);
    if (at.tokens == kTile) {
      if (hopper::elect()) {
        hopper::store_box(maps.output, job.column, job.head, static_cast<int>(at.token), at.batch,
                          ptx::shared_address(&outbox.output));
        hopper::wait_for_stores();
      }
      return;
    }
    const int row = static_cast<int>(threadIdx.x & 31) / 8, c = static_cast<int>(threadIdx.x % 8) * 8;
    if (job.column + c >= p.V) return;
    T* to = row_pointer<T>(p.o, at.batch, at.token, job.head) + job.column + c;
    for (int i = row; i < at.tokens; i += 4) {
      *reinterpret_cast<uint4*>(to + i * p.o.token) =
          *reinterpret_cast<const uint4*>(outbox.output.bytes + tile_offset(i, c));
    }
  };
  for (int step = 0; step < job.chunks; ++step) {
    const int index = static_cast<int>(job.index(p, step));
    if ((job.reverse ? p.dstate_t : p.state_t) != nullptr) {
      take(kStateParcel, step, [&] {
        if (!hopper::elect()) return;
#pragma unroll
        for (int tile = 0; tile < C::kKeyTiles; ++tile) {
          hopper::store_box(maps.states[side], tile * kTile, 0, job.column, index,
                            ptx::shared_address(&outbox.state[tile]));
        }
        hopper::wait_for_stores();
      });
    }
    if (kOutput && step > 0) take(kOutputParcel, step - 1, [&] { store_output(step - 1); });
    if ((job.reverse ? p.p_t : p.r_t) != nullptr) {
      take(kRowsParcel, step, [&] {
        if (!hopper::elect()) return;
        hopper::store_box(maps.rows[side], 0, 0, job.column, index, ptx::shared_address(&outbox.rows));
        hopper::wait_for_stores();
      });
    }
  }
  if (kOutput && job.chunks > 0) take(kOutputParcel, job.chunks - 1, [&] { store_output(job.chunks - 1); });
}

/// A and Cq among the tiles of a stage.
template <class C>
constexpr int kA = C::kOperandTiles;
template <class C>
constexpr int kCq = C::kOperandTiles + 1;

/// One warp of the chain, on which all else waits: 16 value columns through the sequence, forwards or backwards. Each
/// fragment is given to the tensor cores as soon as it is rounded, so that rounding runs beside the product it is for;
/// scales are loaded a product before they are needed. Scalar gates without gates are kGated = false: decays of 1 are
/// left out.
template <class C, bool kOutput, bool kReverse, bool kGated>
struct Chain {
  using T = typename C::T;
  using Products = Accumulator<8>;  ///< [16 value columns, 64 tokens]
  static constexpr int kKeySteps = C::kKeys / 16;
  static constexpr bool kVector = C::kVector;

  const Params& p;
  const Job& job;
  Outbox<C>& outbox;
  int column;                       ///< first value column of the warp in the block's 64
  Accumulator<C::kKeys / 8> state;  ///< S^T or dS^T   [16 value columns, K]
  // Of the coming step:
  float2 z[4][4];           ///< forwards: Z^T
  Scales erase_scale;       ///< forwards, scalar gates
  std::uint32_t d_o[4][4];  ///< backwards: dO^T
  float decay;              ///< scalar gates
  // Of the last step:
  std::uint32_t output[4][4];  ///< O^T

  /// What a step needs of its stage at once.
  __device__ __forceinline__ void load(const Stage<C>& stage) {
    if constexpr (kReverse) {
      load_output_gradient(stage, column, d_o);
    } else {
      Scales strength;
      if constexpr (!C::kIndependent) strength.load(stage.beta);
      if constexpr (!kVector) {
        if constexpr (kGated)
          erase_scale.load(stage.erase_scale);
        else
          erase_scale = strength;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) load_values(stage, column, n, strength, z[n]);
    }
    if constexpr (!kVector && kGated) decay = stage.decay[0];
  }

  /// Fragments [16, 64] as rows of a tile.
  __device__ __forceinline__ void put_rows(TileStorage& tile, const std::uint32_t (&x)[4][4]) const {
    const int l = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      hopper::store_matrices(fragment_address(ptx::shared_address(&tile), column, 16 * j, l & 15, l >> 4), x[j]);
    }
  }
  /// Fragments [16, 64] as columns of a tile.
  __device__ __forceinline__ void put_columns(TileStorage& tile, const std::uint32_t (&x)[4][4]) const {
    const int l = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Matrices: tokens 16 j on of the lower and upper columns, then tokens 16 j + 8 on.
      hopper::store_matrices_transposed(
          fragment_address(ptx::shared_address(&tile), 16 * j, column, (l & 7) + (l >> 4) * 8, (l >> 3) & 1), x[j]);
    }
  }
  __device__ __forceinline__ void give_output(int step) const {
    if (step > 0) ptx::barrier_sync(taken(kOutputParcel), kParcelThreads);
    put_columns(outbox.output, output);
    ptx::barrier_arrive(given(kOutputParcel), kParcelThreads);
  }

  // What starts a product gives each fragment a group of its own: its registers may then be written while the products
  // before it are under way.

  /// The state rounded, and acc (+)= state operand^T   [16, 64 tokens] under way; in forward calls another with the
  /// queries behind it. Beside them the state before the step is given where it is wanted, and decays.
  __device__ __forceinline__ void start_from_state(std::uint32_t base, int which, int step, const Stage<C>& stage,
                                                   Products& acc, bool accumulate, Products& o) {
    std::uint32_t rounded[kKeySteps][4];
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      to_fragment<T>(state, j, rounded[j]);
      wgmma::begin(rounded[j]);
      wgmma::multiply_async<T, false>(acc, rounded[j], wgmma::rows_of(base, which + j / 4, 16 * (j % 4)),
                                      accumulate || j > 0);
      wgmma::commit();
    }
    if constexpr (kOutput) {
      if (step > 0) give_output(step - 1);
      wgmma::begin();
#pragma unroll
      for (int j = 0; j < kKeySteps; ++j) {
        wgmma::multiply_async<T, false>(o, rounded[j], wgmma::rows_of(base, C::kQuery + j / 4, 16 * (j % 4)), j > 0);
      }
      wgmma::commit();
    }
    if ((kReverse ? p.dstate_t : p.state_t) != nullptr) {
      if (step > 0) ptx::barrier_sync(taken(kStateParcel), kParcelThreads);
#pragma unroll
      for (int tile = 0; tile < C::kKeyTiles; ++tile) {
        put_rows(outbox.state[tile], reinterpret_cast<const std::uint32_t(&)[4][4]>(rounded[4 * tile]));
      }
      ptx::barrier_arrive(given(kStateParcel), kParcelThreads);
    }
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

  /// The state's update under way: state + x operand forwards, state - x operand backwards; x is `rounded`, which are
  /// the rows as they are stored, or with kScaled the rows times scale[token].
  template <bool kScaled>
  __device__ __forceinline__ void start_update(std::uint32_t base, int which, const Scales& scale, const Products& rows,
                                               std::uint32_t (&rounded)[4][4]) {
    std::uint32_t x[4][4];
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
  }

  __device__ __forceinline__ void give_rows(int step, const std::uint32_t (&rounded)[4][4]) const {
    if ((kReverse ? p.p_t : p.r_t) == nullptr) return;
    if (step > 0) ptx::barrier_sync(taken(kRowsParcel), kParcelThreads);
    put_rows(outbox.rows, rounded);
    ptx::barrier_arrive(given(kRowsParcel), kParcelThreads);
  }

  /// All of a step but the end of its last products, which are under way.
  __device__ __forceinline__ void start_step_forward(int step, Stage<C>& stage, Products& o) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    constexpr bool kScaled = !kVector && kGated;
    Products es, r;
    start_from_state(base, C::kErase, step, stage, es, false, o);  // steps 5 and 8: (E S)^T, (Qg S)^T
    wgmma::wait<kOutput ? 1 : 0>();
    wgmma::hold(es);
    std::uint32_t x[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // steps 6 and 7: X = Z - E S, R = A X
      subtract_from_values<T>(n, z[n], es, kVector ? nullptr : &erase_scale.x[2 * n], x[n]);
      wgmma::begin(x[n]);
      wgmma::multiply_async<T, false>(r, x[n], wgmma::rows_of(base, kA<C>, 16 * n), n > 0);
      wgmma::commit();
    }
    if constexpr (kOutput) {
      wgmma::wait<4>();
      wgmma::hold(o);
      scale_output(p, stage, o);
    }
    if constexpr ((kParts<C>) > 1) ptx::arrive(stage.free[0]);
    Scales write_scale;
    if constexpr (kScaled) write_scale.load(stage.write_scale);
    wgmma::wait<0>();
    wgmma::hold(r);
    std::uint32_t rounded[4][4];
    start_update<kScaled>(base, C::kWrite, write_scale, r, rounded);  // step 9
    if constexpr (kOutput) {
      wgmma::begin();
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // step 8: O = Qg S + Cq R
        wgmma::multiply_async<T, false>(o, rounded[j], wgmma::rows_of(base, kCq<C>, 16 * j), true);
      }
      wgmma::commit();
    }
    give_rows(step, rounded);
  }

  __device__ __forceinline__ void start_step_reverse(int step, Stage<C>& stage) {
    const std::uint32_t base = wgmma::lower_word(ptx::shared_address(&stage));
    // Step 10: dR = Cq^T dO + F dS. Scalar gates scale the second half before the two are added.
    Products d_r, from_state, sensitivity;
    wgmma::begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma::multiply_async<T, true>(d_r, d_o[i], wgmma::columns_of(base, kCq<C>, 16 * i), i > 0);
    }
    wgmma::commit();
    start_from_state(base, C::kWrite, step, stage, kVector ? d_r : from_state, kVector, d_r);
    Scales scale;
    if constexpr (!kVector) scale.load(stage.write_scale);
    wgmma::wait<0>();
    wgmma::hold(d_r);
    if constexpr (!kVector) wgmma::hold(from_state);
    if constexpr ((kParts<C>) > 1) ptx::arrive(stage.free[0]);
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
      for (int i = 0; i < 4; ++i) wgmma::begin(low[i]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma::multiply_async<T, true>(state, low[i], wgmma::columns_of(base, C::kQuery, 16 * i), true);
      }
      wgmma::commit();
    }
    if constexpr (!kVector) scale.load(stage.erase_scale);
    wgmma::wait<kGated ? 5 : 4>();
    wgmma::hold(sensitivity);
    start_update<!kVector>(base, C::kErase, scale, sensitivity, x);
    give_rows(step, x);
  }

  /// Starts with the state, or its gradient, that enters the sequence, where there is one.
  __device__ __forceinline__ void run(Stage<C>* stages, const States& initial) {
    load_state(initial, job.sequence, job.head, 0, job.column + column, p.K, p.V, state);
    if constexpr (kReverse) rescale_gradient<C>(job, 1.0f / p.scale_rest, state);
    Place place;
    if (job.chunks > 0) {
      ptx::wait(stages[0].landed[0], 0);
      load(stages[0]);
    }
    for (int step = 0; step < job.chunks; ++step) {
      Stage<C>& stage = stages[place.s];
      if constexpr ((kParts<C>) > 1) ptx::wait(stage.landed[1], place.parity);
      wgmma::wait<0>();  // nothing is under way: said here, it keeps ptxas from waiting before each product
      wgmma::hold(state);
      Products o;
      if constexpr (kReverse) {
        start_step_reverse(step, stage);
      } else {
        start_step_forward(step, stage, o);
      }
      place.advance(job.stages);
      if (step + 1 < job.chunks) ptx::wait(stages[place.s].landed[0], place.parity);
      load(stages[place.s]);  // beside the products; behind the last step it is not used
      wgmma::wait<0>();
      wgmma::hold(state);
      ptx::arrive(stage.free[kParts<C> - 1]);
      if constexpr (kOutput) {
        wgmma::hold(o);
        to_fragments<T>(o, output);
      }
    }
    if (kOutput && job.chunks > 0) give_output(job.chunks - 1);
  }

  /// What leaves it. The block's place is found again, so that no register keeps it through the loop.
  __device__ __forceinline__ void finish(const States& last, const Job& again) {
    if constexpr (kReverse) rescale_gradient<C>(again, p.scale_rest, state);
    store_state_fp32(last, again.sequence, again.head, 0, again.column + column, p.K, p.V, state);
  }
};

template <class C, bool kOutput>
__global__ void __launch_bounds__(kThreads, 1)
    scan(const __grid_constant__ Params p, const __grid_constant__ Maps maps, const int stages, const bool both) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Job job = find_job<kOutput>(p, blockIdx.x, kWidth, stages, both);
  auto* ring = reinterpret_cast<Stage<C>*>(memory);
  auto& outbox = *reinterpret_cast<Outbox<C>*>(ring + stages);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ptx::initialise(ring[s].landed[0], 2 * 32);  // the warps of the tiles and of the scalars
      ptx::initialise(ring[s].landed[1], 32);
      for (int part = 0; part < 2; ++part) ptx::initialise(ring[s].free[part], kChainThreads);
    }
    hopper::publish_barriers();
  }
  if constexpr (C::kVector) {
    // Features past K decay to 0: their states are zero, and stay numbers.
    for (int i = p.K + static_cast<int>(threadIdx.x); i < C::kKeys; i += kThreads) {
      for (int s = 0; s < stages; ++s) ring[s].decay[i] = 0.0f;
    }
  }
  __syncthreads();
  constexpr int kTiles = kChainThreads / 32, kStores = kTiles + 1, kScalars = kStores + 1;
  if (warp < kTiles) {
    const auto run = [&]<bool kReverse, bool kGated>(const States& initial, const States& last) {
      Chain<C, kOutput, kReverse, kGated> chain{p, job, outbox, 16 * warp, {}, {}, {}, {}, {}, {}};
      chain.run(ring, initial);
      chain.finish(last, find_job<kOutput>(p, fresh(static_cast<int>(blockIdx.x)), kWidth, stages, both));
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
  } else if (warp == kTiles) {
    produce_tiles<C>(p, maps, job, ring);
  } else if (warp == kStores) {
    store_parcels<C, kOutput>(p, maps, job, outbox);
  } else {
    produce_scalars<C>(p, job, ring, warp - kScalars);
  }
}

/// False where the copy engine cannot step through an operand or O.
template <class C>
bool describe(const Params& p, bool output, Maps& maps) {
  const auto rows = [&](CUtensorMap& map, const Rows& of, std::int64_t heads, std::int64_t width) {
    return of.data == nullptr || describe_rows(map, of, p.B, p.T, heads, width);
  };
  const auto matrices = [&](CUtensorMap& map, const void* data, std::int64_t of_rows, std::int64_t columns) {
    return data == nullptr || describe_matrices(map, data, p.chunks * p.HV, of_rows, columns);
  };
  if (p.chunks == 0) return true;
  const bool operands = C::kVector ? rows(maps.erase, p.erase, p.HV, p.K) && rows(maps.write, p.write, p.HV, p.K) &&
                                         rows(maps.query, p.query, p.HV, p.K)
                                   : rows(maps.erase, p.k, p.H, p.K) && rows(maps.query, p.q, p.H, p.K);
  return operands && rows(maps.values[0], p.v, p.HV, p.V) && (output || rows(maps.values[1], p.d_o, p.HV, p.V)) &&
         rows(maps.strength, p.w, p.HV, p.V) && rows(maps.output, p.o, p.HV, p.V) &&
         matrices(maps.a, p.a, kTile, kTile) && matrices(maps.cq, p.cq, kTile, kTile) &&
         matrices(maps.states[0], p.state_t, p.V, p.K) && matrices(maps.rows[0], p.r_t, p.V, kTile) &&
         matrices(maps.states[1], p.dstate_t, p.V, p.K) && matrices(maps.rows[1], p.p_t, p.V, kTile);
}

template <class C>
constexpr int shared_bytes(int stages) {
  return static_cast<int>(stages * sizeof(Stage<C>) + sizeof(Outbox<C>));
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
