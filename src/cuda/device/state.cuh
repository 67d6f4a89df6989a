// FP32 states in either layout, to and from the accumulators of S^T: rows are value columns, columns are features.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/params.h"

namespace rewy::cuda {

/// Calls fn(accumulator element, address) for what lies inside [K, V].
template <int kN, class Fn>
__device__ __forceinline__ void for_each_state(const States& states, std::int64_t sequence, int head, int feature,
                                               int column, int K, int V, Accumulator<kN>& state, Fn&& fn) {
  float* base = states.data + sequence * states.sequence + head * states.head;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int v = column + lane_row() + 8 * (e / 2);
      const int k = feature + 8 * n + lane_column() + e % 2;
      if (v < V && k < K) fn(state.c[n][e], base + k * states.key + v * states.value);
    }
  }
}

/// Zero where there is no state to load.
template <int kN>
__device__ __forceinline__ void load_state(const States& states, std::int64_t sequence, int head, int feature,
                                           int column, int K, int V, Accumulator<kN>& state) {
  state.clear();
  if (states.data == nullptr) return;
  for_each_state(states, sequence, head, feature, column, K, V, state, [](float& x, const float* at) { x = *at; });
}

template <int kN>
__device__ __forceinline__ void store_state_fp32(const States& states, std::int64_t sequence, int head, int feature,
                                                 int column, int K, int V, Accumulator<kN>& state) {
  if (states.data == nullptr) return;
  for_each_state(states, sequence, head, feature, column, K, V, state, [](float& x, float* at) { *at = x; });
}

}  // namespace rewy::cuda
