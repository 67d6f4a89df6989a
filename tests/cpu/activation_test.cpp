// Activations on the CPU backend. Values, gradients, strides and threads against the reference are the property
// "activation" (tools/activations.h); here the numbers at the ends of the ranges, every instruction set, and memory.
#include "rewy/activation.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <vector>

#include "activations.h"
#include "cpu/stages.h"

namespace rewy::tool {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TensorView view(std::vector<float>& x, std::initializer_list<std::int64_t> shape) {
  return {x.data(), DType::kF32, shape};
}

/// One token of a scalar gate with a head for each raw number.
struct Gates {
  std::vector<float> raw, A_log, g, d_raw, d_A_log;

  Gates(std::vector<float> raw_, float A, std::optional<double> lower_bound, float dg = 1)
      : raw(std::move(raw_)), A_log(raw.size(), A), g(raw.size()), d_raw(raw.size()), d_A_log(raw.size()) {
    const auto n = static_cast<std::int64_t>(raw.size());
    const Activation a{.T = 1, .HV = n, .gate = Gate::kScalar, .lower_bound = lower_bound};
    std::vector<float> d(raw.size(), dg);
    const ActivationInputs in{.raw_g = view(raw, {1, 1, n}), .A_log = view(A_log, {n})};
    Execution execution{.backend = Backend::kCpu};
    activate(a, {.in = in, .g = view(g, {1, 1, n})}, execution);
    alignas(64) static std::byte memory[4096];
    execution.workspace = memory;
    activate_backward(
        a, {.in = in, .dg = view(d, {1, 1, n}), .d_raw_g = view(d_raw, {1, 1, n}), .d_A_log = view(d_A_log, {n})},
        execution);
  }
};

TEST(CpuActivation, GatesAtTheEndsOfTheRange) {
  for (const float A : {-20.0f, -3.0f, 0.0f, 3.0f, 10.0f}) {
    const std::vector<float> raw{200, -200, 0, 88, -88, -103, 17, -17, 1e-30f, -1e-30f, 3e38f, -3e38f};
    const double rate = std::exp(static_cast<double>(A));
    const Gates soft(raw, A, {});
    const Gates bounded(raw, A, -5.0);
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const double x = raw[i], z = rate * x;
      const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
      const auto sigmoid = [](double y) { return y > 0 ? 1 / (1 + std::exp(-y)) : std::exp(y) / (1 + std::exp(y)); };
      const auto near = [&](float actual, double expected, double argument) {
        if (expected > std::numeric_limits<float>::max()) expected = kInfinity;
        if (-expected > std::numeric_limits<float>::max()) expected = -kInfinity;
        if (actual == expected) return;
        // A few roundings, that of the exponential's argument, and FP32's subnormal numbers.
        const double allowed = (8 + 2 * std::min(std::abs(argument), 200.0)) * 0x1p-24;
        EXPECT_NEAR(actual, expected, allowed * std::abs(expected) + (1 + rate) * 0x1p-125) << raw[i] << ' ' << A;
      };
      near(soft.g[i], -rate * softplus, x);
      near(soft.d_raw[i], -rate * sigmoid(x), x);
      near(soft.d_A_log[i], -rate * softplus, x);
      near(bounded.g[i], -5 * sigmoid(z), z);
      const double slope = sigmoid(z) * sigmoid(-z);
      near(bounded.d_raw[i], -5 * slope * rate, z);
      // The derivative's underflow comes before the argument is multiplied to it.
      if (std::abs(z) < 80) near(bounded.d_A_log[i], -5 * slope * z, z);
    }
  }
}

TEST(CpuActivation, InfiniteRawGates) {
  for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
    const Gates closed({-kInfinity}, 1, bound);
    EXPECT_EQ(closed.g[0], 0);
    EXPECT_EQ(closed.d_raw[0], 0);
    EXPECT_EQ(closed.d_A_log[0], 0);
    const Gates nan({kNan, 1}, 1, bound);
    EXPECT_TRUE(std::isnan(nan.g[0]) && std::isnan(nan.d_raw[0]) && std::isnan(nan.d_A_log[0]));
    EXPECT_TRUE(std::isfinite(nan.g[1]) && std::isfinite(nan.d_raw[1]) && std::isfinite(nan.d_A_log[1]));
  }
  // A decay of -inf is a reset, whose gradient is 0: nothing of it is NaN.
  const Gates reset({kInfinity}, 1, {}, 0);
  EXPECT_EQ(reset.g[0], -kInfinity);
  EXPECT_EQ(reset.d_raw[0], 0);
  EXPECT_EQ(reset.d_A_log[0], 0);
  EXPECT_EQ(Gates({kInfinity}, 1, -5.0).g[0], -5);
}

