// Tensors of any strides, as kernels are given them, and what the host finds out about their strides.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "rewy/tensor_view.h"

namespace rewy::cuda {

/// A [B, T, groups, features] tensor by strides. Null data: not given.
struct Elements {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, group = 0, feature = 0;
};

/// Whether every row is made of aligned pieces of `piece` neighbouring elements, and is a multiple of `run` long. Axes
/// of one element are never stepped along. True for what is not given.
inline bool is_whole(const TensorView& t, std::int64_t piece, std::int64_t run) {
  if (!t.given()) return true;
  const int features = t.rank - 1;
  const auto bytes = static_cast<std::uintptr_t>(piece) * size_of(t.dtype);
  bool whole =
      reinterpret_cast<std::uintptr_t>(t.data) % bytes == 0 && t.strides[features] == 1 && t.shape[features] % run == 0;
  for (int axis = 0; axis < features; ++axis) {
    whole = whole && (t.shape[axis] == 1 || t.strides[axis] % piece == 0);
  }
  return whole;
}

/// A state [N, HV, K, V], or [N, HV, V, K].
inline States states_of(const TensorView& t, StateLayout layout) {
  if (!t.given()) return {};
  const bool kv = layout == StateLayout::kKV;
  return {static_cast<float*>(t.data), t.strides[0], t.strides[1], t.strides[kv ? 2 : 3], t.strides[kv ? 3 : 2]};
}

}  // namespace rewy::cuda
