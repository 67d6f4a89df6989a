#include "activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>

namespace rewy::tool {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;          // half of FP32's last place
constexpr double kLeastNormal = 0x1p-126;  // what FP32 loses where subnormal numbers are taken as 0

/// Half of a type's last place, relative to the number, and of its least step.
struct Rounding {
  double relative, least;
};
Rounding rounding_of(DType t) {
  switch (t) {
    case DType::kBF16: return {0x1p-8, 0x1p-134};
    case DType::kF16: return {0x1p-11, 0x1p-25};
    case DType::kF32: return {kUnit, 0x1p-150};
    default: return {0, 0};
  }
}

double largest_of(DType t) {
  return t == DType::kF16 ? 65504 : std::numeric_limits<float>::max();
}

Tensor make(DType t, const Shape& shape, Placement strides, const std::function<double(std::int64_t)>& value) {
  Tensor tensor(t, shape, strides);
  for_each(tensor.view, [&](std::byte* at, const Index&, std::int64_t i) {
    const double x = value(i);
    store_element(at, t, std::isinf(x) ? x : std::clamp(x, -largest_of(t), largest_of(t)));
  });
  return tensor;
}

/// A call's tensors where it runs: on a GPU inputs are copies, outputs poisoned memory that is brought back.
class Site {
 public:
  explicit Site(const RunOptions& options) : device_(options.device) {
    if (on_gpu()) stream_.emplace(device_);
  }

  void* stream() const { return stream_ ? stream_->get() : nullptr; }

  /// Captured in a graph that is replayed once, or as they are.
  void issue(const std::function<void()>& calls, bool captured) const {
    if (!captured) return calls();
    const DeviceGraph graph(*stream_, calls);
    graph.replay();
    stream_->synchronize();
  }

  TensorView input(const Tensor& t) {
    if (!t.given() || !on_gpu()) return t.view;
    return inputs_.emplace_back(t.view, device_).view();
  }

  /// Of the type given, or none where `like` is not given.
  TensorView output(const char* name, DType type, const Shape& shape, Placement strides, bool wanted = true) {
    if (!wanted) return {};
    outputs_.push_back({name, Tensor(type, shape, strides)});
    Tensor& tensor = outputs_.back().tensor;
    TensorView view = tensor.view;
    if (on_gpu()) {
      device_outputs_.emplace_back(device_, tensor.buffer.size(), Buffer::kPoison);
      const auto offset = static_cast<std::byte*>(view.data) - tensor.buffer.data();
      view.data = device_outputs_.back().data() + offset;
      view.device = device_;
    }
    return view;
  }

  std::span<std::byte> workspace(std::size_t bytes) {
    if (on_gpu()) return device_workspace_.emplace(device_, bytes, Buffer::kPoison).span();
    return workspace_.emplace(bytes).span();
  }

  std::vector<Output> collect() {
    if (stream_) stream_->synchronize();
    require(!workspace_ || workspace_->guard_intact(), "the workspace");
    require(!device_workspace_ || device_workspace_->guards_intact(), "the workspace");
    for (const DeviceCopy& copy : inputs_) require(copy.unchanged(), "an input");
    std::vector<Output> found;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      Tensor& tensor = outputs_[i].tensor;
      if (on_gpu()) copy_to_host(tensor.buffer.data(), device_outputs_[i].data(), tensor.buffer.size());
      require(on_gpu() ? device_outputs_[i].guards_intact() : tensor.buffer.guard_intact(), outputs_[i].name);
      found.push_back({outputs_[i].name, converted(tensor.view, tensor.view.dtype)});
      // Between the elements nobody may have written.
      const std::size_t width = size_of(tensor.view.dtype);
      for_each(tensor.view,
               [&](std::byte* at, const Index&, std::int64_t) { std::memset(at, Buffer::kPoison, width); });
      require(std::ranges::all_of(tensor.buffer.span(), [](std::byte b) { return b == std::byte{Buffer::kPoison}; }),
              outputs_[i].name);
    }
    return found;
  }