// exp(A_log) beyond FP32, where the gate is open, closed, at x = 0 and infinite: never 0 times infinity.
TEST(CpuActivation, RatesBeyondTheRange) {
  const std::vector<float> raw{-kInfinity, -200, -103, -50, -1e-30f, 0, 1e-30f, 50, 200};
  for (const float A : {88.73f, 100.0f, 3e38f, kInfinity}) {
    for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
      for (const float dg : {0.0f, 1e-3f}) {
        const Gates gates(raw, A, bound, dg);
        for (std::size_t i = 0; i < raw.size(); ++i) {
          EXPECT_FALSE(std::isnan(gates.g[i]) || std::isnan(gates.d_raw[i]) || std::isnan(gates.d_A_log[i]))
              << raw[i] << ' ' << A;
        }
        EXPECT_EQ(gates.g.front(), 0);
        EXPECT_EQ(gates.g.back(), bound ? -5 : -kInfinity);
        EXPECT_EQ(gates.d_raw.front(), 0);
      }
    }
  }
}

TEST(CpuActivation, DeclinesABoundBeyondTheRange) {
  Activation a{.T = 1, .gate = Gate::kScalar, .lower_bound = -1e39};
  const auto backend = [&] { return explain(a, Direction::kForward, {}).backend; };
  EXPECT_EQ(backend(), "reference");
  a.lower_bound = -3e38;
  EXPECT_EQ(backend(), "cpu");
}

TEST(CpuActivation, StrengthsReachTheirEnds) {
  std::vector<float> raw{200, -200, 0, kInfinity, -kInfinity, kNan}, beta(6), dbeta(6, 1), d_raw(6);
  const Activation a{.T = 1, .HV = 6, .strength = true, .allow_negative_eigenvalues = true};
  const ActivationInputs in{.raw_beta = view(raw, {1, 1, 6})};
  activate(a, {.in = in, .beta = view(beta, {1, 1, 6})}, {});
  activate_backward(a, {.in = in, .dbeta = view(dbeta, {1, 1, 6}), .d_raw_beta = view(d_raw, {1, 1, 6})}, {});
  EXPECT_EQ(beta[0], 2);
  EXPECT_EQ(beta[1], 0);  // e^-200 is none of FP32's numbers
  EXPECT_EQ(beta[2], 1);
  EXPECT_EQ(beta[3], 2);
  EXPECT_EQ(beta[4], 0);
  EXPECT_TRUE(std::isnan(beta[5]) && std::isnan(d_raw[5]));
  EXPECT_EQ(d_raw[2], 0.5f);
  for (const int i : {0, 1, 3, 4}) EXPECT_EQ(d_raw[static_cast<std::size_t>(i)], 0);
}

TEST(CpuActivation, ZeroRowsHaveTheGradientOfEpsilon) {
  std::vector<float> x(16), y(16, 7), rstd(2), dy(16), dx(16);
  for (std::size_t i = 0; i < 16; ++i) dy[i] = static_cast<float>(i) - 3;
  for (std::size_t i = 8; i < 16; ++i) x[i] = 1e-41f;  // subnormal, kept
  const Activation a{.T = 2, .K = 8, .normalise = true};
  const TensorView raw = view(x, {1, 2, 1, 8});
  std::vector<float> k(16), k_rstd(2);
  activate(a,
           {.in = {.raw_q = raw, .raw_k = raw},
            .q = view(y, {1, 2, 1, 8}),
            .k = view(k, {1, 2, 1, 8}),
            .q_rstd = view(rstd, {1, 2, 1}),
            .k_rstd = view(k_rstd, {1, 2, 1})},
           {});
  activate_backward(a,
                    {.in = {.raw_q = raw},
                     .q_rstd = view(rstd, {1, 2, 1}),
                     .dq = view(dy, {1, 2, 1, 8}),
                     .d_raw_q = view(dx, {1, 2, 1, 8})},
                    {});
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_FLOAT_EQ(dx[i], 1000 * dy[i]);
    EXPECT_FLOAT_EQ(y[i], 1000 * x[i]);
  }
  EXPECT_FLOAT_EQ(rstd[0], 1000);
}

