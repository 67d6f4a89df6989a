// From a call's operator and type to the traits that kernels are compiled for.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/kernels.h"

namespace rewy::cuda {

/// Calls fn.operator()<Element, Gate, Strength>(). An absent gate is a scalar one.
template <class Fn>
void with_traits(const Kind& kind, Fn&& fn) {
  const auto with_operator = [&]<class T>() {
    if (strength_of(kind.op) == Strength::kIndependent) {
      fn.template operator()<T, Gate::kVector, Strength::kIndependent>();
    } else if (gate_of(kind.op) == Gate::kVector) {
      fn.template operator()<T, Gate::kVector, Strength::kShared>();
    } else {
      fn.template operator()<T, Gate::kScalar, Strength::kShared>();
    }
  };
  if (kind.dtype == DType::kBF16) {
    with_operator.template operator()<ptx::BFloat>();
  } else {
    with_operator.template operator()<ptx::Half>();
  }
}

}  // namespace rewy::cuda