 private:
  bool on_gpu() const { return device_.kind == DeviceKind::kCuda; }
  static void require(bool intact, const std::string& what) {
    if (!intact) throw std::runtime_error("wrote outside of the elements of " + what);
  }

  Device device_;
  std::deque<DeviceCopy> inputs_;
  std::deque<Output> outputs_;
  std::deque<DeviceMemory> device_outputs_;
  std::optional<Buffer> workspace_;
  std::optional<DeviceMemory> device_workspace_;
  std::optional<DeviceStream> stream_;  // gone before the memory it works on
};

DType wide(DType t) {
  return t == DType::kF64 ? t : DType::kF32;
}

Shape parameter_shape(const Activation& a) {
  return {a.gate == Gate::kVector ? a.HV * a.K : a.HV};
}

const Output& find(const std::vector<Output>& outputs, const std::string& name) {
  for (const Output& output : outputs) {
    if (output.name == name) return output;
  }
  throw std::out_of_range("no output " + name);
}

}  // namespace

ActivationData make_activation_data(const ActivationCase& c) {
  const Activation& a = c.activation;
  ActivationData d;
  d.activation = a;
  d.strides = c.strides;
  std::uint64_t stream = 100 * c.seed;
  const auto gaussians = [&](double factor) {
    return [factor, id = stream++](std::int64_t i) { return factor * gaussian(id, static_cast<std::uint64_t>(i)); };
  };
  if (a.normalise) {
    const Shape shape{a.B, a.T, a.H, a.K};
    const auto rows = [&, K = a.K](const std::function<double(std::int64_t)>& value) {
      return [value, K](std::int64_t i) { return i / K % 7 == 3 ? 0 : i / K % 7 == 5 ? 1e-40 : value(i); };
    };
    d.raw_q = make(a.dtype, shape, c.strides, rows(gaussians(1)));
    d.raw_k = make(a.dtype, shape, c.strides, rows(gaussians(8)));
    d.dq = make(a.dtype, shape, c.strides, gaussians(1));
    d.dk = make(a.dtype, shape, c.strides, gaussians(1));
  }
  const auto with_extremes = [](const std::function<double(std::int64_t)>& value) {
    return [value](std::int64_t i) -> double {
      switch (i % 41) {
        case 5: return 200;
        case 13: return -200;
        case 22: return -60;
        case 30: return 25;
        default: return i % 113 == 100 ? -kInfinity : value(i);
      }
    };
  };
  if (a.gate != Gate::kNone) {
    const Shape shape = a.gate == Gate::kVector ? Shape{a.B, a.T, a.HV, a.K} : Shape{a.B, a.T, a.HV};
    d.raw_g = make(a.gate_dtype, shape, c.strides, with_extremes(gaussians(3)));
    d.dg = make(wide(a.gate_dtype), shape, c.strides, gaussians(1));
    if (c.A_log) d.A_log = make(wide(a.gate_dtype), {a.HV}, c.strides, gaussians(1));
    if (c.dt_bias) d.dt_bias = make(wide(a.gate_dtype), parameter_shape(a), c.strides, gaussians(1));
  }
  if (a.strength) {
    const Shape shape{a.B, a.T, a.HV};
    d.raw_beta = make(a.strength_dtype, shape, c.strides, with_extremes(gaussians(2)));
    d.dbeta = make(a.beta_dtype, shape, c.strides, gaussians(1));
  }
  return d;
}

