// The local pullback (docs/kernels/pullback.md): every input gradient of one chunk, from dO and what the scans left,
// with one shared sensitivity P (docs/math.md, section 3):
//
//   Hq = tril(dO R^T)     D  = -tril(P R^T, -1)     dF = R dS+^T
//   dQg = dO S^T + Hq Y   dE = -P S^T + D Y         dY = D^T E + Hq^T Qg + dF * lambda
//
// A block of 256 threads takes one chunk, query head and 64 features, and in turn every value head of the group:
// nothing but gradients leaves it, and sums over its features by token, which pullback_sums adds up. Hq and D are
// formed anew for each 64 features. Eight warps, 16 token rows and 32 columns each. On Hopper two blocks share a
// multiprocessor: one loads while the other multiplies.
#include "cuda/check.h"
#include "cuda/sm80/pullback.cuh"
#include "cuda/sm80/pullback_scalar.cuh"
#include "cuda/sm80/pullback_vector.cuh"

namespace rewy::cuda {
namespace pullback {
namespace {

/// On a multiprocessor. Elsewhere one block may use all registers; most others have shared memory for no more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kResidentBlocks = 2;
#else
constexpr int kResidentBlocks = 1;
#endif

__device__ __forceinline__ RowSums* row_sums(const Params& p, const Job& job, int head) {
  return p.row_sums + ((job.slot * p.HV + head) * (job.tiles + 1) + job.tile);
}

template <class C, bool kGrouped>
__global__ void __launch_bounds__(kThreads, kGrouped ? 1 : kResidentBlocks) pullback(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Shared = SharedStorage<C>;
  using T = typename C::T;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Job job = find_job<kGrouped>(p, blockIdx.x);
  const int feature = job.tile * kTile;
  if (job.at.tokens == 0) return;
  float* group_sums = reinterpret_cast<float*>(memory + sizeof(Shared));

  for (int member = 0; member < job.group; ++member) {
    const int head = job.key_head * job.group + member;
    if (kGrouped && member > 0) __syncthreads();  // the last head's memory has been read
    if (job.tile == job.tiles) {
      pull_back_values<C>(p, job, head, shared, row_sums(p, job, head));
      continue;
    }
    const GroupSum<T, kGrouped> group{group_sums, member, job.group};
    if constexpr (C::kVector) {
      stage_columns<C>(p, job, head, feature, shared);
    } else if (member == 0) {
      stage_operands<C>(p, job, feature, shared);
    }
    copy_value_tiles<T>(p, job, head, feature, 0, shared.value);
    if constexpr (C::kVector) {
      prepare_vector<C>(p, job, head, feature, shared);
    } else {
      prepare_scalar<C>(p, job, head, shared);
    }
    Sums sums;
    multiply_values<C>(p, job, head, feature, shared, sums, [&] {
      if constexpr (!C::kVector) make_erase_operand<C>(shared);
    });
    __syncthreads();
    if constexpr (C::kVector) {
      store_matrices_vector<C>(p, sums, shared);
      __syncthreads();
      multiply_blocks<C>(p, shared, sums);
      const Job same = find_job<kGrouped>(p, static_cast<unsigned>(fresh(static_cast<int>(blockIdx.x))));
      finish_vector<C>(p, same, same.key_head * same.group + member, same.tile * kTile, shared, group);
    } else {
      store_matrices<C>(p, sums, shared);
      __syncthreads();
      finish_scalar<C>(p, job, feature, shared, sums, group);
    }
    if constexpr (!C::kIndependent) {
      if constexpr (C::kVector) __syncthreads();
      // The job again, rather than in registers through the products.
      const Job same = find_job<kGrouped>(p, static_cast<unsigned>(fresh(static_cast<int>(blockIdx.x))));
      RowSums* sums_to = row_sums(p, same, same.key_head * same.group + member);
      const int i = static_cast<int>(threadIdx.x) % kTile, which = static_cast<int>(threadIdx.x) / kTile;
      if (which == 0) sums_to->strength[i] = shared.rows.strength[0][i] + shared.rows.strength[1][i];
      if constexpr (!C::kVector) {
        if (which == 1) sums_to->query[i] = shared.rows.query[0][i] + shared.rows.query[1][i];
        if (which == 2) sums_to->write[i] = shared.rows.write[0][i] + shared.rows.write[1][i];
        if (which == 3 && i < 32) {
          const float sum = state_sum(shared);
          if (i == 0) sums_to->state = shared.decay[0] * (p.scale_rest * sum);
        }
      }
    }
  }
}

/// Step 9: dbeta, and dg of scalar gates, from the sums of all tiles. A warp for each chunk and value head.
template <bool kVector>
__global__ void __launch_bounds__(kThreads) pullback_sums(const __grid_constant__ Params p) {
  const std::int64_t index = blockIdx.x * static_cast<std::int64_t>(kThreads / 32) + threadIdx.x / 32;
  if (index >= p.chunks * p.HV) return;
  const int head = static_cast<int>(index % p.HV);
  const ChunkAt at = locate(p, index / p.HV);
  const int tiles = (p.K + kTile - 1) / kTile;
  const RowSums* sums = p.row_sums + index * (tiles + 1);
  const int first = 2 * (static_cast<int>(threadIdx.x) & 31);
  if (at.tokens == 0) return;
  float strength[2], after[2] = {}, before[2] = {}, state = 0.0f;
#pragma unroll
  for (int e = 0; e < 2; ++e) strength[e] = sums[tiles].strength[first + e];
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      strength[e] += sums[tile].strength[first + e];
      if constexpr (!kVector) {
        after[e] += sums[tile].query[first + e];
        before[e] += sums[tile].write[first + e];
      }
    }
    if constexpr (!kVector) state += sums[tile].state;
  }
  if constexpr (!kVector) {
    suffix_sums(after);
    prefix_sums(before);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (first + e >= at.tokens) continue;
    const std::int64_t token = at.token + first + e;
    if (p.dbeta.data != nullptr) {
      store_scalar(p.dbeta.data, at.batch * p.dbeta.batch + token * p.dbeta.token + head * p.dbeta.head,
                   p.strength_dtype, strength[e]);
    }
    if constexpr (!kVector) {
      // Where nothing of the state is left, the gate's gradient is 0, and not the rounding of sums that cancel.
      const bool resets = scalar_decay(p, at, head, first + e) == 0.0f;
      if (p.dg.data != nullptr) {
        *row_pointer<float>(p.dg, at.batch, token, head) = resets ? 0.0f : after[e] + (before[e] + state);
      }
    }
  }
}

template <class C>
int shared_bytes(bool grouped) {
  return static_cast<int>(sizeof(SharedStorage<C>)) +
         (grouped ? 2 * kTile * kTile * static_cast<int>(sizeof(float)) : 0);
}

template <class C, bool kGrouped>
void launch_tiles(const Params& p, cudaStream_t stream) {
  const int bytes = shared_bytes<C>(kGrouped);
  const auto kernel = pullback<C, kGrouped>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "pullback");
  const std::int64_t blocks = p.chunks * p.H * ((p.K + kTile - 1) / kTile + 1);
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p);
  check_launch("pullback");
}

