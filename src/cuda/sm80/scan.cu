// The scans over chunks (docs/kernels/scan.md). Of one sequence and value head, for 16 value columns:
//
//   forwards    X = Z - E S        R = A X              S  <- diag(lambda) S + F^T R         (Z = w * v)
//               O = Qg S + Cq R                                                              (forward calls only)
//   backwards   dR = Cq^T dO + F dS                     P  = A^T dR
//               dS <- diag(lambda) dS + Qg^T dO - E^T P
//
// All of it is held transposed, value columns as rows: then the accumulators of one product are, once rounded, the
// left operand of the next, and a state never leaves the registers. Each warp holds 64 features of 16 columns; the
// warps of the same columns add what they find of E S, Qg S and F dS, and form R and P each for itself.
//
// Roles: producer warps (device/scan.cuh), consumer warps by slab of 16 columns and part of 64 features.
#include "cuda/sm80/scan.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/scan.cuh"
#include "cuda/device/state.cuh"

namespace rewy::cuda {
namespace {

using namespace scans;

constexpr int kMostConsumers = 4;  ///< warps: more would leave a thread fewer registers than a step needs

/// Warps that share 16 value columns, 64 features each.
template <class C>
constexpr int kParts = C::kKeyTiles;
/// Slabs of 16 columns a block can have.
template <class C>
constexpr int kMostSlabs = std::min(kMostConsumers / kParts<C>, kTile / 16);

/// Of one consumer warp.
struct WarpBuffers {
  unsigned char rows[16 * kTile * 2];  ///< what it stores in 16-byte pieces
  float4 partial[8][32];               ///< an accumulator of [16, 64 tokens], by lane
};

template <class C>
int shared_bytes(int stages, int consumers) {
  return static_cast<int>(stages * sizeof(Stage<C>) + consumers * sizeof(WarpBuffers));
}

/// One consumer warp: 64 features of 16 value columns through the sequence.
template <class C>
struct Consumer {
  using T = typename C::T;
  static constexpr int kFirst = 0, kLast = kParts<C> - 1;  ///< the parts that store tokens, and outputs

  const Params& p;
  const Job& job;
  WarpBuffers* buffers;  ///< of the warps of this slab
  int slab, part;
  int column;            ///< first value column
  Accumulator<8> state;  ///< S^T or dS^T   [16 value columns, 64 features]

  __device__ __forceinline__ std::uint32_t operand(const Stage<C>& stage, int which) const {
    return ptx::shared_address(&stage.operand[which + part]);
  }

  /// acc = state operand^T over all features   [16, 64 tokens].
  __device__ __forceinline__ void multiply_state(const Stage<C>& stage, int which, Accumulator<8>& acc) const {
    acc.clear();
    const std::uint32_t tile = operand(stage, which);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t a[4], b[4];
      to_fragment<T>(state, j, a);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_b(tile, 16 * n, 16 * j, b);
        multiply_pair<T>(acc, 2 * n, a, b);
      }
    }
    if constexpr ((kParts<C>) > 1) add_parts(acc);
  }