std::vector<Output> run_activation(const ActivationData& d, const RunOptions& options, bool captured) {
  const auto turn = turn_on(options.device);
  const Activation& a = d.activation;
  Site site(options);
  Execution execution{
      .device = options.device, .stream = site.stream(), .threads = options.threads, .backend = options.backend};
  const ActivationInputs in{.raw_q = site.input(d.raw_q),
                            .raw_k = site.input(d.raw_k),
                            .raw_g = site.input(d.raw_g),
                            .A_log = site.input(d.A_log),
                            .dt_bias = site.input(d.dt_bias),
                            .raw_beta = site.input(d.raw_beta)};
  const Shape rows{a.B, a.T, a.H, a.K}, heads{a.B, a.T, a.H}, strengths{a.B, a.T, a.HV};
  const Shape gates = a.gate == Gate::kVector ? Shape{a.B, a.T, a.HV, a.K} : strengths;
  const bool gate = a.gate != Gate::kNone;
  const auto output = [&](const char* name, bool wanted, DType type, const Shape& shape) {
    return site.output(name, type, shape, d.strides, wanted);
  };
  const ActivateArgs forward{.in = in,
                             .q = output("q", a.normalise, a.dtype, rows),
                             .k = output("k", a.normalise, a.dtype, rows),
                             .q_rstd = output("q_rstd", a.normalise, wide(a.dtype), heads),
                             .k_rstd = output("k_rstd", a.normalise, wide(a.dtype), heads),
                             .g = output("g", gate, wide(a.gate_dtype), gates),
                             .beta = output("beta", a.strength, a.beta_dtype, strengths)};
  const ActivateBackwardArgs backward{
      .in = in,
      .q_rstd = forward.q_rstd,
      .k_rstd = forward.k_rstd,
      .dq = site.input(d.dq),
      .dk = site.input(d.dk),
      .dg = site.input(d.dg),
      .dbeta = site.input(d.dbeta),
      .d_raw_q = output("d_raw_q", a.normalise, a.dtype, rows),
      .d_raw_k = output("d_raw_k", a.normalise, a.dtype, rows),
      .d_raw_g = output("d_raw_g", gate, a.gate_dtype, gates),
      .d_A_log = output("d_A_log", d.A_log.given(), wide(a.gate_dtype), {a.HV}),
      .d_dt_bias = output("d_dt_bias", d.dt_bias.given(), wide(a.gate_dtype), parameter_shape(a)),
      .d_raw_beta = output("d_raw_beta", a.strength, a.strength_dtype, strengths)};
  execution.workspace = site.workspace(activation_workspace_bytes(a, Direction::kBackward, execution));
  site.issue(
      [&] {
        activate(a, forward, execution);
        activate_backward(a, backward, execution);
      },
      captured);
  return site.collect();
}

