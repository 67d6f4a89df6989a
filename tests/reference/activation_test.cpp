// The reference's activations: values by hand, and gradients against complex step through the forward functions.
#include "reference/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <limits>
#include <optional>
#include <vector>

#include "rewy/activation.h"

namespace rewy::reference {
namespace {

using Complex = std::complex<double>;
constexpr double kStep = 1e-100;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFew = 1e-14;  // relative: a few dozen roundings of FP64

void expect_close(double actual, double expected, double allowed = kFew) {
  EXPECT_NEAR(actual, expected, allowed * std::abs(expected) + 1e-300);
}

TEST(ReferenceActivation, FunctionsAtBothEnds) {
  EXPECT_EQ(softplus(0.0), std::log(2.0));
  EXPECT_EQ(softplus(200.0), 200.0);
  EXPECT_EQ(softplus(-200.0), std::exp(-200.0));
  EXPECT_EQ(softplus(-kInfinity), 0.0);
  EXPECT_EQ(softplus(kInfinity), kInfinity);
  expect_close(softplus(-30.0), std::exp(-30.0) - std::exp(-60.0) / 2);
  EXPECT_EQ(sigmoid(0.0), 0.5);
  EXPECT_EQ(sigmoid(-kInfinity), 0.0);
  EXPECT_EQ(sigmoid(kInfinity), 1.0);
  expect_close(sigmoid(-200.0), std::exp(-200.0));
  EXPECT_EQ(sigmoid_derivative(0.0), 0.25);
  expect_close(sigmoid_derivative(40.0), std::exp(-40.0));
  EXPECT_EQ(sigmoid_derivative(-40.0), sigmoid_derivative(40.0));
  EXPECT_EQ(sigmoid_derivative(kInfinity), 0.0);
}

TEST(ReferenceActivation, GateGradientsByComplexStep) {
  for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0), std::optional(-0.3)}) {
    for (const double A_log : {-20.0, -1.0, 0.0, 1.5, 10.0}) {
      for (const double raw : {-200.0, -40.0, -3.0, -1e-9, 0.0, 0.7, 12.0, 200.0}) {
        const double bias = 0.25, dg = -1.75, rate = std::exp(A_log);
        const GateGradient d = log_decay_gradient(raw, bias, rate, bound, dg);
        const Complex by_raw = log_decay(Complex(raw, kStep), Complex(bias), Complex(rate), bound);
        const Complex by_bias = log_decay(Complex(raw), Complex(bias, kStep), Complex(rate), bound);
        const Complex by_A = log_decay(Complex(raw), Complex(bias), std::exp(Complex(A_log, kStep)), bound);
        // The argument of a sigmoid reaches 4e6 here, with the rounding of such a number.
        const double allowed = kFew * (1 + (bound ? rate : 1) * std::abs(raw));
        expect_close(d.raw, dg * by_raw.imag() / kStep, allowed);
        expect_close(d.raw, dg * by_bias.imag() / kStep, allowed);
        expect_close(d.A_log, dg * by_A.imag() / kStep, allowed);
        expect_close(log_decay(raw, bias, rate, bound), by_raw.real(), allowed);
      }
    }
  }
}

TEST(ReferenceActivation, NothingComesBackFromAReset) {
  // g = -inf forgets the state, and its gradient is 0.
  const GateGradient at_reset = log_decay_gradient(kInfinity, 0, 1, {}, 0);
  EXPECT_EQ(at_reset.raw, 0);
  EXPECT_EQ(at_reset.A_log, 0);
  for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
    const GateGradient closed = log_decay_gradient(-kInfinity, 0, 1, bound, 3);
    EXPECT_EQ(closed.raw, 0);
    EXPECT_EQ(closed.A_log, 0);
  }
}

TEST(ReferenceActivation, StrengthGradientByComplexStep) {
  for (const double factor : {1.0, 2.0}) {
    for (const double raw : {-200.0, -5.0, 0.0, 0.3, 30.0}) {
      expect_close(strength_gradient(raw, factor, 0.6), 0.6 * strength(Complex(raw, kStep), factor).imag() / kStep,
                   kFew * (1 + std::abs(raw)));
    }
  }
  EXPECT_EQ(strength(0.0, 2.0), 1.0);
}

