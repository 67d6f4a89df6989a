// The local pullback (docs/kernels/pullback.md): every input gradient of one chunk, from dO and what the scans left, with
// one shared sensitivity P (docs/math.md, section 3):
//
//   Hq = tril(dO R^T)     D  = -tril(P R^T, -1)     dF = R dS+^T
//   dQg = dO S^T + Hq Y   dE = -P S^T + D Y         dY = D^T E + Hq^T Qg + dF * lambda
//
// A block of 256 threads takes one chunk and query head, and in turn every 64 features and every value head of the group:
// nothing but the gradients leaves it. Eight warps, 16 token rows and 32 columns each. About 80 KB of shared memory and
// 128 registers a thread let two blocks share a multiprocessor, so that one loads while the other multiplies.
#include <type_traits>

#include "cuda/check.h"
#include "cuda/sm80/pullback.cuh"
#include "cuda/sm80/pullback_scalar.cuh"
#include "cuda/sm80/pullback_vector.cuh"

namespace rewy::cuda {
namespace pullback {
namespace {

template <class C>
__global__ void __launch_bounds__(kThreads, 1) pullback(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Shared = SharedStorage<C>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Job job;
  job.slot = blockIdx.x / p.H;
  job.key_head = static_cast<int>(blockIdx.x % p.H);
  job.group = p.HV / p.H;
  job.at = locate(p, job.slot);
  if (job.at.tokens == 0) return;
  RowSums* row_sums = reinterpret_cast<RowSums*>(memory + sizeof(Shared));
  float* group_sums = reinterpret_cast<float*>(row_sums + job.group);

  for (int feature = 0; feature < p.K; feature += kTile) {
    for (int member = 0; member < job.group; ++member) {
      const int head = job.key_head * job.group + member;
      const GroupSum<typename C::T> group{group_sums, member, job.group};
      if (feature > 0 || member > 0) __syncthreads();  // the last tile's memory has been read
      if constexpr (!C::kVector) {
        if (member == 0) stage_operands<C>(p, job, feature, shared);
      }
      copy_value_tiles<typename C::T>(p, job, head, feature, 0, shared.value);
      if constexpr (C::kVector) {
        prepare_vector<C>(p, job, head, feature, shared);
      } else {
        prepare_scalar<C>(p, job, head, shared);
      }
      Sums sums;
      multiply_values<C>(p, job, head, feature, shared, sums);
      __syncthreads();
      if (!C::kIndependent && feature == 0 && threadIdx.x < kTile) {
        row_sums[member].value[threadIdx.x] = shared.value_sum[0][threadIdx.x] + shared.value_sum[1][threadIdx.x];
      }
      if constexpr (C::kVector) {
        store_matrices_vector<C>(p, sums, shared);
        __syncthreads();
        multiply_blocks<C>(p, shared, sums);
        finish_vector<C>(p, job, head, feature, shared, row_sums[member], group);
      } else {
        store_matrices<C>(p, sums, shared);
        make_erase_operand<C>(shared);
        __syncthreads();
        finish_scalar<C>(p, job, feature, shared, sums, row_sums[member], group);
      }
    }
  }
  __syncthreads();
  if constexpr (!C::kIndependent) {
    for (int member = 0; member < job.group; ++member) {
      const int head = job.key_head * job.group + member;
      const RowSums& sums = row_sums[member];
      const int i = threadIdx.x;
      if (p.dbeta.data != nullptr && i < job.at.tokens) {
        const std::int64_t place =
            job.at.batch * p.dbeta.batch + (job.at.token + i) * p.dbeta.token + head * p.dbeta.head;
        store_scalar(p.dbeta.data, place, p.strength_dtype, sums.strength[0][i] + sums.strength[1][i] + sums.value[i]);
      }
      if constexpr (!C::kVector) {
        if (threadIdx.x / 32 == 4) store_gate_gradient(p, job, head, sums);
      }
    }
  }
}

template <class C>
int shared_bytes(int group) {
  return static_cast<int>(sizeof(SharedStorage<C>) + group * sizeof(RowSums)) +
         (group > 1 ? 2 * kTile * kTile * static_cast<int>(sizeof(float)) : 0);
}

template <class C>
void launch(const Params& p, cudaStream_t stream) {
  const std::int64_t blocks = p.chunks * p.H;
  if (blocks == 0) return;
  const int bytes = shared_bytes<C>(p.HV / p.H);
  const auto kernel = pullback<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "pullback");
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p);
  check_launch("pullback");
}

template <class T>
void launch_operator(const Params& p, Operator op, cudaStream_t stream) {
  if (strength_of(op) == Strength::kIndependent) {
    launch<Config<T, Gate::kVector, Strength::kIndependent>>(p, stream);
  } else if (gate_of(op) == Gate::kVector) {
    launch<Config<T, Gate::kVector, Strength::kShared>>(p, stream);
  } else {
    launch<Config<T, Gate::kScalar, Strength::kShared>>(p, stream);
  }
}

template <class T>
int operator_bytes(Operator op, int group) {
  if (strength_of(op) == Strength::kIndependent) {
    return shared_bytes<Config<T, Gate::kVector, Strength::kIndependent>>(group);
  }
  if (gate_of(op) == Gate::kVector) return shared_bytes<Config<T, Gate::kVector, Strength::kShared>>(group);
  return shared_bytes<Config<T, Gate::kScalar, Strength::kShared>>(group);
}

}  // namespace
}  // namespace pullback

int pullback_shared_bytes(const Kind& kind, std::int64_t group) {
  constexpr std::int64_t kMostHeads = 1 << 16;  // more than any device's memory, without overflow
  const int heads = static_cast<int>(group < kMostHeads ? group : kMostHeads);
  return kind.dtype == DType::kBF16 ? pullback::operator_bytes<ptx::BFloat>(kind.op, heads)
                                    : pullback::operator_bytes<ptx::Half>(kind.op, heads);
}

void launch_pullback(const Params& p, const Kind& kind, const DeviceLimits&, cudaStream_t stream) {
  if (kind.dtype == DType::kBF16) {
    pullback::launch_operator<ptx::BFloat>(p, kind.op, stream);
  } else {
    pullback::launch_operator<ptx::Half>(p, kind.op, stream);
  }
}

}  // namespace rewy::cuda