std::vector<ActivationExpectation> expect_activation(const ActivationData& d, int threads) {
  const Activation& a = d.activation;
  ActivationData wide_data;
  wide_data.activation = a;
  wide_data.activation.dtype = wide_data.activation.gate_dtype = DType::kF64;
  wide_data.activation.strength_dtype = wide_data.activation.beta_dtype = DType::kF64;
  const auto copy = [](const Tensor& from, Tensor& to) { to = converted(from.view, DType::kF64); };
  copy(d.raw_q, wide_data.raw_q), copy(d.raw_k, wide_data.raw_k), copy(d.raw_g, wide_data.raw_g);
  copy(d.A_log, wide_data.A_log), copy(d.dt_bias, wide_data.dt_bias), copy(d.raw_beta, wide_data.raw_beta);
  copy(d.dq, wide_data.dq), copy(d.dk, wide_data.dk), copy(d.dg, wide_data.dg), copy(d.dbeta, wide_data.dbeta);
  const std::vector<Output> exact = run_activation(wide_data, {.backend = Backend::kReference, .threads = threads});
  const auto of = [&](const std::string& name) { return values(find(exact, name).tensor.view); };

  std::vector<ActivationExpectation> all;
  /// allowed(i): what is lost on the way to element i; its rounding to `stored` comes on top.
  const auto expect = [&](const std::string& name, DType stored, const std::function<double(std::size_t)>& allowed) {
    ActivationExpectation e{name, of(name), {}};
    const Rounding rounding = rounding_of(stored);
    for (std::size_t i = 0; i < e.expected.size(); ++i) {
      const double lost = allowed(i);
      e.allowed.push_back(lost + rounding.relative * (std::abs(e.expected[i]) + lost) + rounding.least);
    }
    all.push_back(std::move(e));
  };
  const auto K = static_cast<std::size_t>(std::max<std::int64_t>(a.K, 1));
  // A sum of K squares or products in at least four chains, and a few operations.
  const double sum = (8 + static_cast<double>(K) / 4) * kUnit;

  const auto normalised = [&](const std::string& name, const Tensor& d_result) {
    const std::vector<double> y = of(name), rstd = of(name + "_rstd"), dy = values(d_result.view);
    expect(name, a.dtype, [&](std::size_t i) { return sum * std::abs(y[i]) + 1000 * kLeastNormal; });
    expect(name + "_rstd", DType::kF32, [&](std::size_t i) { return sum * rstd[i]; });
    std::vector<double> along(rstd.size());  // sum |dy y| of a row
    for (std::size_t i = 0; i < y.size(); ++i) along[i / K] += std::abs(dy[i] * y[i]);
    expect("d_raw_" + name, a.dtype, [&](std::size_t i) {
      return 2 * sum * rstd[i / K] * (std::abs(dy[i]) + std::abs(y[i]) * along[i / K]) + 1e6 * kLeastNormal;
    });
  };
  if (a.normalise) {
    normalised("q", d.dq);
    normalised("k", d.dk);
  }

  if (a.gate != Gate::kNone) {
    const std::vector<double> raw = values(d.raw_g.view), dg = values(d.dg.view), g = of("g"), d_raw = of("d_raw_g");
    const std::vector<double> A_log = values(d.A_log.view), dt_bias = values(d.dt_bias.view);
    const std::size_t features = a.gate == Gate::kVector ? K : 1, width = static_cast<std::size_t>(a.HV) * features;
    const auto rate = [&](std::size_t i) { return A_log.empty() ? 1.0 : std::exp(A_log[i % width / features]); };
    const auto argument = [&](std::size_t i) { return raw[i] + (dt_bias.empty() ? 0 : dt_bias[i % width]); };
    // A GPU's exponentials and quotients are two last places off at most, four of kUnit each; the rest are roundings.
    // An argument's rounding is that of the exponential times the argument. At -inf nothing is lost.
    const auto lost = [&](std::size_t i) {
      const double x = argument(i);
      return std::isinf(x) ? 0 : (16 + 4 * std::abs(a.lower_bound ? rate(i) * x : x)) * kUnit;
    };
    const double scale = std::abs(a.lower_bound.value_or(1));
    const auto least = [&](std::size_t i) { return (1 + rate(i)) * scale * kLeastNormal; };
    expect("g", DType::kF32, [&](std::size_t i) { return lost(i) * std::abs(g[i]) + least(i); });
    const auto d_raw_lost = [&](std::size_t i) { return lost(i) * std::abs(d_raw[i]) + least(i) * std::abs(dg[i]); };
    expect("d_raw_g", a.gate_dtype, d_raw_lost);
    // A tile's 64 tokens are added one by one at worst, a head's features too; the tiles without loss.
    const double added = (kChunk + static_cast<double>(features)) * kUnit;
    const auto expect_sum = [&](const char* name, std::size_t count, auto&& place, auto&& term, auto&& term_lost) {
      std::vector<double> allowed(count);
      for (std::size_t i = 0; i < raw.size(); ++i) allowed[place(i)] += term_lost(i) + added * std::abs(term(i));
      expect(name, DType::kF32, [&](std::size_t i) { return allowed[i]; });
    };
    if (d.dt_bias.given()) {
      expect_sum(
          "d_dt_bias", width, [&](std::size_t i) { return i % width; }, [&](std::size_t i) { return d_raw[i]; },
          d_raw_lost);
    }
    if (d.A_log.given()) {
      const auto term = [&](std::size_t i) {
        if (!a.lower_bound) return dg[i] == 0 ? 0 : dg[i] * g[i];
        return d_raw[i] == 0 ? 0 : d_raw[i] * argument(i);
      };
      expect_sum(
          "d_A_log", static_cast<std::size_t>(a.HV), [&](std::size_t i) { return i % width / features; }, term,
          [&](std::size_t i) {
            const double x = argument(i);
            return lost(i) * std::abs(term(i)) + (std::isinf(x) ? 0 : least(i) * std::abs(dg[i]) * (1 + std::abs(x)));
          });
    }
  }

  if (a.strength) {
    const std::vector<double> raw = values(d.raw_beta.view), beta = of("beta"), d_raw = of("d_raw_beta");
    const std::vector<double> dbeta = values(d.dbeta.view);
    expect("beta", a.beta_dtype, [&](std::size_t i) { return 12 * kUnit * beta[i] + 2 * kLeastNormal; });
    expect("d_raw_beta", a.strength_dtype,
           [&](std::size_t i) { return 16 * kUnit * std::abs(d_raw[i]) + 2 * kLeastNormal * std::abs(dbeta[i]); });
  }
  return all;
}

