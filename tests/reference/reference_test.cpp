// The FP64 reference against derivatives that share no code with its backward: complex step through the forward
// recurrence, and finite differences through the public interface. Then cases small enough to do by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <new>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "reference/recurrence.h"
#include "rewy/rewy.h"

namespace rewy {
namespace {

using Complex = std::complex<double>;
using Shape = std::vector<std::int64_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Operator kOperators[] = {Operator::kDeltaNet, Operator::kGdn, Operator::kKda, Operator::kGdn2};

/// A problem with its offsets (packed) and whether it has states.
struct Case {
  Problem p;
  std::vector<std::int64_t> offsets{};
  bool states = true;

  std::int64_t begin(std::int64_t sequence) const { return p.segments ? offsets[sequence] : sequence * p.T; }
  std::int64_t end(std::int64_t sequence) const { return p.segments ? offsets[sequence + 1] : (sequence + 1) * p.T; }
};

/// The differentiable inputs, each contiguous in its public shape.
enum Input { kQ, kK, kV, kG, kBeta, kB, kW, kH0, kInputs };
constexpr const char* kNames[kInputs] = {"q", "k", "v", "g", "beta", "b", "w", "initial_state"};

template <class Real>
using Values = std::array<std::vector<Real>, kInputs>;

/// Empty where the case has no such input.
Shape shape_of(const Case& c, int input) {
  const Problem& p = c.p;
  const bool shared = strength_of(p.op) == Strength::kShared;
  const Shape none;
  switch (input) {
    case kQ:
    case kK: return {p.B, p.T, p.H, p.K};
    case kV: return {p.B, p.T, p.HV, p.V};
    case kG:
      if (gate_of(p.op) == Gate::kNone) return none;
      return gate_of(p.op) == Gate::kScalar ? Shape{p.B, p.T, p.HV} : Shape{p.B, p.T, p.HV, p.K};
    case kBeta: return shared ? Shape{p.B, p.T, p.HV} : none;
    case kB: return shared ? none : Shape{p.B, p.T, p.HV, p.K};
    case kW: return shared ? none : Shape{p.B, p.T, p.HV, p.V};
    case kH0: {
      if (!c.states) return none;
      const bool kv = p.state_layout == StateLayout::kKV;
      return {p.sequences(), p.HV, kv ? p.K : p.V, kv ? p.V : p.K};
    }
  }
  return none;
}

std::size_t count(const Shape& shape) {
  if (shape.empty()) return 0;
  std::size_t n = 1;
  for (std::int64_t extent : shape) n *= static_cast<std::size_t>(extent);
  return n;
}

std::vector<double> uniform(std::mt19937_64& random, std::size_t n, double low, double high) {
  std::uniform_real_distribution<double> distribution(low, high);
  std::vector<double> values(n);
  for (double& x : values) x = distribution(random);
  return values;
}

/// Keys of about unit length; every third strength is zero, where a division by beta would show.
Values<double> random_inputs(const Case& c, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Values<double> x;
  for (int input = 0; input < kInputs; ++input) {
    const std::size_t n = count(shape_of(c, input));
    const double unit = std::sqrt(3.0 / static_cast<double>(c.p.K));
    if (input == kK) {
      x[input] = uniform(random, n, -unit, unit);
    } else if (input == kG) {
      x[input] = uniform(random, n, -0.6, 0);
    } else if (input == kBeta || input == kB || input == kW) {
      x[input] = uniform(random, n, 0.05, 1);
      for (std::size_t i = 0; i < n; i += 3) x[input][i] = 0;
    } else {
      x[input] = uniform(random, n, -1, 1);
    }
  }
  return x;
}

/// What the loss is linear in: <d_o, o> + <d_final, final state>.
struct Weights {
  std::vector<double> d_o, d_final;
  Weights(const Case& c, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    d_o = uniform(random, count(shape_of(c, kV)), -1, 1);
    d_final = uniform(random, count(shape_of(c, kH0)), -1, 1);
  }
};

/// One head's inputs as the recurrence takes them. Scalars are repeated over the features here, independently of the
/// backend's adapter.
template <class Real>
struct Head {
  std::int64_t tokens, K, V;
  double scale;
  std::vector<Real> q, k, v, g, b, w, state;

