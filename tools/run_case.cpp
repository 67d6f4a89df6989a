#include "run_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "rounded.h"
#include "target.h"

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

Products products_of(const Device& device, Schedule schedule) {
  // Token by token a GPU computes in FP32, too.
  return device.kind == DeviceKind::kCpu || schedule == Schedule::kTokens ? Products::kWide : Products::k16Bit;
}

std::size_t workspace_needed(const Bytes& bytes, bool saved) {
  return bytes.workspace + (saved ? 0 : bytes.unsaved);
}

/// The memory of a call: on the CPU where it is, on a GPU in copies and allocations of its own.
class PlacedCall::Site {
 public:
  explicit Site(const RunOptions& options) : device_(options.device), poison_(options.poison) {
    if (!on_gpu()) return;
    use_device(device_);
    stream_.emplace(device_);
  }

  bool on_gpu() const { return device_.kind == DeviceKind::kCuda; }
  const DeviceStream* stream() const { return stream_ ? &*stream_ : nullptr; }

  TensorView input(const char* name, const TensorView& view) {
    if (!on_gpu() || !view.given()) return view;
    inputs_.emplace_back(name, DeviceCopy(view, device_));
    return inputs_.back().second.view();
  }

  /// Adds an output to the run's, and says where it is computed.
  TensorView output(Run& run, const char* name, const TensorView& like) {
    if (!like.given()) return {};
    run.outputs.push_back({name, output_like(like, poison_.value_or(Buffer::kPoison))});
    TensorView view = run.outputs.back().tensor.view;
    if (on_gpu()) {
      outputs_.emplace_back(device_, run.outputs.back().tensor.buffer.size(), poison_);
      view.data = outputs_.back().data();
      view.device = device_;
    }
    return view;
  }

  std::span<std::byte> memory(const char* name, std::size_t bytes) {
    if (on_gpu()) {
      device_memory_.emplace_back(name, DeviceMemory(device_, bytes, poison_));
      return device_memory_.back().second.span();
    }
    memory_.emplace_back(name, Buffer(bytes, poison_.value_or(Buffer::kPoison)));
    return memory_.back().second.span();
  }

  void refresh(const std::vector<std::pair<const char*, TensorView>>& views) {
    std::size_t next = 0;
    for (const auto& [name, view] : views) {
      if (!view.given()) continue;
      if (next == inputs_.size() || std::string_view(inputs_[next].first) != name) {
        throw std::logic_error(std::string("other tensors than those placed: ") + name);
      }
      inputs_[next++].second.refresh(view);
    }
  }

  /// Brings the outputs home and looks for writes where none were allowed.
  void collect(const Run& run) const {
    for (std::size_t i = 0; i < run.outputs.size(); ++i) {
      const Buffer& buffer = run.outputs[i].tensor.buffer;
      if (on_gpu()) copy_to_host(buffer.data(), outputs_[i].data(), buffer.size());
      require(on_gpu() ? outputs_[i].guards_intact() : buffer.guard_intact(), run.outputs[i].name);
    }
    for (const auto& [name, buffer] : memory_) require(buffer.guard_intact(), std::string("the ") + name);
    for (const auto& [name, memory] : device_memory_) require(memory.guards_intact(), std::string("the ") + name);
    for (const auto& [name, copy] : inputs_) {
      if (!copy.unchanged()) throw std::runtime_error(std::string("wrote into the input ") + name);
    }
  }

 private:
  static void require(bool intact, const std::string& what) {
    if (!intact) throw std::runtime_error("wrote past the end of " + what);
  }

  Device device_;
  std::optional<unsigned char> poison_;
  std::vector<std::pair<const char*, DeviceCopy>> inputs_;
  std::vector<DeviceMemory> outputs_;
  std::vector<std::pair<const char*, DeviceMemory>> device_memory_;
  std::vector<std::pair<const char*, Buffer>> memory_;
  std::optional<DeviceStream> stream_;  // gone before the memory it works on
};

