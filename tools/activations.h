// Activations (rewy/activation.h) with made-up projections, run in poisoned memory and judged element by element by the
// FP64 reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rewy/activation.h"
#include "run_case.h"
#include "tensor.h"

namespace rewy::tool {

struct ActivationCase {
  Activation activation;
  bool A_log = true, dt_bias = true;
  Placement strides = Placement::kDense;  ///< of inputs and outputs
  std::uint64_t seed = 1;
};

/// Inputs, and gradients of the results. Those of parts that are not there are not given.
struct ActivationData {
  Activation activation;
  Placement strides = Placement::kDense;
  Tensor raw_q, raw_k, raw_g, A_log, dt_bias, raw_beta;
  Tensor dq, dk, dg, dbeta;
};

/// The same values for every placement. Among the raw gates and strengths are numbers beyond where exponentials
/// overflow, and -inf; a row of queries and keys is zero, another one subnormal.
ActivationData make_activation_data(const ActivationCase&);

/// Forward and backward: q, k, q_rstd, k_rstd, g, beta and d_raw_q, d_raw_k, d_raw_g, d_A_log, d_dt_bias, d_raw_beta,
/// as far as the activation has them. Throws rewy::Error as the library does, and std::runtime_error if anything but
/// the elements of an output was written. Of the options device, backend and threads count. `captured`, on a
/// GPU: the calls are captured in a graph.
std::vector<Output> run_activation(const ActivationData&, const RunOptions&, bool captured = false);

/// What an output must be, and how far off each element may be, row-major.
struct ActivationExpectation {
  std::string output;
  std::vector<double> expected, allowed;
};

/// By the reference on FP64 copies of the data. Allowed is the rounding of the output's type, and what FP32 loses on
/// the way: that of a few operations, of an argument before its exponential is taken, and of a sum's order.
std::vector<ActivationExpectation> expect_activation(const ActivationData&, int threads = 0);

/// Empty, or the first element that is further off than allowed.
std::string first_failure(const std::vector<Output>&, const std::vector<ActivationExpectation>&);

/// A property: the parts that an operator's layer has, in all types, forms of the gate and placements, against the
/// reference; the same bits from every placement, in every batch row alone, twice, from every number of threads and, on
/// a GPU, from a captured graph. Throws std::runtime_error with what shows the fault.
void check_activation(Operator, const RunOptions&);

}  // namespace rewy::tool