  Head(const Case& c, const Values<Real>& x, std::int64_t sequence, std::int64_t hv)
      : tokens(c.end(sequence) - c.begin(sequence)),
        K(c.p.K),
        V(c.p.V),
        scale(c.p.query_scale()),
        state(c.p.K * c.p.V, Real(0)) {
    const Problem& p = c.p;
    const std::int64_t query_head = hv / (p.HV / p.H);
    for (std::int64_t row = c.begin(sequence); row < c.end(sequence); ++row) {
      const std::int64_t at_query = row * p.H + query_head, at_value = row * p.HV + hv;
      for (std::int64_t i = 0; i < K; ++i) {
        q.push_back(x[kQ][at_query * K + i]);
        k.push_back(x[kK][at_query * K + i]);
        g.push_back(gate_of(p.op) == Gate::kNone     ? Real(0)
                    : gate_of(p.op) == Gate::kScalar ? x[kG][at_value]
                                                     : x[kG][at_value * K + i]);
        b.push_back(strength_of(p.op) == Strength::kShared ? x[kBeta][at_value] : x[kB][at_value * K + i]);
      }
      for (std::int64_t j = 0; j < V; ++j) {
        v.push_back(x[kV][at_value * V + j]);
        w.push_back(strength_of(p.op) == Strength::kShared ? x[kBeta][at_value] : x[kW][at_value * V + j]);
      }
    }
    for (std::int64_t i = 0; c.states && i < K * V; ++i) state[i] = x[kH0][state_index(c, sequence, hv, i)];
  }

  /// Where element i of a [K, V] state lies in the public tensor.
  static std::int64_t state_index(const Case& c, std::int64_t sequence, std::int64_t hv, std::int64_t i) {
    const Problem& p = c.p;
    const std::int64_t first = (sequence * p.HV + hv) * p.K * p.V;
    return first + (p.state_layout == StateLayout::kKV ? i : i % p.V * p.K + i / p.V);
  }