std::string first_failure(const std::vector<Output>& outputs, const std::vector<ActivationExpectation>& expectations) {
  if (outputs.size() != expectations.size()) return "other outputs than expected";
  for (const ActivationExpectation& e : expectations) {
    const TensorView& view = find(outputs, e.output).tensor.view;
    std::string failure;
    for_each(view, [&](const std::byte* at, const Index& index, std::int64_t position) {
      const auto i = static_cast<std::size_t>(position);
      const double x = load_element(at, view.dtype);
      const bool equal = x == e.expected[i];  // infinities too
      if (!failure.empty() || equal || std::abs(x - e.expected[i]) <= e.allowed[i]) return;
      char text[120];
      std::snprintf(text, sizeof text, ": %.9g instead of %.9g, %.2g of the allowed", x, e.expected[i],
                    std::abs(x - e.expected[i]) / e.allowed[i]);
      failure = e.output + " at " + index_text(index, view.rank) + text;
    });
    if (!failure.empty()) return failure;
  }
  return {};
}

namespace {

std::string text_of(const ActivationCase& c) {
  const Activation& a = c.activation;
  std::string text = "B=" + std::to_string(a.B) + " T=" + std::to_string(a.T) + " H=" + std::to_string(a.H) +
                     " HV=" + std::to_string(a.HV) + " K=" + std::to_string(a.K) +
                     " dtype=" + std::string(name(a.dtype)) + " gate_dtype=" + std::string(name(a.gate_dtype)) +
                     " strength_dtype=" + std::string(name(a.strength_dtype)) + "->" + std::string(name(a.beta_dtype));
  if (a.lower_bound) text += " lower_bound=" + std::to_string(*a.lower_bound);
  if (!c.A_log) text += " no A_log";
  if (!c.dt_bias) text += " no dt_bias";
  return text;
}

[[noreturn]] void fail(const std::string& what, const std::string& failure) {
  throw std::runtime_error(what + ": " + failure);
}

void require_equal(const std::string& what, const std::vector<Output>& a, const std::vector<Output>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (const auto difference = first_difference(a[i].tensor.view, b[i].tensor.view)) {
      fail(what, a[i].name + ": " + *difference);
    }
  }
}

/// What a layer of the operator has: its gate, and a strength where all features share it.
Activation activation_of(Operator op) {
  Activation a;
  a.normalise = true;
  a.gate = gate_of(op);
  a.strength = strength_of(op) == Strength::kShared;
  return a;
}

std::vector<ActivationCase> cases_of(Operator op, bool gpu) {
  std::vector<ActivationCase> cases;
  const auto add = [&](std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t HV, std::int64_t K) -> Activation& {
    ActivationCase& c = cases.emplace_back();
    c.activation = activation_of(op);
    Activation& a = c.activation;
    a.B = B, a.T = T, a.H = H, a.HV = HV, a.K = K;
    c.seed = cases.size();
    return a;
  };
  const auto types = [](Activation& a, DType data, DType gate, DType raw, DType beta) {
    a.dtype = data, a.gate_dtype = gate, a.strength_dtype = raw, a.beta_dtype = beta;
  };
  using enum DType;
  types(add(1, 0, 1, 1, 8), kF32, kF32, kF32, kF32);
  types(add(1, 1, 1, 1, 8), kBF16, kBF16, kBF16, kBF16);
  types(add(2, 63, 2, 4, 24), kF16, kF16, kF16, kF32);
  types(add(1, 150, 3, 3, 64), kBF16, kF32, kF32, kF32);
  types(add(2, 130, 2, 8, 128), kBF16, kBF16, kBF16, kF32);
  types(add(1, 65, 4, 16, 200), kF32, kF16, kF16, kF16);
  types(add(3, 64, 1, 8, 256), kF16, kBF16, kF32, kF32);
  types(add(2, 5, 2, 600, 8), kBF16, kBF16, kBF16, kBF16);
  cases.back().dt_bias = false;
  if (!gpu) types(add(1, 70, 2, 3, 300), kBF16, kF16, kBF16, kF32);
  if (!gpu) types(add(1, 70, 2, 3, 5), kF32, kF32, kF32, kF32);
  const std::size_t plain = cases.size();
  for (std::size_t i = 0; i < plain; ++i) {
    if (op == Operator::kDeltaNet) break;
    ActivationCase bounded = cases[i];
    bounded.activation.lower_bound = i % 2 == 0 ? -5.0 : -0.75;
    bounded.A_log = i % 3 != 1;
    cases.push_back(bounded);
  }
  // Sums that a hundred thousand additions one by one would lose.
  types(add(1, 100000, 1, 1, 8), kBF16, kF32, kF32, kF32);
  for (std::size_t i = 0; i < cases.size(); ++i) cases[i].activation.allow_negative_eigenvalues = i % 2 != 0;
  return cases;
}

