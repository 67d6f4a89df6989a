#include "run_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace rewy::tool {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Tensor output_like(const TensorView& view, unsigned char poison) {
  Tensor t;
  if (!view.given()) return t;
  t.buffer = Buffer(static_cast<std::size_t>(view.elements()) * size_of(view.dtype), poison);
  t.view = TensorView(t.buffer.data(), view.dtype, view.dims());
  return t;
}

TensorView state_view(const Problem& p) {
  const DType wide = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  return p.state_layout == StateLayout::kKV ? TensorView(nullptr, wide, {p.sequences(), p.HV, p.K, p.V})
                                            : TensorView(nullptr, wide, {p.sequences(), p.HV, p.V, p.K});
}

bool in(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// NaN, -inf, +inf or finite.
int kind_of(double x) {
  if (std::isnan(x)) return 1;
  if (std::isinf(x)) return x < 0 ? 2 : 3;
  return 0;
}

}  // namespace

const TensorView& Run::operator[](const std::string& name) const {
  for (const Output& output : outputs) {
    if (output.name == name) return output.tensor.view;
  }
  throw std::out_of_range("no output " + name);
}

bool Run::has(const std::string& name) const {
  return std::any_of(outputs.begin(), outputs.end(), [&](const Output& o) { return o.name == name; });
}

Run run(const Call& call, const RunOptions& options) {
  const Problem& p = call.problem;
  Run run;
  Execution execution{.threads = options.threads, .backend = options.backend};
  run.backend = explain(p, options.backward ? Direction::kBackward : Direction::kForward, execution).backend;
  const auto add = [&](const char* name, const TensorView& like) {
    Tensor t = output_like(like, options.poison);
    const TensorView view = t.view;
    if (view.given()) run.outputs.push_back({name, std::move(t)});
    return view;
  };
  std::vector<std::pair<const char*, Buffer>> memory;
  const auto take = [&](const char* name, std::size_t bytes) {
    memory.emplace_back(name, Buffer(bytes, options.poison));
    return memory.back().second.span();
  };

  std::span<std::byte> saved;
  if (options.forward) {
    run.forward_bytes = workspace_bytes(p, Direction::kForward, execution);
    ForwardArgs args;
    args.in = call.in;
    args.o = add("o", call.in.v);
    if (call.final_state) args.final_state = add("final_state", state_view(p));
    if (options.backward && options.saved) args.saved = saved = take("saved", run.forward_bytes.saved);
    execution.workspace = take("forward workspace", run.forward_bytes.workspace);
    execution.work = &run.forward_work;
    const auto start = Clock::now();
    forward(p, args, execution);
    run.forward_seconds = seconds_since(start);
  }
  if (options.backward) {
    run.backward_bytes = workspace_bytes(p, Direction::kBackward, execution);
    BackwardArgs args{.in = call.in,
                      .d_o = call.d_o,
                      .d_final_state = call.d_final_state,
                      .dq = add("dq", call.in.q),
                      .dk = add("dk", call.in.k),
                      .dv = add("dv", call.in.v),
                      .dg = add("dg", call.in.g),
                      .dbeta = add("dbeta", call.in.beta),
                      .db = add("db", call.in.b),
                      .dw = add("dw", call.in.w),
                      .d_initial_state = add("dinitial_state", call.in.initial_state),
                      .saved = saved};
    execution.workspace = take("backward workspace", run.backward_bytes.workspace);
    execution.work = &run.backward_work;
    const auto start = Clock::now();
    backward(p, args, execution);
    run.backward_seconds = seconds_since(start);
  }
  for (const Output& output : run.outputs) {
    if (!output.tensor.buffer.guard_intact()) throw std::runtime_error("wrote past the end of " + output.name);
  }
  for (const auto& [name, buffer] : memory) {
    if (!buffer.guard_intact()) throw std::runtime_error(std::string("wrote past the end of the ") + name);
  }
  return run;
}

Run run_reference(const Call& call) {
  std::vector<Tensor> copies;
  copies.reserve(16);
  const auto wide = [&](const TensorView& view) {
    copies.push_back(converted(view, DType::kF64));
    return copies.back().view;
  };
  Call exact = call;
  exact.problem.dtype = exact.problem.strength_dtype = DType::kF64;
  exact.problem.policy = Policy::kRecompute;
  exact.problem.variant = {};
  exact.in = {.q = wide(call.in.q),
              .k = wide(call.in.k),
              .v = wide(call.in.v),
              .g = wide(call.in.g),
              .beta = wide(call.in.beta),
              .b = wide(call.in.b),
              .w = wide(call.in.w),
              .initial_state = wide(call.in.initial_state),
              .cu_seqlens = call.in.cu_seqlens};
  exact.d_o = wide(call.d_o);
  exact.d_final_state = wide(call.d_final_state);
  return run(exact, {.backend = Backend::kReference});
}