namespace {

/// What a call reads, in the order in which it is placed.
std::vector<std::pair<const char*, TensorView>> named_inputs(const Call& call) {
  return {{"q", call.in.q},
          {"k", call.in.k},
          {"v", call.in.v},
          {"g", call.in.g},
          {"beta", call.in.beta},
          {"b", call.in.b},
          {"w", call.in.w},
          {"initial_state", call.in.initial_state},
          {"cu_seqlens", call.in.cu_seqlens},
          {"do", call.d_o},
          {"dfinal_state", call.d_final_state}};
}

}  // namespace

PlacedCall::PlacedCall(const Call& call, const RunOptions& options)
    : problem_(call.problem), site_(std::make_unique<Site>(options)) {
  const Problem& p = problem_;
  execution_ = {.device = options.device,
                .stream = site_->stream() != nullptr ? site_->stream()->get() : nullptr,
                .threads = options.threads,
                .backend = options.backend,
                .schedule = options.schedule,
                .architecture = options.architecture};
  run_.products = products_of(options.device, options.schedule);
  const bool runs_backward = options.runs_backward();
  const Explanation why = explain(p, runs_backward ? Direction::kBackward : Direction::kForward, execution_);
  run_.backend = why.backend;
  if (!why.rows.empty()) run_.kernels = why.rows.back().kernels;

  std::vector<TensorView> in;
  for (const auto& [name, view] : named_inputs(call)) in.push_back(site_->input(name, view));
  const Inputs inputs{.q = in[0],
                      .k = in[1],
                      .v = in[2],
                      .g = in[3],
                      .beta = in[4],
                      .b = in[5],
                      .w = in[6],
                      .initial_state = in[7],
                      .cu_seqlens = in[8]};
  std::span<std::byte> saved;
  if (options.forward) {
    run_.forward_bytes = workspace_bytes(p, Direction::kForward, execution_);
    forward_.in = inputs;
    forward_.o = site_->output(run_, "o", call.in.v);
    if (call.final_state) forward_.final_state = site_->output(run_, "final_state", state_view(p));
    if (runs_backward && options.saved) saved = site_->memory("saved", run_.forward_bytes.saved);
    forward_.saved = saved;
    forward_workspace_ =
        site_->memory("forward workspace", workspace_needed(run_.forward_bytes, !forward_.saved.empty()));
  }
  if (runs_backward) {
    run_.backward_bytes = workspace_bytes(p, Direction::kBackward, execution_);
    backward_ = {.in = inputs,
                 .d_o = in[9],
                 .d_final_state = in[10],
                 .dq = site_->output(run_, "dq", call.in.q),
                 .dk = site_->output(run_, "dk", call.in.k),
                 .dv = site_->output(run_, "dv", call.in.v),
                 .dg = site_->output(run_, "dg", call.in.g),
                 .dbeta = site_->output(run_, "dbeta", call.in.beta),
                 .db = site_->output(run_, "db", call.in.b),
                 .dw = site_->output(run_, "dw", call.in.w),
                 .d_initial_state = site_->output(run_, "dinitial_state", call.in.initial_state),
                 .saved = saved};
    backward_workspace_ = site_->memory("backward workspace", workspace_needed(run_.backward_bytes, !saved.empty()));
  }
}

PlacedCall::~PlacedCall() = default;
PlacedCall::PlacedCall(PlacedCall&&) noexcept = default;

void PlacedCall::forward() {
  execution_.workspace = forward_workspace_;
  execution_.work = &run_.forward_work;
  rewy::forward(problem_, forward_, execution_);
}

void PlacedCall::backward() {
  execution_.workspace = backward_workspace_;
  execution_.work = &run_.backward_work;
  rewy::backward(problem_, backward_, execution_);
}

