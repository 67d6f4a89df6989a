// The activations as plain functions of single numbers and rows, in the order of docs/math.md, section 7. Every
// implementation is measured against them, so they share no code with any. The scalar of the forward functions is a
// template parameter so that tests can differentiate them by complex step.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <optional>

namespace rewy::reference {

inline double log1p_of(double x) {
  return std::log1p(x);
}
inline std::complex<double> log1p_of(std::complex<double> x) {
  return {0.5 * std::log1p(2 * x.real() + std::norm(x)), std::atan2(x.imag(), 1 + x.real())};
}
inline bool is_positive(double x) {
  return x > 0;
}
inline bool is_positive(std::complex<double> x) {
  return x.real() > 0;
}

/// log(1 + e^x), by the side on which the exponential stays at most 1.
template <class Real>
Real softplus(Real x) {
  return is_positive(x) ? x + log1p_of(std::exp(-x)) : log1p_of(std::exp(x));
}

/// 1 / (1 + e^-x)
template <class Real>
Real sigmoid(Real x) {
  if (is_positive(x)) return 1.0 / (1.0 + std::exp(-x));
  const Real e = std::exp(x);
  return e / (1.0 + e);
}

/// sigmoid(x) (1 - sigmoid(x)), without the difference.
inline double sigmoid_derivative(double x) {
  const double e = std::exp(-std::abs(x));
  return e / ((1 + e) * (1 + e));
}

/// rate: exp(A_log).
template <class Real>
Real log_decay(Real raw, Real bias, Real rate, std::optional<double> lower_bound) {
  const Real x = raw + bias;
  return lower_bound ? *lower_bound * sigmoid(rate * x) : -rate * softplus(x);
}

/// d raw, which is d bias too, and d A_log.
struct GateGradient {
  double raw, A_log;
};

/// d * value, and 0 where d is 0 whatever the value is. A gradient of exactly 0 gives exactly 0: where g is -inf, the
/// decay that forgets everything, and in rows that nothing reads, which may hold anything.
inline double times_unless_zero(double d, double value) {
  return d == 0 ? 0 : d * value;
}

inline GateGradient log_decay_gradient(double raw, double bias, double rate, std::optional<double> lower_bound,
                                       double dg) {
  const double x = raw + bias;
  if (!lower_bound) {
    return {times_unless_zero(dg, -rate * sigmoid(x)), times_unless_zero(dg, -rate * softplus(x))};
  }
  const double dz = times_unless_zero(dg * *lower_bound, sigmoid_derivative(rate * x));  // z = rate * x
  return {times_unless_zero(dz, rate), times_unless_zero(dz, rate * x)};
}

/// factor: 1, or 2 where beta may exceed 1.
template <class Real>
Real strength(Real raw, double factor) {
  return factor * sigmoid(raw);
}
inline double strength_gradient(double raw, double factor, double dbeta) {
  return times_unless_zero(dbeta * factor, sigmoid_derivative(raw));
}

/// x [K] -> y [K], and 1 / sqrt(sum x^2 + epsilon).
template <class Real>
Real normalise(std::int64_t K, const Real* x, double epsilon, Real* y) {
  Real sum = 0;
  for (std::int64_t i = 0; i < K; ++i) sum += x[i] * x[i];
  const Real rstd = 1.0 / std::sqrt(sum + epsilon);
  for (std::int64_t i = 0; i < K; ++i) y[i] = x[i] * rstd;
  return rstd;
}

/// x, dy [K] -> dx [K].
inline void normalise_gradient(std::int64_t K, const double* x, double rstd, const double* dy, double* dx) {
  double along = 0;  // <dy, y>
  for (std::int64_t i = 0; i < K; ++i) along += times_unless_zero(dy[i], x[i] * rstd);
  for (std::int64_t i = 0; i < K; ++i) {
    dx[i] = times_unless_zero(dy[i] - times_unless_zero(along, x[i] * rstd), rstd);
  }
}

}  // namespace rewy::reference