TEST(CpuActivation, EveryInstructionSet) {
  const auto usable = static_cast<std::uint64_t>(hwy::SupportedTargets());
  int sets = 0;
  for (std::uint64_t rest = usable; rest != 0; rest &= rest - 1) {
    const auto target = static_cast<std::int64_t>(rest & ~(rest - 1));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    const std::string name = cpu::instruction_set();
    if (name != hwy::TargetName(target)) continue;  // one this build leaves out
    ++sets;
    for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const Gate gate : {Gate::kScalar, Gate::kVector}) {
        for (const bool bounded : {false, true}) {
          ActivationCase c;
          c.activation = {.B = 2, .T = 70, .H = 2, .HV = 3, .K = 40, .normalise = true, .dtype = t, .gate = gate};
          c.activation.gate_dtype = c.activation.strength_dtype = c.activation.beta_dtype = t;
          c.activation.strength = true;
          if (bounded) c.activation.lower_bound = -5.0;
          const ActivationData data = make_activation_data(c);
          EXPECT_EQ(
              first_failure(run_activation(data, {.backend = Backend::kCpu, .threads = 2}), expect_activation(data)),
              "")
              << name;
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_GE(sets, 1);
}

// Worker threads have the default floating-point state; the caller's must not differ from it, and stays as it is.
TEST(CpuActivation, RoundingModeOfTheCallerChangesNothing) {
  ActivationCase c;
  c.activation = {.T = 200, .HV = 2, .K = 32, .normalise = true, .gate = Gate::kVector, .strength = true};
  const ActivationData data = make_activation_data(c);
  const std::vector<Output> want = run_activation(data, {.backend = Backend::kCpu, .threads = 3});
  std::fesetround(FE_TOWARDZERO);
  const std::vector<Output> got = run_activation(data, {.backend = Backend::kCpu, .threads = 1});
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(mode, FE_TOWARDZERO);
  for (std::size_t i = 0; i < want.size(); ++i) {
    const auto difference = first_difference(want[i].tensor.view, got[i].tensor.view);
    EXPECT_FALSE(difference) << want[i].name << ": " << *difference;
  }
}

// Every second number of a longer vector, last to first.
TEST(CpuActivation, ParametersOfAnyStride) {
  const Activation a{.T = 3, .HV = 2, .K = 4, .gate = Gate::kVector};
  std::vector<float> raw(24, 0.5f), dg(24, 1), g(24), g_dense(24);
  const auto run = [&](std::int64_t stride, std::vector<float>& result) {
    const auto spread = [&](std::vector<float>& memory, std::int64_t count) {
      memory.assign(static_cast<std::size_t>(std::abs(stride) * count), kNan);
      const std::int64_t shape[] = {count}, strides[] = {stride};
      return TensorView(memory.data() + (stride < 0 ? -stride * (count - 1) : 0), DType::kF32, shape, strides);
    };
    std::vector<float> memory[4];
    const TensorView A_log = spread(memory[0], 2), dt_bias = spread(memory[1], 8);
    const TensorView d_A_log = spread(memory[2], 2), d_dt_bias = spread(memory[3], 8);
    for_each(A_log, [&](std::byte* at, const Index& i, std::int64_t) {
      store_element(at, DType::kF32, 0.25 * static_cast<double>(i[0]));
    });
    for_each(dt_bias, [&](std::byte* at, const Index& i, std::int64_t) {
      store_element(at, DType::kF32, 0.5 * static_cast<double>(i[0]));
    });
    alignas(64) static std::byte workspace[4096];
    const Execution execution{.backend = Backend::kCpu, .workspace = workspace};
    const ActivationInputs in{.raw_g = view(raw, {1, 3, 2, 4}), .A_log = A_log, .dt_bias = dt_bias};
    activate(a, {.in = in, .g = view(result, {1, 3, 2, 4})}, execution);
    activate_backward(a, {.in = in, .dg = view(dg, {1, 3, 2, 4}), .d_A_log = d_A_log, .d_dt_bias = d_dt_bias},
                      execution);
    std::vector<double> sums = values(d_A_log);
    for (const double d : values(d_dt_bias)) sums.push_back(d);
    return sums;
  };
  const std::vector<double> dense = run(1, g_dense);
  EXPECT_EQ(run(-2, g), dense);
  EXPECT_EQ(g, g_dense);
}

TEST(CpuActivation, SumsOfAHundredThousandTokens) {
  // All terms alike, so that what rounds one addition rounds them all: one by one in FP32 it would be 1e-3.
  const Activation a{.T = 100'000, .K = 8, .gate = Gate::kVector};
  const std::int64_t count = a.T * a.K;
  std::vector<float> raw(static_cast<std::size_t>(count), 0.3f), dg(raw.size(), 1), A_log(1), bias(8), d_A(1),
      d_bias(8);
  Execution execution;
  std::vector<std::byte> memory(activation_workspace_bytes(a, Direction::kBackward) + 64);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  execution.workspace = std::span(memory).subspan((64 - past) % 64);
  activate_backward(a,
                    {.in = {.raw_g = view(raw, {1, a.T, 1, 8}), .A_log = view(A_log, {1}), .dt_bias = view(bias, {8})},
                     .dg = view(dg, {1, a.T, 1, 8}),
                     .d_A_log = view(d_A, {1}),
                     .d_dt_bias = view(d_bias, {8})},
                    execution);
  const double x = 0.3f, n = static_cast<double>(a.T);
  for (const float d : d_bias) EXPECT_NEAR(d / (-n / (1 + std::exp(-x))), 1, 70 * 0x1p-24);  // 64 tokens of a tile
  EXPECT_NEAR(d_A[0] / (-8 * n * std::log1p(std::exp(x))), 1, 70 * 0x1p-24);
}

}  // namespace
}  // namespace rewy::tool