void PlacedCall::finish() const {
  if (stream() != nullptr) stream()->synchronize();
}

void PlacedCall::refresh(const Call& call) {
  site_->refresh(named_inputs(call));
}

const DeviceStream* PlacedCall::stream() const {
  return site_->stream();
}

std::size_t PlacedCall::forward_workspace() const {
  return forward_workspace_.size();
}

std::size_t PlacedCall::backward_workspace() const {
  return backward_workspace_.size();
}

Run PlacedCall::collect() && {
  site_->collect(run_);
  return std::move(run_);
}

Run PlacedCall::collect() const& {
  site_->collect(run_);
  Run copy;
  copy.backend = run_.backend;
  copy.kernels = run_.kernels;
  copy.products = run_.products;
  copy.forward_work = run_.forward_work;
  copy.backward_work = run_.backward_work;
  copy.forward_bytes = run_.forward_bytes;
  copy.backward_bytes = run_.backward_bytes;
  for (const Output& output : run_.outputs) {
    copy.outputs.push_back({output.name, output_like(output.tensor.view, 0)});
    const Buffer& from = output.tensor.buffer;
    if (from.size() > 0) std::memcpy(copy.outputs.back().tensor.buffer.data(), from.data(), from.size());
  }
  return copy;
}

// One thread's calls at a time: an error that a call leaves on a device would show in another thread's.
std::unique_lock<std::mutex> turn_on(const Device& device) {
  static std::mutex mutex;
  return device.kind == DeviceKind::kCuda ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

Run run(const Call& call, const RunOptions& options) {
  const auto turn = turn_on(options.device);
  PlacedCall placed(call, options);
  double forward_seconds = 0, backward_seconds = 0;
  if (options.forward) {
    const auto start = Clock::now();
    placed.forward();
    placed.finish();
    forward_seconds = seconds_since(start);
  }
  if (options.runs_backward()) {
    const auto start = Clock::now();
    placed.backward();
    placed.finish();
    backward_seconds = seconds_since(start);
  }
  Run run = std::move(placed).collect();
  run.forward_seconds = forward_seconds;
  run.backward_seconds = backward_seconds;
  return run;
}

std::vector<Run> run_captured(const std::vector<Call>& calls, const RunOptions& options) {
  const auto turn = turn_on(options.device);
  PlacedCall placed(calls.front(), options);
  const auto issue = [&] {
    placed.forward();
    if (options.runs_backward()) placed.backward();
  };
  issue();  // loads the kernels, which a capture may not
  placed.finish();
  const DeviceGraph graph(*placed.stream(), issue);
  std::vector<Run> runs;
  for (const Call& call : calls) {
    placed.refresh(call);
    graph.replay();
    placed.finish();
    runs.push_back(placed.collect());
  }
  return runs;
}

std::vector<Run> run_together(const std::vector<Call>& calls, const RunOptions& options) {
  const auto turn = turn_on(options.device);
  std::vector<PlacedCall> placed;
  for (const Call& call : calls) placed.emplace_back(call, options);
  constexpr int kRounds = 8;  // so that the streams have work at the same time
  for (int round = 0; round < kRounds; ++round) {
    for (PlacedCall& one : placed) one.forward();
    for (PlacedCall& one : placed) {
      if (options.runs_backward()) one.backward();
    }
  }
  std::vector<Run> runs;
  for (const PlacedCall& one : placed) one.finish();
  for (const PlacedCall& one : placed) runs.push_back(one.collect());
  return runs;
}

Run run_reference(const Call& call, int threads) {
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
  return run(exact, {.backend = Backend::kReference, .threads = threads});
}

// Where the numbers come from:
//   f32   The arithmetic's own rounding: a plain FP32 chunk form loses 1e-6 to 5e-6 on o and the direct gradients, and
//         the paths through sums over features and tokens (gates, strengths) a few times that. The bounds leave a
//         factor of about four.
//   16-bit storage   The numerical contract: 0.8% and, for the paths through the gates and strengths, 2%. It holds for
//         outputs that are themselves stored in 16 bits. States and gate gradients stay FP32 and FP32's bound.
//   16-bit products   The same contract for every output, also those stored in FP32: the products they are sums of have
//         rounded operands. FP32 storage does not make up for that.
//   Keys that repeat or are not normalised grow errors with the condition of (I + L), which the reference shares: x20.
//   With 16-bit products there is no such factor: where a case is beyond the contract, it is computed once more in FP64
//   with nothing but the roundings that 16-bit storage has, and 1.5 times what those lose is allowed (rounded.h).
Tolerance tolerance(const std::string& output, DType stored, Keys keys, Products products) {
  const bool strength_path = in(output, {"dg", "dbeta", "db", "dw"});
  Tolerance t{.relative = strength_path ? 0.02 : 0.008, .absolute = 1e-6};
  if (products == Products::k16Bit) return t;
  switch (stored) {
    case DType::kF64: return {1e-10, 1e-14};
    case DType::kBF16:
    case DType::kF16: return t;
    default: t.relative = strength_path ? 1e-4 : 2e-5; break;
  }
  if (keys != Keys::kNormal) t.relative *= 20;
  return t;
}

Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Keys keys,
                   Products products) {
  return compare(output, actual, expected, tolerance(output, actual.dtype, keys, products));
}

Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Tolerance allowed) {
  Comparison c;
  c.output = output;
  c.allowed = allowed;
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
    all.push_back(compare(output.name, output.tensor.view, expected[output.name], keys, actual.products));
  }
  return all;
}