template <class C>
void launch(const Params& p, cudaStream_t stream) {
  if (p.chunks * p.H == 0) return;
  if (p.HV == p.H) {
    launch_tiles<C, false>(p, stream);
  } else {
    launch_tiles<C, true>(p, stream);
  }
  if constexpr (!C::kIndependent) {
    constexpr int kWarps = kThreads / 32;
    const std::int64_t blocks = (p.chunks * p.HV + kWarps - 1) / kWarps;
    pullback_sums<C::kVector><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    check_launch("pullback_sums");
  }
}

template <class Fn>
void with_config(const Kind& kind, Fn&& fn) {
  with_traits(
      kind, [&]<class T, Gate kGate, Strength kStrength>() { fn.template operator()<Config<T, kGate, kStrength>>(); });
}

}  // namespace
}  // namespace pullback

int pullback_shared_bytes(const Kind& kind, std::int64_t group) {
  int bytes = 0;
  pullback::with_config(kind, [&]<class C>() { bytes = pullback::shared_bytes<C>(group > 1); });
  return bytes;
}

void launch_pullback(const Params& p, const Kind& kind, const DeviceLimits&, cudaStream_t stream) {
  pullback::with_config(kind, [&]<class C>() { pullback::launch<C>(p, stream); });
}

}  // namespace rewy::cuda