/// The data of one batch row.
ActivationData batch_row(const ActivationData& d, std::int64_t row) {
  ActivationData one;
  one.activation = d.activation;
  one.activation.B = 1;
  const auto cut = [&](const Tensor& from, Tensor& to) {
    if (from.given()) to = converted(slice(from.view, 0, row, 1), from.view.dtype);
  };
  const auto whole = [](const Tensor& from, Tensor& to) { to = converted(from.view, from.view.dtype); };
  cut(d.raw_q, one.raw_q), cut(d.raw_k, one.raw_k), cut(d.raw_g, one.raw_g), cut(d.raw_beta, one.raw_beta);
  cut(d.dq, one.dq), cut(d.dk, one.dk), cut(d.dg, one.dg), cut(d.dbeta, one.dbeta);
  whole(d.A_log, one.A_log), whole(d.dt_bias, one.dt_bias);
  return one;
}

}  // namespace

void check_activation(Operator op, const RunOptions& given) {
  RunOptions options = given;
  const bool gpu = options.device.kind == DeviceKind::kCuda;
  if (options.threads == 0) options.threads = 1;
  for (const ActivationCase& c : cases_of(op, gpu)) {
    const std::string what = text_of(c);
    const bool is_long = c.activation.T > 1000;
    const ActivationData data = make_activation_data(c);
    if (is_long) {  // all terms of a sum alike: what rounds one addition rounds all of them
      fill(data.raw_g.view, 0.3);
      fill(data.dg.view, 1);
    }
    const std::vector<Output> first = run_activation(data, options);
    if (const std::string failure = first_failure(first, expect_activation(data)); !failure.empty()) {
      fail(what, failure);
    }
    require_equal(what + ", the same call again", first, run_activation(data, options));
    if (gpu) require_equal(what + ", captured in a graph", first, run_activation(data, options, true));
    for (const int threads : {2, 3}) {
      RunOptions more = options;
      more.threads = threads;
      if (!gpu) require_equal(what + ", " + std::to_string(threads) + " threads", first, run_activation(data, more));
    }
    if (is_long) continue;
    for (const Placement strides : {Placement::kPacked, Placement::kAligned, Placement::kOdd}) {
      ActivationCase other = c;
      other.strides = strides;
      require_equal(what + ", strided", first, run_activation(make_activation_data(other), options));
    }
    for (std::int64_t row = 0; c.activation.B > 1 && row < c.activation.B; ++row) {
      const std::vector<Output> alone = run_activation(batch_row(data, row), options);
      for (std::size_t i = 0; i < first.size(); ++i) {
        if (first[i].tensor.view.rank == 1) continue;  // a sum over the batch
        const auto difference = first_difference(slice(first[i].tensor.view, 0, row, 1), alone[i].tensor.view);
        if (difference) fail(what, "batch row alone: " + first[i].name + ": " + *difference);
      }
    }
  }
}

}  // namespace rewy::tool