  /// Sums over the parts, in the same order for each: their copies of R and P stay equal in bits.
  __device__ __forceinline__ void add_parts(Accumulator<8>& acc) const {
    const int lane = threadIdx.x & 31;
    ptx::barrier_sync(kOfConsumers + slab, 32 * kParts<C>);  // the last sums have been read
#pragma unroll
    for (int n = 0; n < 8; ++n) buffers[part].partial[n][lane] = {acc.c[n][0], acc.c[n][1], acc.c[n][2], acc.c[n][3]};
    ptx::barrier_sync(kOfConsumers + slab, 32 * kParts<C>);
    acc.clear();
#pragma unroll
    for (int other = 0; other < kParts<C>; ++other) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 x = buffers[other].partial[n][lane];
        acc.c[n][0] += x.x;
        acc.c[n][1] += x.y;
        acc.c[n][2] += x.z;
        acc.c[n][3] += x.w;
      }
    }
  }

  /// state += x operand, x [16, 64 tokens] in fragments.
  __device__ __forceinline__ void add_to_state(const Stage<C>& stage, int which, const std::uint32_t (&x)[4][4]) {
    const std::uint32_t tile = operand(stage, which);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        std::uint32_t b[4];
        load_b_transposed(tile, 16 * i, 16 * n, b);
        multiply_pair<T>(state, 2 * n, x[i], b);
      }
    }
  }

  __device__ __forceinline__ void decay_state(const Stage<C>& stage) {
    if constexpr (C::kVector) {
      scale_columns(state, stage.decay + part * kTile);
    } else {
      const float decay = stage.decay[0];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.c[n][e] *= decay;
      }
    }
  }

  __device__ __forceinline__ void store_state(void* states, int step) const {
    if (states == nullptr) return;
    const int first = part * kTile;
    store_rows(buffers[part].rows, static_cast<T*>(states) + (job.index(p, step) * p.V + column) * p.K + first, p.K,
               p.V - column, p.K - first, [&](int j, std::uint32_t(&a)[4]) { to_fragment<T>(state, j, a); });
  }

  __device__ __forceinline__ void store_tokens(void* values, int step, const std::uint32_t (&x)[4][4]) const {
    if (values == nullptr || part != kFirst) return;
    store_rows(buffers[part].rows, static_cast<T*>(values) + (job.index(p, step) * p.V + column) * kTile, kTile,
               p.V - column, kTile, [&](int j, std::uint32_t(&a)[4]) {
#pragma unroll
                 for (int e = 0; e < 4; ++e) a[e] = x[j][e];
               });
  }

  template <bool kOutput>
  __device__ __forceinline__ void step_forward(int step, const Stage<C>& stage) {
    store_state(p.state_t, step);
    Accumulator<8> acc;
    multiply_state(stage, C::kErase, acc);  // step 5: (E S)^T
    std::uint32_t x[4][4];
    Scales strength, scale;
    if constexpr (!C::kIndependent) strength.load(stage.beta);
    if constexpr (!C::kVector) scale.load(stage.erase_scale);
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // step 6
      float2 z[4];
      load_values(stage, 16 * slab, n, strength, z);
      subtract_from_values<T>(n, z, acc, C::kVector ? nullptr : &scale.x[2 * n], x[n]);
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
    std::uint32_t decayed[4][4];  // what is written to the state: F^T R, the decay on R's side for scalar gates
    to_fragments<T>(acc, x);
    store_tokens(p.r_t, step, x);
    if constexpr (!C::kVector) scale_columns(acc, stage.write_scale);
    to_fragments<T>(acc, decayed);
    if constexpr (kOutput) {
      // Step 8: O = Qg S + Cq R.
      multiply_state(stage, C::kQuery, acc);
      if (part == kLast) {
        scale_output(p, stage, acc);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int j = 0; j <= n; ++j) {
            std::uint32_t b[4];
            load_b(ptx::shared_address(&stage.cq), 16 * n, 16 * j, b);
            multiply_pair<T>(acc, 2 * n, x[j], b);
          }
        }
        store_output<T>(p, job, stage.chunk, column, acc);
      }
    }
    // Step 9: the next state.
    decay_state(stage);
    add_to_state(stage, C::kWrite, decayed);
  }

  __device__ __forceinline__ void step_reverse(int step, const Stage<C>& stage) {
    store_state(p.dstate_t, step);
    Accumulator<8> acc;
    multiply_state(stage, C::kWrite, acc);  // step 10: (F dS)^T
    if constexpr (!C::kVector) scale_columns(acc, stage.write_scale);
    std::uint32_t d_o[4][4];
    load_output_gradient(stage, 16 * slab, d_o);
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
    to_fragments<T>(acc, x);
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
    to_fragments<T>(acc, x);
    store_tokens(p.p_t, step, x);
    // Step 12: the state gradient before the chunk.
    if constexpr (!C::kVector) {
      scale_columns(acc, stage.erase_scale);
      to_fragments<T>(acc, x);
    }
    std::uint32_t high[4][4], low[4][4];
    Scales scale;
    if constexpr (!C::kVector) scale.load(stage.query_scale);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scale_output_gradient<C>(p, C::kVector ? nullptr : &scale.x[2 * n], d_o[n], high[n], low[n]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] ^= 0x80008000u;  // -P
    }
    decay_state(stage);
    add_to_state(stage, C::kQuery, high);
    if (is_gated<C>(p)) add_to_state(stage, C::kQuery, low);
    add_to_state(stage, C::kErase, x);
  }

  template <bool kOutput>
  __device__ __forceinline__ void run(Stage<C>* stages) {
    const int first = part * kTile;
    load_state(job.reverse ? p.d_final_state : p.initial_state, job.sequence, job.head, first, column, p.K, p.V, state);
    rescale_gradient<C>(job, 1.0f / p.scale_rest, state);
    int s = 0;
    for (int step = 0; step < job.chunks; ++step) {
      ptx::barrier_sync(kFull + s, job.threads);
      if constexpr (kOutput) {
        step_forward<true>(step, stages[s]);
      } else if (job.reverse) {
        step_reverse(step, stages[s]);
      } else {
        step_forward<false>(step, stages[s]);
      }
      ptx::arrive(stages[s].free[0]);
      s = s + 1 == job.stages ? 0 : s + 1;
    }
    if (kOutput || job.reverse) {
      rescale_gradient<C>(job, p.scale_rest, state);
      store_state_fp32(kOutput ? p.final_state : p.d_initial_state, job.sequence, job.head, first, column, p.K, p.V,
                       state);
    }
  }
};

