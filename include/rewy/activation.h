// What turns a layer's raw projections into what the operators of rewy.h take, with the gradients: unit queries and
// keys, log decays, strengths. Describe an Activation once, then call activate() and activate_backward():
//
//   rewy::Activation a{.T = 2048, .H = 4, .HV = 4, .K = 128, .normalise = true, .gate = rewy::Gate::kVector};
//   rewy::activate(a, {.in = {.raw_q = ...}, .q = ..., .k = ..., .g = ...}, execution);
//
// Results have the names under which rewy::forward takes them, and their gradients those under which rewy::backward
// gives them. Every token is on its own, so that packed sequences need no offsets here. As in rewy.h, nothing allocates
// memory that outlives a call, synchronises a device or ends the process, and wrong arguments throw rewy::Error before
// anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "rewy/rewy.h"

namespace rewy {

/// Added to a squared norm before its root is taken.
inline constexpr double kNormEpsilon = 1e-6;

/// Shapes, element types, and which parts are computed (docs/math.md, section 7). Every part can be left out.
struct Activation {
  std::int64_t B = 1;   ///< batch
  std::int64_t T = 0;   ///< tokens; when packed, rows of the packed tensors
  std::int64_t H = 1;   ///< query/key heads
  std::int64_t HV = 1;  ///< value heads: of the gate and the strength
  std::int64_t K = 0;   ///< key width: of queries and keys, and of a vector gate

  /// Queries and keys: x / sqrt(sum_k x_k^2 + kNormEpsilon). Squared norms must stay in the range of FP32.
  bool normalise = false;
  DType dtype = DType::kF32;  ///< of queries and keys, raw and normalised, and their gradients

  /// The log decay, with x = raw + dt_bias:
  ///   g = -exp(A_log) softplus(x)              lower_bound not set
  ///   g = lower_bound sigmoid(exp(A_log) x)    lower_bound set: in (lower_bound, 0)
  Gate gate = Gate::kNone;              ///< kNone: there is none; kScalar: [B, T, HV]; kVector: [B, T, HV, K]
  std::optional<double> lower_bound{};  ///< below 0
  DType gate_dtype = DType::kF32;       ///< of the raw gate and its gradient

  /// beta = sigmoid(raw), times 2 where negative eigenvalues (beta > 1) are allowed.
  bool strength = false;
  bool allow_negative_eigenvalues = false;
  DType strength_dtype = DType::kF32;  ///< of the raw strength and its gradient
  DType beta_dtype = DType::kF32;      ///< of beta and its gradient: FP32 or strength_dtype

  bool operator==(const Activation&) const = default;
};

/// What both directions read; any strides. Where a part's element type is FP64, so may be its FP32 tensors.
struct ActivationInputs {
  TensorView raw_q{};     ///< [B, T, H, K]                     dtype          (normalise)
  TensorView raw_k{};     ///< [B, T, H, K]                     dtype          (normalise)
  TensorView raw_g{};     ///< [B, T, HV] or [B, T, HV, K]      gate_dtype     (gate)
  TensorView A_log{};     ///< [HV]                             FP32           (gate); with a lower bound it may be left
                          ///< out and exp(A_log) is 1
  TensorView dt_bias{};   ///< [HV], or [HV * K], head by head  FP32           (gate); optional, zero if not given
  TensorView raw_beta{};  ///< [B, T, HV]                       strength_dtype (strength)
};

struct ActivateArgs {
  ActivationInputs in{};
  TensorView q{};       ///< [B, T, H, K]  dtype
  TensorView k{};       ///< [B, T, H, K]  dtype
  TensorView q_rstd{};  ///< [B, T, H]     FP32: 1 / sqrt(sum_k raw_q^2 + kNormEpsilon), for the backward; optional
  TensorView k_rstd{};  ///< [B, T, H]     FP32; optional
  TensorView g{};       ///< like raw_g    FP32
  TensorView beta{};    ///< [B, T, HV]    beta_dtype
};

/// The gradients of a loss whose gradients with respect to the results are given. Outputs that are not given are not
/// computed, and what only they need may be left out.
struct ActivateBackwardArgs {
  ActivationInputs in{};
  TensorView q_rstd{};      ///< [B, T, H]     FP32, from activate()
  TensorView k_rstd{};      ///< [B, T, H]     FP32, from activate()
  TensorView dq{};          ///< [B, T, H, K]  dtype       of the normalised queries
  TensorView dk{};          ///< [B, T, H, K]  dtype       of the normalised keys
  TensorView dg{};          ///< like raw_g    FP32        of the log decay
  TensorView dbeta{};       ///< [B, T, HV]    beta_dtype  of the strength
  TensorView d_raw_q{};     ///< [B, T, H, K]  dtype
  TensorView d_raw_k{};     ///< [B, T, H, K]  dtype
  TensorView d_raw_g{};     ///< like raw_g    gate_dtype
  TensorView d_A_log{};     ///< [HV]          FP32; only where an A_log is given
  TensorView d_dt_bias{};   ///< like dt_bias  FP32; only where a dt_bias is given
  TensorView d_raw_beta{};  ///< [B, T, HV]    strength_dtype
};

/// Bytes that Execution::workspace must hold, 64-byte aligned. The forward needs none, nor does a backward without
/// d_A_log and d_dt_bias. Grows linearly with B T. Uses only device, threads, backend and architecture of `execution`.
std::size_t activation_workspace_bytes(const Activation&, Direction, const Execution& = {});

/// Of `execution`, `work` is not used. Sums over tokens have one order: the same call gives the same bits, on any
/// number of threads.
void activate(const Activation&, const ActivateArgs&, const Execution&);
void activate_backward(const Activation&, const ActivateBackwardArgs&, const Execution&);

/// Which backend serves an activation, and why those before it in the table declined.
Explanation explain(const Activation&, Direction, const Execution& = {});

}  // namespace rewy