  reference::HeadInputs<Real> inputs() const {
    return {tokens, K, V, scale, q.data(), k.data(), v.data(), g.data(), b.data(), w.data()};
  }
};

template <class Real>
Real loss(const Case& c, const Values<Real>& x, const Weights& weights) {
  Real sum(0);
  for (std::int64_t sequence = 0; sequence < c.p.sequences(); ++sequence) {
    for (std::int64_t hv = 0; hv < c.p.HV; ++hv) {
      Head<Real> head(c, x, sequence, hv);
      std::vector<Real> o(head.tokens * c.p.V), r(c.p.V);
      reference::forward_head(head.inputs(), head.state.data(), o.data(), r.data());
      for (std::int64_t i = 0; i < head.tokens * c.p.V; ++i) {
        const std::int64_t row = c.begin(sequence) + i / c.p.V;
        sum += o[i] * weights.d_o[(row * c.p.HV + hv) * c.p.V + i % c.p.V];
      }
      for (std::int64_t i = 0; c.states && i < c.p.K * c.p.V; ++i) {
        sum += head.state[i] * weights.d_final[Head<Real>::state_index(c, sequence, hv, i)];
      }
    }
  }
  return sum;
}

/// d loss / d x for every element of every input: Im loss(x + i h) / h, which cancels nothing.
Values<double> complex_step(const Case& c, const Values<double>& x, const Weights& weights) {
  constexpr double kStep = 1e-100;
  Values<Complex> z;
  for (int input = 0; input < kInputs; ++input) z[input].assign(x[input].begin(), x[input].end());
  Values<double> gradient;
  for (int input = 0; input < kInputs; ++input) {
    for (Complex& element : z[input]) {
      const Complex was = element;
      element += Complex(0, kStep);
      gradient[input].push_back(loss(c, z, weights).imag() / kStep);
      element = was;
    }
  }
  return gradient;
}

/// Relative L2 error; absolute where the reference is zero.
double error(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(norm == 0 ? difference : difference / norm);
}

void expect_close(const Values<double>& got, const Values<double>& want, double tolerance) {
  for (int input = 0; input < kInputs; ++input) {
    SCOPED_TRACE(kNames[input]);
    EXPECT_LT(error(got[input], want[input]), tolerance);
  }
}

/// 64-byte aligned memory for a workspace, filled with NaNs: contents before a call mean nothing.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes), data_(::operator new(bytes + 64, std::align_val_t(64))) {
    std::fill_n(static_cast<unsigned char*>(data_), bytes, static_cast<unsigned char>(0xff));
  }
  ~Memory() { ::operator delete(data_, std::align_val_t(64)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::span<std::byte> span() const { return {static_cast<std::byte*>(data_), bytes_}; }

 private:
  std::size_t bytes_;
  void* data_;
};

Execution on_reference(int threads = 0) {
  Execution execution;
  execution.backend = Backend::kReference;
  execution.threads = threads;
  return execution;
}

void run_forward(const Problem& p, const ForwardArgs& args, int threads = 0) {
  Execution execution = on_reference(threads);
  const Bytes bytes = workspace_bytes(p, Direction::kForward, execution);
  EXPECT_EQ(bytes.saved, 0u);
  const Memory memory(bytes.workspace);
  execution.workspace = memory.span();
  forward(p, args, execution);
}

void run_backward(const Problem& p, const BackwardArgs& args, int threads = 0) {
  Execution execution = on_reference(threads);
  const Memory memory(workspace_bytes(p, Direction::kBackward, execution).workspace);
  execution.workspace = memory.span();
  backward(p, args, execution);
}

TensorView view(const std::vector<double>& data, const Shape& shape) {
  return shape.empty() ? TensorView() : TensorView(data.data(), DType::kF64, std::span(shape));
}

Inputs inputs_of(const Case& c, const Values<double>& x) {
  Inputs in;
  TensorView* views[kInputs] = {&in.q, &in.k, &in.v, &in.g, &in.beta, &in.b, &in.w, &in.initial_state};
  for (int input = 0; input < kInputs; ++input) *views[input] = view(x[input], shape_of(c, input));
  if (c.p.segments) in.cu_seqlens = TensorView(c.offsets.data(), DType::kI64, {*c.p.segments + 1});
  return in;
}

struct Outputs {
  std::vector<double> o, final_state;
};

/// Outputs start as NaN, so that an element nobody writes shows.
Outputs public_forward(const Case& c, const Values<double>& x, int threads = 0) {
  Outputs out{std::vector<double>(count(shape_of(c, kV)), NAN), std::vector<double>(count(shape_of(c, kH0)), NAN)};
  ForwardArgs args;
  args.in = inputs_of(c, x);
  args.o = view(out.o, shape_of(c, kV));
  args.final_state = view(out.final_state, shape_of(c, kH0));
  run_forward(c.p, args, threads);
  return out;
}

Values<double> public_backward(const Case& c, const Values<double>& x, const Weights& weights, int threads = 0) {
  Values<double> d;
  BackwardArgs args;
  args.in = inputs_of(c, x);
  args.d_o = view(weights.d_o, shape_of(c, kV));
  args.d_final_state = view(weights.d_final, shape_of(c, kH0));
  TensorView* views[kInputs] = {&args.dq,    &args.dk, &args.dv, &args.dg,
                                &args.dbeta, &args.db, &args.dw, &args.d_initial_state};
  for (int input = 0; input < kInputs; ++input) {
    d[input].assign(count(shape_of(c, input)), NAN);
    *views[input] = view(d[input], shape_of(c, input));
  }
  run_backward(c.p, args, threads);
  return d;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Central differences of the public forward.
Values<double> finite_differences(const Case& c, Values<double> x, const Weights& weights) {
  constexpr double kStep = 1e-5;
  const auto value = [&] {
    const Outputs out = public_forward(c, x, 1);
    return dot(out.o, weights.d_o) + dot(out.final_state, weights.d_final);
  };
  Values<double> gradient;
  for (int input = 0; input < kInputs; ++input) {
    for (double& element : x[input]) {
      const double was = element;
      element = was + kStep;
      const double above = value();
      element = was - kStep;
      gradient[input].push_back((above - value()) / (2 * kStep));
      element = was;
    }
  }
  return gradient;
}

/// Grouped heads, the other state layout, and empty segments first, in the middle and last, before unused rows.
Case packed_case(Operator op) {
  Case c{{.op = op, .T = 12, .H = 2, .HV = 6, .K = 3, .V = 4, .segments = 7}, {0, 0, 4, 4, 5, 10, 10, 10}};
  c.p.dtype = c.p.strength_dtype = DType::kF64;
  c.p.state_layout = StateLayout::kVK;
  return c;
}

Case batch_case(Operator op) {
  Case c{{.op = op, .B = 2, .T = 5, .H = 1, .HV = 2, .K = 4, .V = 3}};
  c.p.dtype = c.p.strength_dtype = DType::kF64;
  c.p.scale = 0.7;
  return c;
}

class EveryOperator : public testing::TestWithParam<Operator> {};
INSTANTIATE_TEST_SUITE_P(Reference, EveryOperator, testing::ValuesIn(kOperators),
                         [](const auto& test) { return std::string(name(test.param)); });

// ---- derivatives ---------------------------------------------------------------------------------------------------

// 70 and 130 tokens: one and two segment boundaries of the backward, and a short last segment.
TEST_P(EveryOperator, BackwardHeadMatchesComplexStep) {
  for (std::int64_t T : {1, 64, 70, 130}) {
    SCOPED_TRACE(T);
    Case c{{.op = GetParam(), .T = T, .K = 5, .V = 7}};
    const Values<double> x = random_inputs(c, 1);
    const Weights weights(c, 2);
    const Values<double> want = complex_step(c, x, weights);

    Head<double> head(c, x, 0, 0);
    std::vector<double> d_state = weights.d_final;
    std::vector<double> dq(T * 5), dk(T * 5), dv(T * 7), dg(T * 5), db(T * 5), dw(T * 7);
    std::vector<double> checkpoints(reference::segments_of(T) * 35), states(reference::kSegment * 35);
    std::vector<double> r(reference::kSegment * 7), dr(7);
    reference::backward_head(head.inputs(), weights.d_o.data(), head.state.data(), d_state.data(),
                             {dq.data(), dk.data(), dv.data(), dg.data(), db.data(), dw.data()},
                             {checkpoints.data(), states.data(), r.data(), dr.data()});

    Values<double> got;
    got[kQ] = dq;
    got[kK] = dk;
    got[kV] = dv;
    got[kH0] = d_state;
    const auto row_sum = [](const std::vector<double>& rows, std::int64_t t, std::int64_t width) {
      double sum = 0;
      for (std::int64_t i = 0; i < width; ++i) sum += rows[t * width + i];
      return sum;
    };
    if (gate_of(c.p.op) == Gate::kVector) got[kG] = dg;
    if (gate_of(c.p.op) == Gate::kScalar) {
      for (std::int64_t t = 0; t < T; ++t) got[kG].push_back(row_sum(dg, t, 5));
    }
    if (strength_of(c.p.op) == Strength::kIndependent) {
      got[kB] = db;
      got[kW] = dw;
    } else {
      for (std::int64_t t = 0; t < T; ++t) got[kBeta].push_back(row_sum(db, t, 5) + row_sum(dw, t, 7));
    }
    expect_close(got, want, 1e-12);
  }
}

TEST_P(EveryOperator, PublicBackwardMatchesComplexStep) {
  for (Case c : {packed_case(GetParam()), batch_case(GetParam())}) {
    for (bool states : {true, false}) {
      c.states = states;
      const Values<double> x = random_inputs(c, 3);
      const Weights weights(c, 4);
      expect_close(public_backward(c, x, weights), complex_step(c, x, weights), 1e-12);
    }
  }
}

TEST_P(EveryOperator, PublicBackwardMatchesFiniteDifferences) {
  for (const Case& c : {packed_case(GetParam()), batch_case(GetParam())}) {
    const Values<double> x = random_inputs(c, 5);
    const Weights weights(c, 6);
    expect_close(public_backward(c, x, weights), finite_differences(c, x, weights), 1e-8);
  }
}

// ---- sequences and states -------------------------------------------------------------------------------------------

TEST_P(EveryOperator, EmptySegmentsPassStatesThroughAndUnusedRowsAreZero) {
  const Case c = packed_case(GetParam());
  const Values<double> x = random_inputs(c, 7);
  const Weights weights(c, 8);
  const Outputs out = public_forward(c, x);
  const Values<double> d = public_backward(c, x, weights);
  const std::size_t state = c.p.HV * c.p.K * c.p.V;
  for (std::size_t sequence : {0, 2, 5, 6}) {
    for (std::size_t i = sequence * state; i < (sequence + 1) * state; ++i) {
      EXPECT_EQ(out.final_state[i], x[kH0][i]);
      EXPECT_EQ(d[kH0][i], weights.d_final[i]);
    }
  }
  const auto expect_zero_rows = [&](const std::vector<double>& rows) {
    const std::size_t width = rows.size() / c.p.T;
    for (std::size_t i = 10 * width; i < rows.size(); ++i) EXPECT_EQ(rows[i], 0);
  };
  expect_zero_rows(out.o);
  for (int input = 0; input < kH0; ++input) {
    SCOPED_TRACE(kNames[input]);
    expect_zero_rows(d[input]);
  }
}

TEST_P(EveryOperator, NoTokens) {
  Case c = batch_case(GetParam());
  c.p.T = 0;
  const Values<double> x = random_inputs(c, 9);
  const Weights weights(c, 10);
  EXPECT_EQ(public_forward(c, x).final_state, x[kH0]);
  EXPECT_EQ(public_backward(c, x, weights)[kH0], weights.d_final);

  Case none{c.p, {0}};
  none.p.B = 1;
  none.p.T = 3;
  none.p.segments = 0;
  EXPECT_EQ(public_forward(none, random_inputs(none, 11)).o, std::vector<double>(3 * 2 * 3, 0.0));
}

TEST_P(EveryOperator, ThreadsDoNotChangeABit) {
  const Case c = packed_case(GetParam());
  const Values<double> x = random_inputs(c, 12);
  const Weights weights(c, 13);
  EXPECT_EQ(public_forward(c, x, 1).o, public_forward(c, x, 5).o);
  EXPECT_EQ(public_backward(c, x, weights, 1), public_backward(c, x, weights, 5));
}

TEST_P(EveryOperator, OutputsThatAreNotGivenAreSkipped) {
  const Case c = packed_case(GetParam());
  const Values<double> x = random_inputs(c, 14);
  const Weights weights(c, 15);
  std::vector<double> o(weights.d_o.size()), dk(x[kK].size());
  ForwardArgs ahead;
  ahead.in = inputs_of(c, x);
  ahead.o = view(o, shape_of(c, kV));
  run_forward(c.p, ahead);
  EXPECT_EQ(o, public_forward(c, x).o);

  BackwardArgs back;
  back.in = inputs_of(c, x);
  back.d_o = view(weights.d_o, shape_of(c, kV));
  back.d_final_state = view(weights.d_final, shape_of(c, kH0));
  back.dk = view(dk, shape_of(c, kK));
  run_backward(c.p, back);
  EXPECT_EQ(dk, public_backward(c, x, weights)[kK]);
}

TEST_P(EveryOperator, GradientOfASharedQueryHeadIsTheSumOverItsGroup) {
  Case grouped = packed_case(GetParam());
  const Values<double> x = random_inputs(grouped, 16);
  const Weights weights(grouped, 17);
  const Values<double> d = public_backward(grouped, x, weights);

  // The same with a query head for each value head.
  Case apart = grouped;
  apart.p.H = apart.p.HV;
  Values<double> y = x;
  const std::int64_t T = grouped.p.T, HV = grouped.p.HV, K = grouped.p.K, group = 3;
  for (int input : {kQ, kK}) {
    y[input].clear();
    for (std::int64_t i = 0; i < T * HV * K; ++i) y[input].push_back(x[input][i / (group * K) * K + i % K]);
  }
  const Values<double> e = public_backward(apart, y, weights);
  for (int input : {kQ, kK}) {
    std::vector<double> sum(d[input].size());
    for (std::int64_t i = 0; i < T * HV * K; ++i) sum[i / (group * K) * K + i % K] += e[input][i];
    EXPECT_LT(error(d[input], sum), 1e-14) << kNames[input];
  }
  for (int input : {kV, kG, kBeta, kB, kW, kH0}) EXPECT_EQ(d[input], e[input]) << kNames[input];
}

// ---- by hand -------------------------------------------------------------------------------------------------------

// Two tokens, K = V = 1, scale 1. S1 = 2 after k=1, beta=1, v=2 (S0 = 8 halved, then replaced: beta k.k = 1).
// Token 2: S- = 2 / 4 = 0.5, r = 0.5 * 3 - 0.5 * 0.5 * 2 = 1, S2 = 0.5 + 2 * 1 = 2.5.
TEST(ByHand, ScalarState) {
  Case c{{.op = Operator::kGdn, .T = 2, .K = 1, .V = 1, .dtype = DType::kF64, .strength_dtype = DType::kF64}};
  Values<double> x;
  x[kQ] = {1, -2};
  x[kK] = {1, 2};
  x[kV] = {2, 3};
  x[kG] = {std::log(0.5), std::log(0.25)};
  x[kBeta] = {1, 0.5};
  x[kH0] = {8};
  const Outputs out = public_forward(c, x);
  EXPECT_DOUBLE_EQ(out.o[0], 2);
  EXPECT_DOUBLE_EQ(out.o[1], -5);
  EXPECT_DOUBLE_EQ(out.final_state[0], 2.5);

  // Loss = final state: S2 = a S1 (1 - beta k^2) + beta k v with a = 1/4: factor (1 - 0.5 * 4) = -1.
  Weights weights(c, 0);
  weights.d_o = {0, 0};
  weights.d_final = {1};
  const Values<double> d = public_backward(c, x, weights);
  const double S1 = 2, a = 0.25;
  EXPECT_DOUBLE_EQ(d[kV][1], 0.5 * 2);                      // beta k
  EXPECT_DOUBLE_EQ(d[kBeta][1], -a * S1 * 4 + 2 * 3);       // -a S1 k^2 + k v
  EXPECT_DOUBLE_EQ(d[kK][1], -a * S1 * 0.5 * 4 + 0.5 * 3);  // -2 a S1 beta k + beta v
  EXPECT_DOUBLE_EQ(d[kG][1], -a * S1);                      // a S1 (1 - beta k^2)
  EXPECT_DOUBLE_EQ(d[kV][0], -a);                           // dS1 = -a; S1 = v here
  EXPECT_DOUBLE_EQ(d[kG][0], 0);                            // the first write replaces all that was decayed
  EXPECT_DOUBLE_EQ(d[kH0][0], 0);
  EXPECT_EQ(d[kQ], (std::vector<double>{0, 0}));
}

// Strength 0 writes and erases nothing, and still has the gradient k (v - S- k) dS.
TEST(ByHand, ZeroBeta) {
  Case c{{.op = Operator::kDeltaNet, .T = 1, .K = 1, .V = 1, .dtype = DType::kF64, .strength_dtype = DType::kF64}};
  Values<double> x;
  x[kQ] = {3};
  x[kK] = {0.5};
  x[kV] = {4};
  x[kBeta] = {0};
  x[kH0] = {2};
  EXPECT_EQ(public_forward(c, x).o[0], 6);
  Weights weights(c, 0);
  weights.d_o = {1};
  weights.d_final = {0};
  const Values<double> d = public_backward(c, x, weights);
  EXPECT_EQ(d[kBeta][0], 3 * 0.5 * (4 - 2 * 0.5));
  EXPECT_EQ(d[kV][0], 0);
  EXPECT_EQ(d[kK][0], 0);
  EXPECT_EQ(d[kH0][0], 3);
  EXPECT_EQ(d[kQ][0], 2);
}

// exp(-inf) forgets: from that token on the outputs are those of a call that starts there, and nothing flows back.
TEST_P(EveryOperator, InfiniteDecayResets) {
  if (gate_of(GetParam()) == Gate::kNone) return;
  constexpr std::int64_t kTokens = 80, kReset = 66;
  Case c{{.op = GetParam(), .T = kTokens, .K = 5, .V = 4, .dtype = DType::kF64, .strength_dtype = DType::kF64}};
  Values<double> x = random_inputs(c, 18);
  const std::int64_t gates = static_cast<std::int64_t>(x[kG].size()) / kTokens;
  std::fill_n(x[kG].begin() + kReset * gates, gates, -kInfinity);
  const Weights weights(c, 19);
  const Outputs out = public_forward(c, x);
  const Values<double> d = public_backward(c, x, weights);

  Case late = c;
  late.p.T = kTokens - kReset;
  Values<double> y;
  for (int input = 0; input < kH0; ++input) {
    y[input].assign(x[input].begin() + static_cast<std::ptrdiff_t>(x[input].size()) / kTokens * kReset, x[input].end());
  }
  y[kH0].assign(20, 0.0);
  const Outputs fresh = public_forward(late, y);
  for (std::size_t i = 0; i < fresh.o.size(); ++i) EXPECT_EQ(out.o[kReset * 4 + i], fresh.o[i]);
  EXPECT_EQ(out.final_state, fresh.final_state);

  for (std::int64_t i = 0; i < gates; ++i) EXPECT_EQ(d[kG][kReset * gates + i], 0);
  for (int input = 0; input < kInputs; ++input) {
    for (double element : d[input]) EXPECT_TRUE(std::isfinite(element)) << kNames[input];
  }
  // The final state's gradient does not reach back over the reset.
  Weights only_final = weights;
  std::ranges::fill(only_final.d_o, 0.0);
  const Values<double> e = public_backward(c, x, only_final);
  for (double element : e[kH0]) EXPECT_EQ(element, 0);
  for (std::int64_t i = 0; i < kReset * 4; ++i) EXPECT_EQ(e[kV][i], 0);
}

TEST(Propagation, NanReachesWhatReadsItAndNothingElse) {
  Case c = packed_case(Operator::kKda);
  Values<double> x = random_inputs(c, 20);
  x[kV][(6 * 6 + 2) * 4 + 1] = NAN;  // row 6 (of segment [5, 10)), value head 2, feature 1
  const Outputs out = public_forward(c, x);
  for (std::size_t i = 0; i < out.o.size(); ++i) {
    const std::size_t row = i / 24, hv = i / 4 % 6, feature = i % 4;
    EXPECT_EQ(std::isnan(out.o[i]), row >= 6 && row < 10 && hv == 2 && feature == 1) << row << " " << hv;
  }
}

// ---- element types and strides --------------------------------------------------------------------------------------

/// o = scale * v for one token with q = k = beta = 1 and no state.
template <class Storage>
std::vector<Storage> scale_values(DType dtype, Storage one, std::vector<Storage> v, double scale) {
  const auto V = static_cast<std::int64_t>(v.size());
  Problem p{.op = Operator::kDeltaNet, .T = 1, .K = 1, .V = V, .dtype = dtype, .strength_dtype = dtype};
  p.scale = scale;
  std::vector<Storage> o(v.size());
  ForwardArgs args;
  args.in.q = args.in.k = TensorView(&one, dtype, {1, 1, 1, 1});
  args.in.v = TensorView(v.data(), dtype, {1, 1, 1, V});
  args.in.beta = TensorView(&one, dtype, {1, 1, 1});
  args.o = TensorView(o.data(), dtype, {1, 1, 1, V});
  run_forward(p, args);
  return o;
}

TEST(ElementTypes, EveryHalfSurvivesTheTripThroughFp64) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (const auto& [dtype, one, infinity] :
       {std::tuple(DType::kBF16, 0x3f80, 0x7f80), std::tuple(DType::kF16, 0x3c00, 0x7c00)}) {
    const auto out = scale_values(dtype, static_cast<std::uint16_t>(one), all, 1.0);
    for (int i = 0; i < 65536; ++i) {
      const int magnitude = i & 0x7fff;
      if (magnitude > infinity) {
        EXPECT_GT(out[i] & 0x7fff, infinity) << i;
      } else if (magnitude == 0) {
        EXPECT_EQ(out[i] & 0x7fff, 0) << i;  // 0 + -0 is 0
      } else {
        EXPECT_EQ(out[i], i);
      }
    }
  }
}

TEST(ElementTypes, OneRoundingToNearestEven) {
  struct Rounding {
    double value;
    int bits;
  };
  const double tiny = 0x1p-45;  // below FP32's last place: rounding there first would make a tie of it
  for (const auto& [value, bits] : std::initializer_list<Rounding>{{1 + 0x1p-8, 0x3f80},
                                                                   {1 + 0x1p-8 + tiny, 0x3f81},
                                                                   {1 + 0x3p-8, 0x3f82},
                                                                   {1 + 0x3p-8 - tiny, 0x3f81},
                                                                   {-(2 - 0x1p-8), 0xc000},
                                                                   {0x1p-134, 0x0000},
                                                                   {0x1.8p-134, 0x0001},
                                                                   {0x1.fep127, 0x7f7f},
                                                                   {0x1.ffp127, 0x7f80},
                                                                   {1e300, 0x7f80}}) {
    EXPECT_EQ(scale_values<std::uint16_t>(DType::kBF16, 0x3f80, {0x3f80}, value)[0], bits) << value;
  }
  for (const auto& [value, bits] : std::initializer_list<Rounding>{{1 + 0x1p-11, 0x3c00},
                                                                   {1 + 0x1p-11 + tiny, 0x3c01},
                                                                   {1 + 0x3p-11, 0x3c02},
                                                                   {1 + 0x3p-11 - tiny, 0x3c01},
                                                                   {0x1p-25, 0x0000},
                                                                   {0x1.8p-25, 0x0001},
                                                                   {0x1p-14 - 0x1p-25, 0x0400},
                                                                   {65519, 0x7bff},
                                                                   {-65520, 0xfc00},
                                                                   {1e300, 0x7c00}}) {
    EXPECT_EQ(scale_values<std::uint16_t>(DType::kF16, 0x3c00, {0x3c00}, value)[0], bits) << value;
  }
  EXPECT_EQ(scale_values<float>(DType::kF32, 1.0f, {1.0f}, 1 + 0x1p-24 + tiny)[0], 1 + 0x1p-23f);
}

// q, k and v sliced out of one projection, tokens in reverse, beta the same number everywhere, 32-bit offsets.
TEST(Strides, AreHonoured) {
  constexpr std::int64_t kT = 7, kH = 2, kWidth = 3;
  Case c{{.op = Operator::kDeltaNet, .T = kT, .H = kH, .HV = kH, .K = kWidth, .V = kWidth, .segments = 2}, {0, 3, 7}};
  c.states = false;
  c.p.dtype = c.p.strength_dtype = DType::kF64;
  Values<double> x = random_inputs(c, 21);
  std::ranges::fill(x[kBeta], 0.5);

  std::vector<double> projection(kT * 3 * kH * kWidth);
  std::vector<double> out(projection.size(), NAN);
  const Shape shape{1, kT, kH, kWidth};
  const Shape strides{0, -3 * kH * kWidth, kWidth, 1};
  const auto slice = [&](std::vector<double>& data, int part) {
    return TensorView(data.data() + (kT - 1) * 3 * kH * kWidth + part * kH * kWidth, DType::kF64, std::span(shape),
                      std::span(strides));
  };
  for (int part = 0; part < 3; ++part) {
    for (std::int64_t i = 0; i < kT * kH * kWidth; ++i) {
      const std::int64_t t = i / (kH * kWidth);
      projection[((kT - 1 - t) * 3 + part) * kH * kWidth + i % (kH * kWidth)] = x[part][i];
    }
  }
  const double half = 0.5;
  const std::int32_t offsets[] = {0, 3, 7};
  const Weights weights(c, 22);
  BackwardArgs args;
  args.in.q = slice(projection, 0);
  args.in.k = slice(projection, 1);
  args.in.v = slice(projection, 2);
  args.in.beta = TensorView(&half, DType::kF64, Shape{1, kT, kH}, Shape{0, 0, 0});
  args.in.cu_seqlens = TensorView(offsets, DType::kI32, {3});
  args.d_o = view(weights.d_o, shape_of(c, kV));
  args.dq = slice(out, 0);
  args.dk = slice(out, 1);
  args.dv = slice(out, 2);
  run_backward(c.p, args);

  const Values<double> want = public_backward(c, x, weights);
  for (int part = 0; part < 3; ++part) {
    for (std::int64_t i = 0; i < kT * kH * kWidth; ++i) {
      const std::int64_t t = i / (kH * kWidth);
      EXPECT_EQ(out[((kT - 1 - t) * 3 + part) * kH * kWidth + i % (kH * kWidth)], want[part][i]);
    }
  }
}

// ---- what it serves -------------------------------------------------------------------------------------------------

TEST(Support, DeclinesOnlyDerivativeGraphs) {
  Problem p{.op = Operator::kKda, .T = 100, .K = 3, .V = 5, .dtype = DType::kF64, .strength_dtype = DType::kF64};
  EXPECT_EQ(explain(p, Direction::kBackward, on_reference()).backend, "reference");
  EXPECT_EQ(explain(p, Direction::kBackward).backend, "reference") << "nothing else serves FP64";
  p.variant.graph = Graph::kExpanded;
  EXPECT_EQ(explain(p, Direction::kBackward, on_reference()).backend, "");
  EXPECT_THROW(workspace_bytes(p, Direction::kBackward, on_reference()), Error);
}

}  // namespace
}  // namespace rewy