template <class C, bool kOutput>
__global__ void __launch_bounds__(kProducers + 32 * kMostConsumers, 1)
    scan(const __grid_constant__ Params p, const int stages, const bool both) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int slabs = (static_cast<int>(blockDim.x) - kProducers) / (32 * kParts<C>);
  const Job job = find_job<kOutput>(p, blockIdx.x, 16 * slabs, stages, both);
  auto* ring = reinterpret_cast<Stage<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) ptx::initialise(ring[s].free[0], job.threads - kProducers);
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    produce<C>(p, job, ring);
  } else {
    auto* buffers = reinterpret_cast<WarpBuffers*>(ring + stages);
    const int warp = (static_cast<int>(threadIdx.x) - kProducers) / 32;
    const int slab = warp / kParts<C>;
    Consumer<C> consumer{p, job, buffers + slab * kParts<C>, slab, warp % kParts<C>, job.column + 16 * slab, {}};
    consumer.template run<kOutput>(ring);
  }
}

/// How a launch cuts the value columns.
struct Cut {
  int slabs, stages;
  std::int64_t blocks;
};

/// Every slab of columns takes about the same time, so few heads are cut into many blocks: until half the
/// multiprocessors have one. Beyond, each block's copies of the same operands cost more than it gains.
template <class C>
Cut cut_columns(const Params& p, const DeviceLimits& device, int directions) {
  const std::int64_t scans = p.sequences * p.HV * directions;
  const auto blocks = [&](int slabs) { return scans * ((p.V + 16 * slabs - 1) / (16 * slabs)); };
  const auto fits = [&](int stages, int slabs) {
    return shared_bytes<C>(stages, slabs * kParts<C>) <= device.shared_bytes_per_block;
  };
  int slabs = 1;
  while (2 * slabs <= kMostSlabs<C> && 16 * slabs < p.V && 2 * blocks(slabs) > device.multiprocessors &&
         fits(1, 2 * slabs)) {
    slabs *= 2;
  }
  int stages = kMostStages;
  while (stages > 1 && !fits(stages, slabs)) --stages;
  return {slabs, stages, blocks(slabs)};
}

template <class C, bool kOutput>
void launch(const Params& p, const DeviceLimits& device, bool both, cudaStream_t stream) {
  const Cut cut = cut_columns<C>(p, device, both ? 2 : 1);
  if (cut.blocks == 0) return;
  const int consumers = cut.slabs * kParts<C>;
  const int bytes = shared_bytes<C>(cut.stages, consumers);
  const auto kernel = scan<C, kOutput>;
  // Always the same number: another thread may be launching the same kernel with fewer bytes.
  const int most = device.shared_bytes_per_block;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "scan");
  kernel<<<static_cast<unsigned>(cut.blocks), kProducers + 32 * consumers, bytes, stream>>>(p, cut.stages, both);
  check_launch("scan");
}

}  // namespace

int scan_shared_bytes(const Kind& kind, std::int64_t K) {
  int bytes = 0;
  with_config<256>(K, kind, [&]<class C>() { bytes = shared_bytes<C>(1, kParts<C>); });
  return bytes;
}

namespace sm80 {

void launch_scan_output(const Params& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  with_config<256>(p.K, kind, [&]<class C>() { launch<C, true>(p, device, false, stream); });
}

void launch_scan_both(const Params& p, const Kind& kind, const DeviceLimits& device, bool states_saved,
                      cudaStream_t stream) {
  with_config<256>(p.K, kind, [&]<class C>() { launch<C, false>(p, device, !states_saved, stream); });
}

}  // namespace sm80

}  // namespace rewy::cuda