// Where the numbers come from:
//   f32   The arithmetic's own rounding: a plain FP32 chunk form loses 1e-6 to 5e-6 on o and the direct gradients, and
//         the paths through sums over features and tokens (gates, strengths) a few times that. The bounds leave a
//         factor of about four.
//   16-bit storage   The numerical contract: 0.8% and, for the paths through the gates and strengths, 2%. It holds for
//         outputs that are themselves stored in 16 bits. States and gate gradients stay FP32 and FP32's bound.
//   Keys that repeat or are not normalised grow errors with the condition of (I + L), which the reference shares: x20.
Tolerance tolerance(const std::string& output, DType stored, Keys keys) {
  const bool strength_path = in(output, {"dg", "dbeta", "db", "dw"});
  Tolerance t{.relative = 0, .absolute = 1e-6};
  switch (stored) {
    case DType::kF64: return {1e-10, 1e-14};
    case DType::kBF16:
    case DType::kF16: t.relative = strength_path ? 0.02 : 0.008; break;
    default: t.relative = strength_path ? 1e-4 : 2e-5; break;
  }
  if (keys != Keys::kNormal && stored == DType::kF32) t.relative *= 20;
  return t;
}

Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Keys keys) {
  Comparison c;
  c.output = output;
  c.allowed = tolerance(output, actual.dtype, keys);
  const std::vector<double> reference = values(expected);
  double error = 0, norm = 0, worst = -1;
  for_each(actual, [&](const std::byte* at, const Index& index, std::int64_t i) {
    const double x = load_element(at, actual.dtype);
    const double y = reference[static_cast<std::size_t>(i)];
    const auto describe = [&] {
      char text[96];
      // Without the sign of a NaN, which means nothing.
      std::snprintf(text, sizeof text, "%.6g against %.6g at ", std::isnan(x) ? NAN : x, std::isnan(y) ? NAN : y);
      return text + index_text(index, actual.rank);
    };
    // What the reference would be in this storage: a value beyond FP16 is infinite there.
    const int expected_kind = kind_of(round_to(actual.dtype, y));
    if (kind_of(x) != expected_kind || (expected_kind == 0 && !std::isfinite(x))) {
      if (c.reason.empty()) {
        c.worst = describe();
        c.reason = "NaN or infinity in the wrong place";
      }
      return;
    }
    if (expected_kind != 0) return;
    const double difference = std::fabs(x - y);
    error += difference * difference;
    norm += y * y;
    c.largest = std::max(c.largest, difference);
    if (difference > worst && c.reason.empty()) {
      worst = difference;
      c.worst = describe();
    }
  });
  c.relative = error == 0 ? 0 : std::sqrt(error) / std::max(std::sqrt(norm), 1e-300);
  if (c.reason.empty() && c.relative > c.allowed.relative && c.largest > c.allowed.absolute) {
    c.reason = "error too large";
  }
  c.passed = c.reason.empty();
  return c;
}

std::vector<Comparison> compare(const Run& actual, const Run& expected, Keys keys) {
  std::vector<Comparison> all;
  for (const Output& output : actual.outputs) {
    all.push_back(compare(output.name, output.tensor.view, expected[output.name], keys));
  }
  return all;
}

CheckResult check_case(const std::string& text, const RunOptions& options) {
  CheckResult result;
  result.text = text;
  const auto start = Clock::now();
  try {
    const Case c = parse_case(text);
    result.text = format_case(c);
    const Data data = make_data(c);
    const Run actual = run(data.call(), options);
    result.backend = actual.backend;
    result.comparisons = compare(actual, run_reference(data.call()), c.keys);
    result.passed = true;
    const Comparison* shown = nullptr;
    for (const Comparison& comparison : result.comparisons) {
      result.passed = result.passed && comparison.passed;
      const bool worse = shown == nullptr || (shown->passed && !comparison.passed) ||
                         (shown->passed == comparison.passed && comparison.used() > shown->used());
      if (worse) shown = &comparison;
    }
    if (shown != nullptr) {
      result.worst_output = shown->output;
      result.worst_error = shown->relative;
      result.worst_allowed = shown->allowed.relative;
      result.detail = (shown->reason.empty() ? "" : shown->reason + ": ") + shown->worst;
    }
  } catch (const std::exception& e) {
    result.passed = false;
    result.detail = e.what();
  }
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace rewy::tool