TEST(ReferenceActivation, NormGradientByComplexStep) {
  for (const double size : {0.0, 1e-4, 1.0, 1e3}) {  // below, about and above the root of epsilon
    const std::vector<double> x{0.3 * size, -0.8 * size, 0, 1.1 * size, 0.05 * size}, dy{0.5, 1, -2, 0.25, -0.125};
    const auto K = static_cast<std::int64_t>(x.size());
    std::vector<double> y(x.size()), dx(x.size());
    const double rstd = normalise(K, x.data(), kNormEpsilon, y.data());
    if (size == 0) expect_close(rstd, 1000);
    normalise_gradient(K, x.data(), rstd, dy.data(), dx.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      std::vector<Complex> moved(x.begin(), x.end()), result(x.size());
      moved[i] += Complex(0, kStep);
      normalise(K, moved.data(), kNormEpsilon, result.data());
      double expected = 0;
      for (std::size_t j = 0; j < x.size(); ++j) expected += dy[j] * result[j].imag() / kStep;
      EXPECT_NEAR(dx[i], expected, 1e-14 * rstd * 4);
    }
  }
}

TEST(ReferenceActivation, NothingComesBackFromRowsThatAreNotRead) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double x : {nan, kInfinity, -kInfinity}) {
    for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
      const GateGradient gate = log_decay_gradient(x, 0, 1, bound, 0);
      EXPECT_EQ(gate.raw, 0);
      EXPECT_EQ(gate.A_log, 0);
    }
    EXPECT_EQ(strength_gradient(x, 2, 0), 0);
    const double row[] = {x, 1}, zeros[] = {0, 0};
    double y[2], dx[2] = {nan, nan};
    normalise_gradient(2, row, normalise(2, row, kNormEpsilon, y), zeros, dx);
    EXPECT_EQ(dx[0], 0);
    EXPECT_EQ(dx[1], 0);
  }
}

// The backend around the functions: whole calls with every tensor strided are tests/cpu's; here the sums.
TEST(ReferenceActivation, SumsOverBatchAndTokens) {
  const Activation a{.B = 2, .T = 3, .HV = 2, .K = 2, .gate = Gate::kVector, .gate_dtype = DType::kF64};
  std::vector<double> raw(24), dg(24), A_log{0.5, -0.5}, bias{0.1, 0.2, 0.3, 0.4}, d_A(2), d_bias(4), d_raw(24);
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = std::sin(double(i)), dg[i] = std::cos(3.0 * double(i));
  const auto gate = [&](std::vector<double>& x) { return TensorView(x.data(), DType::kF64, {2, 3, 2, 2}); };
  const auto vector = [](std::vector<double>& x) {
    return TensorView(x.data(), DType::kF64, {static_cast<std::int64_t>(x.size())});
  };
  activate_backward(a,
                    {.in = {.raw_g = gate(raw), .A_log = vector(A_log), .dt_bias = vector(bias)},
                     .dg = gate(dg),
                     .d_raw_g = gate(d_raw),
                     .d_A_log = vector(d_A),
                     .d_dt_bias = vector(d_bias)},
                    {});
  // The loss sum dg * g, by complex step through each parameter.
  const auto loss = [&](int which_A, int which_bias) {
    Complex sum = 0;
    for (int i = 0; i < 24; ++i) {
      const int head = i / 2 % 2, column = i % 4;
      const Complex rate = std::exp(Complex(A_log[std::size_t(head)], head == which_A ? kStep : 0));
      const Complex b(bias[std::size_t(column)], column == which_bias ? kStep : 0);
      sum += dg[std::size_t(i)] * log_decay(Complex(raw[std::size_t(i)]), b, rate, {});
    }
    return sum.imag() / kStep;
  };
  for (int head = 0; head < 2; ++head) EXPECT_NEAR(d_A[std::size_t(head)], loss(head, -1), 1e-14);
  for (int column = 0; column < 4; ++column) EXPECT_NEAR(d_bias[std::size_t(column)], loss(-1, column), 1e-14);
}

}  // namespace
}  // namespace rewy::reference