namespace {

/// The same bits every time, NaN and the signs of zeros too, whatever lay in memory before.
void require_repeatable(const Call& call, RunOptions options, int repeats, const Run& first) {
  for (int i = 1; i < repeats; ++i) {
    if (options.poison) options.poison = static_cast<unsigned char>(~*options.poison);
    const Run again = run(call, options);
    for (std::size_t o = 0; o < first.outputs.size(); ++o) {
      const Buffer& a = first.outputs[o].tensor.buffer;
      const Buffer& b = again.outputs[o].tensor.buffer;
      if (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size()) == 0) continue;
      const auto where = first_difference(first.outputs[o].tensor.view, again.outputs[o].tensor.view);
      throw std::runtime_error("run " + std::to_string(i + 1) + " gave other bits than run 1: " +
                               first.outputs[o].name + ": " + where.value_or("in the bits of a zero or a NaN"));
    }
  }
}

}  // namespace

CheckResult check_case(const std::string& text, const RunOptions& how, int repeats) {
  CheckResult result;
  result.text = text;
  const auto start = Clock::now();
  try {
    const Case c = for_device(parse_case(text), how.device);
    RunOptions options = how;
    options.schedule = c.schedule;
    result.text = format_case(c);
    const Service expected = service(c, options.device);
    const Data data = make_data(c);
    Run actual;
    try {
      actual = run(data.call(), options);
    } catch (const Error& e) {
      if (expected.kind == Service::Kind::kServed) throw;
      result.declined = true;
      result.detail = e.what();
      result.seconds = seconds_since(start);
      return result;
    }
    if (expected.kind == Service::Kind::kDeclined) {
      throw std::runtime_error("computed, although it should have been refused: " + expected.reason);
    }
    result.backend = actual.backend;
    result.kernels = actual.kernels;
    require_repeatable(data.call(), options, repeats, actual);
    const Run exact = run_reference(data.call(), options.threads);
    result.comparisons = compare(actual, exact, c.keys);
    const auto failed = [](const Comparison& one) { return !one.passed; };
    if (actual.products == Products::k16Bit && std::ranges::any_of(result.comparisons, failed)) {
      allow_rounding(data.call(), actual, exact, result.comparisons);
      result.beyond_contract = true;
    }
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
