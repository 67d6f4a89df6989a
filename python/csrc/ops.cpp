// The operators torch.ops.rewy.forward, backward and explain: tensors become views, PyTorch's allocator gives outputs
// and workspace, the library does the rest. What a call may look like is checked by the library alone.
#include "tensors.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "common/activation.h"
#include "common/arena.h"
#include "common/backend.h"
#include "common/validate.h"
#include "options.h"
#include "saved.h"

namespace rewy::torch_ops {
namespace {

/// What the tensors of a call are: those of forward() and backward() that both have, in the order of the schemas. Where
/// a part is activated inside the call, they are the raw ones.
struct Tensors {
  const Tensor &q, &k, &v;
  const OptionalTensor &g, &beta, &b, &w, &initial_state, &A_log, &dt_bias, &cu_seqlens;
};

/// What of a call's options is a number; the rest are words (options.h).
struct Numbers {
  std::optional<double> scale, lower_bound;
};

/// What activate() makes of a call's raw tensors, or the gradients of that; parts that are not activated are not given.
struct Activated {
  TensorView q{}, k{}, g{}, beta{}, q_rstd{}, k_rstd{};
};

/// The library's refusal in the words of the schemas: what a description has is some tensor's, and a raw tensor is the
/// one that was passed.
[[noreturn]] void refuse_as_passed(const Error& e, const std::string& op) {
  static constexpr std::string_view kRaw = "raw_", kActivation = "activation ";
  std::string operation = e.operation(), argument = e.argument(), expected = e.expected();
  if (operation.starts_with(kActivation)) operation.replace(0, kActivation.size() - 1, op);
  if (argument.starts_with(kRaw)) argument.erase(0, kRaw.size());
  if (argument.ends_with("dtype")) {
    static constexpr std::string_view kBeside = " with dtype ";  // the problem's, which a tensor has
    expected = "dtype " + expected;
    if (const auto at = expected.find(kBeside); at != expected.npos)
      expected.replace(at, kBeside.size(), " with q of ");
    argument = argument == "dtype" ? "q" : argument == "gate_dtype" ? "g" : op == "gdn2" ? "b" : "beta";
  }
  throw Error(operation, argument, expected, e.actual());
}

/// In memory one after the other, from rows whose bytes are multiples of 16 where kernels want that to single numbers.
Activated lay_out(const Activation& a, void* memory, Device device) {
  auto next = reinterpret_cast<std::uintptr_t>(memory);
  const auto take = [&](bool there, DType dtype, std::initializer_list<std::int64_t> shape) {
    if (!there) return TensorView{};
    const TensorView view(reinterpret_cast<void*>(next), dtype, shape, device);
    next += static_cast<std::uintptr_t>(view.elements()) * size_of(dtype);
    return view;
  };
  Activated at;
  at.g = take(a.gate == Gate::kVector, wide(a.gate_dtype), {a.B, a.T, a.HV, a.K});
  at.q = take(a.normalise, a.dtype, {a.B, a.T, a.H, a.K});
  at.k = take(a.normalise, a.dtype, {a.B, a.T, a.H, a.K});
  if (a.gate == Gate::kScalar) at.g = take(true, wide(a.gate_dtype), {a.B, a.T, a.HV});
  at.beta = take(a.strength, a.beta_dtype, {a.B, a.T, a.HV});
  at.q_rstd = take(a.normalise, wide(a.dtype), {a.B, a.T, a.H});
  at.k_rstd = take(a.normalise, wide(a.dtype), {a.B, a.T, a.H});
  return at;
}

/// A problem read off the tensors. Of their shapes only the axes of those it is read from are counted here: what they
/// must be is the library's to say.
struct Call {
  Call(const std::string& op, Direction direction, const Tensors& t, const Numbers& numbers, const Options& given)
      : options(given) {
    problem.op = parse_operator(op);
    name = operation(problem, direction);
    const auto q = axes(t.q, "q", 4), v = axes(t.v, "v", 4);
    problem.B = q[0];
    problem.T = q[1];
    problem.H = q[2];
    problem.K = q[3];
    problem.HV = v[2];
    problem.V = v[3];
    if (t.cu_seqlens) {
      problem.segments = axes(*t.cu_seqlens, "cu_seqlens", 1)[0] - 1;
      if (*problem.segments < 0) throw Error(name, "cu_seqlens", "at least 1 entry", "0");
    }
    problem.dtype = dtype_of(t.q, name, "q");
    const bool shared = strength_of(problem.op) == Strength::kShared;
    if (const OptionalTensor& strength = shared ? t.beta : t.b) {
      problem.strength_dtype = dtype_of(*strength, name, shared ? "beta" : "b");
    } else {
      problem.strength_dtype = problem.dtype;  // its absence is refused, whatever the type
    }
    describe_activation(t, direction, numbers.lower_bound);
    problem.state_layout = options.state_v_first ? StateLayout::kVK : StateLayout::kKV;
    if (options.policy) problem.policy = *options.policy;
    problem.scale = numbers.scale;
    execution.device = device_of(t.q, name, "q");
    execution.backend = options.backend;
    if (direction == Direction::kForward) execution.schedule = options.schedule;  // a backward goes by chunks
    if (execution.device.kind == DeviceKind::kCpu) {
      execution.threads = static_cast<int>(torch::stable::get_num_threads());
    }
  }

  /// What the operator reads: the caller's tensors, or what activate() made of them.
  Inputs inputs(const Tensors& t, const Activated& made) const {
    Inputs in = as_given(t);
    const auto put = [](TensorView& place, const TensorView& view) {
      if (view.given()) place = view;
    };
    put(in.q, made.q);
    put(in.k, made.k);
    put(in.g, made.g);
    put(in.beta, made.beta);
    return in;
  }

  Inputs as_given(const Tensors& t) const {
    return {.q = view(t.q, name, "q"),
            .k = view(t.k, name, "k"),
            .v = view(t.v, name, "v"),
            .g = view(t.g, name, "g"),
            .beta = view(t.beta, name, "beta"),
            .b = view(t.b, name, "b"),
            .w = view(t.w, name, "w"),
            .initial_state = view(t.initial_state, name, "initial_state"),
            .cu_seqlens = view(t.cu_seqlens, name, "cu_seqlens")};
  }

  ActivationInputs raw(const Tensors& t) const {
    ActivationInputs in;
    if (activation.normalise) in.raw_q = view(t.q, name, "q"), in.raw_k = view(t.k, name, "k");
    if (activation.gate != Gate::kNone) {
      in.raw_g = view(t.g, name, "g");
      in.A_log = view(t.A_log, name, "A_log");
      in.dt_bias = view(t.dt_bias, name, "dt_bias");
    }
    if (activation.strength) in.raw_beta = view(t.beta, name, "beta");
    return in;
  }

  bool activates() const { return options.activates(problem.op); }
  bool keeps_activated() const { return options.keeps_activated(problem.op); }
  std::size_t activated_bytes() const {
    return static_cast<std::size_t>(problem.B * problem.T * activated_bytes_of_token(activation));
  }
  void activate(const Tensors& t, const Activated& made) const {
    rewy::activate(activation,
                   {.in = raw(t),
                    .q = made.q,
                    .k = made.k,
                    .q_rstd = made.q_rstd,
                    .k_rstd = made.k_rstd,
                    .g = made.g,
                    .beta = made.beta},
                   execution);
  }

  std::array<std::int64_t, 4> state_shape() const {
    const bool kv = problem.state_layout == StateLayout::kKV;
    return {problem.sequences(), problem.HV, kv ? problem.K : problem.V, kv ? problem.V : problem.K};
  }
  DType state_dtype() const { return problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  torch::headeronly::IntHeaderOnlyArrayRef axes(const Tensor& t, const char* argument, std::int64_t count) const {
    if (t.dim() != count)
      throw Error(name, argument, std::to_string(count) + (count == 1 ? " axis" : " axes"), std::to_string(t.dim()));
    return t.sizes();
  }

  Options options;
  Problem problem;
  Activation activation;
  std::string name;  ///< "kda forward", for messages
  Execution execution;

 private:
  /// The parts that are activated inside the call; the operator's strength is then what its sigmoid makes.
  void describe_activation(const Tensors& t, Direction direction, std::optional<double> lower_bound) {
    Activation& a = activation;
    a = {.B = problem.B, .T = problem.T, .H = problem.H, .HV = problem.HV, .K = problem.K};
    a.normalise = options.normalise;
    a.dtype = problem.dtype;
    if (options.activate_gate) {
      a.gate = options.gate(problem.op);
      a.lower_bound = lower_bound;
      if (t.g) a.gate_dtype = dtype_of(*t.g, name, "g");
    }
    if (options.strength(problem.op)) {
      a.strength = true;
      a.allow_negative_eigenvalues = options.allow_neg_eigval;
      a.strength_dtype = problem.strength_dtype;
      validate(problem, direction);  // while it has the type that was passed
      a.beta_dtype = problem.strength_dtype = wide(a.strength_dtype);
    }
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_op(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g,
                                                      OptionalTensor beta, OptionalTensor b, OptionalTensor w,
                                                      OptionalTensor initial_state, OptionalTensor A_log,
                                                      OptionalTensor dt_bias, OptionalTensor cu_seqlens,
                                                      std::optional<double> scale, std::optional<double> lower_bound,
                                                      std::string options) try {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, A_log, dt_bias, cu_seqlens};
  Call call(op, Direction::kForward, tensors, {scale, lower_bound}, Options::parse(options, op));
  const bool differentiated = call.options.policy.has_value(), keeps = call.options.keeps_saved();
  const Device device = call.execution.device;
  const Problem& p = call.problem;
  const DeviceScope scope(device);
  call.execution.stream = scope.stream();
  const Bytes bytes = workspace_bytes(p, Direction::kForward, call.execution);
  Execution by_chunks = call.execution;  // as the backward goes
  by_chunks.schedule = Schedule::kChunks;
  // A backward that nothing serves is refused now, not after the model's forward.
  if (differentiated) static_cast<void>(workspace_bytes(p, Direction::kBackward, by_chunks));

  const std::int64_t o_shape[] = {p.B, p.T, p.HV, p.V}, none[] = {0};
  Tensor activated;
  Activated made;
  if (call.activates()) {
    activated = call.keeps_activated() ? allocate_kept(call.activated_bytes(), device)
                                       : allocate_workspace(call.activated_bytes(), device);
    made = lay_out(call.activation, activated.data_ptr(), device);
  }
  ForwardArgs args{.in = call.inputs(tensors, made)};
  const Tensor o = allocate(o_shape, p.dtype, device);
  args.o = view(o, call.name, "o");
  const Tensor final_state = call.options.output_final_state ? allocate(call.state_shape(), call.state_dtype(), device)
                                                             : allocate(none, call.state_dtype(), device);
  if (call.options.output_final_state) args.final_state = view(final_state, call.name, "final_state");
  const Tensor saved = allocate_kept(keeps ? bytes.saved : 0, device);
  args.saved = bytes_of(saved);
  const Tensor workspace = allocate_workspace(bytes.workspace + (args.saved.empty() ? bytes.unsaved : 0), device);
  call.execution.workspace = bytes_of(workspace);
  // By chunks the forward asks the same of them.
  if (differentiated && !keeps) check_inputs(p, Direction::kBackward, args.in, by_chunks);
  if (call.activates()) {  // all of a call is checked before anything is launched
    validate(p, args, call.execution, bytes);
    check_inputs(p, Direction::kForward, args.in, call.execution);
    call.activate(tensors, made);
  }
  forward(p, args, call.execution);
  if (!call.keeps_activated()) activated = allocate_kept(0, device);
  return {o, final_state, saved, activated};
} catch (const Error& e) {
  refuse_as_passed(e, op);
}

/// The gradients that can be asked for, in the order of their bits in `needed` and of the result.
enum Needed : std::int64_t {
  kQ = 1,
  kK = 2,
  kV = 4,
  kG = 8,
  kBeta = 16,
  kB = 32,
  kW = 64,
  kInitialState = 128,
  kALog = 256,
  kDtBias = 512
};

/// The output gradient as a kernel reads it. Autograd hands over what the caller's loss makes - sum() an expanded
/// scalar - and no caller can change that: where the CUDA kernels could not read it in place, it is copied.
Tensor readable(const Tensor& d_o, Device device, const std::string& name) {
  if (device.kind != DeviceKind::kCuda || d_o.dim() != 4) return d_o;
  constexpr std::int64_t kBytes = 16;
  const auto size = static_cast<std::int64_t>(d_o.element_size());
  bool in_place = d_o.stride(3) == 1 && reinterpret_cast<std::uintptr_t>(d_o.data_ptr()) % kBytes == 0;
  for (int axis = 0; axis < 3; ++axis) in_place = in_place && d_o.stride(axis) * size % kBytes == 0;
  if (in_place) return d_o;
  const auto shape = d_o.sizes();
  Tensor copy = allocate(std::span(shape.data(), shape.size()), dtype_of(d_o, name, "d_o"), device);
  return torch::stable::copy_(copy, d_o);
}

/// Refuses what cannot be bytes that a forward kept: at least `least`, as they lay.
void expect_kept(const Tensor& t, std::int64_t least, const std::string& name, const char* argument) {
  if (t.dim() != 1 || !t.is_contiguous() || t.element_size() != 1) {
    throw Error(name, argument, "bytes without gaps, as the forward left them", "another tensor");
  }
  if (t.numel() < least) {
    throw Error(name, argument, "at least " + std::to_string(least) + " bytes", std::to_string(t.numel()));
  }
}

/// Bytes that a forward kept where the library can read them: hooks on saved tensors may give them back at any address.
Tensor aligned(const Tensor& t, Device device) {
  if (t.numel() == 0 || reinterpret_cast<std::uintptr_t>(t.data_ptr()) % Arena::kAlign == 0) return t;
  Tensor copy = allocate_kept(static_cast<std::size_t>(t.numel()), device);
  return torch::stable::copy_(copy, t);
}

std::vector<Tensor> backward_op(std::string op, OptionalTensor d_o, OptionalTensor d_final_state, Tensor q, Tensor k,
                                Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor b, OptionalTensor w,
                                OptionalTensor initial_state, OptionalTensor A_log, OptionalTensor dt_bias,
                                OptionalTensor cu_seqlens, Tensor saved, Tensor activated, std::int64_t needed,
                                std::optional<double> scale, std::optional<double> lower_bound,
                                std::string options) try {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, A_log, dt_bias, cu_seqlens};
  Call call(op, Direction::kBackward, tensors, {scale, lower_bound}, Options::parse(options, op));
  const Device device = call.execution.device;
  const Problem& p = call.problem;
  const Activation& a = call.activation;
  const std::string& name = call.name;
  const DeviceScope scope(device);
  call.execution.stream = scope.stream();
  const Bytes bytes = workspace_bytes(p, Direction::kBackward, call.execution);

  expect_kept(saved, 0, name, "saved");  // a call without any makes them again
  saved = aligned(saved, device);

  Activated made, d_made;  // d_made: the gradients of `made`
  OptionalTensor d_activated;
  if (call.activates()) {
    if (call.keeps_activated()) {
      expect_kept(activated, p.B * p.T * activated_bytes_of_token(a), name, "activated");
      activated = aligned(activated, device);
    } else {
      activated = allocate_workspace(call.activated_bytes(), device);
    }
    made = lay_out(a, activated.data_ptr(), device);
    d_activated = allocate_workspace(call.activated_bytes(), device);
    d_made = lay_out(a, d_activated->data_ptr(), device);
  }
  BackwardArgs args{.in = call.inputs(tensors, made)};
  if (d_o) {
    d_o = readable(*d_o, device, name);
  } else {  // only the final state has a gradient
    const std::int64_t shape[] = {p.B, p.T, p.HV, p.V};
    Tensor zeros = allocate(shape, p.dtype, device);
    d_o = torch::stable::zero_(zeros);
  }
  args.d_o = view(d_o, name, "d_o");
  args.d_final_state = view(d_final_state, name, "d_final_state");
  args.saved = bytes_of(saved);

  ActivateBackwardArgs raw{.in = call.raw(tensors), .q_rstd = made.q_rstd, .k_rstd = made.k_rstd};
  std::vector<Tensor> gradients;
  gradients.reserve(10);
  const auto give = [&](Needed bit, TensorView& gradient, const TensorView& input) {
    if ((needed & bit) == 0) return;
    gradients.push_back(allocate(input.dims(), input.dtype, device));
    gradient = view(gradients.back(), name, "gradients");
  };
  // The operator's gradient is the result, or a step on the way to that of the raw tensor.
  const auto give_through = [&](Needed bit, TensorView& gradient, const TensorView& input, const TensorView& step,
                                TensorView& d_raw, const TensorView& raw_input, TensorView& of_step) {
    if (!step.given()) return give(bit, gradient, input);
    give(bit, d_raw, raw_input);
    if (d_raw.given()) gradient = of_step = step;
  };
  give_through(kQ, args.dq, args.in.q, d_made.q, raw.d_raw_q, raw.in.raw_q, raw.dq);
  give_through(kK, args.dk, args.in.k, d_made.k, raw.d_raw_k, raw.in.raw_k, raw.dk);
  give(kV, args.dv, args.in.v);
  give_through(kG, args.dg, args.in.g, d_made.g, raw.d_raw_g, raw.in.raw_g, raw.dg);
  give_through(kBeta, args.dbeta, args.in.beta, d_made.beta, raw.d_raw_beta, raw.in.raw_beta, raw.dbeta);
  give(kB, args.db, args.in.b);
  give(kW, args.dw, args.in.w);
  give(kInitialState, args.d_initial_state, args.in.initial_state);
  give(kALog, raw.d_A_log, raw.in.A_log);
  give(kDtBias, raw.d_dt_bias, raw.in.dt_bias);
  const bool sums = raw.d_A_log.given() || raw.d_dt_bias.given();
  if (sums) args.dg = raw.dg = d_made.g;

  std::size_t workspace_size =
      bytes.workspace + (args.saved.empty() ? bytes.unsaved : 0) + (args.dg.given() ? 0 : bytes.without_dg);
  if (sums) {
    workspace_size = std::max(workspace_size, activation_workspace_bytes(a, Direction::kBackward, call.execution));
  }
  const Tensor workspace = allocate_workspace(workspace_size, device);
  call.execution.workspace = bytes_of(workspace);
  if (call.activates() && !call.keeps_activated()) {  // as in the forward
    validate(p, args, call.execution, bytes);
    check_inputs(p, Direction::kBackward, args.in, call.execution);
    call.activate(tensors, made);
  }
  backward(p, args, call.execution);
  if (call.activates()) activate_backward(a, raw, call.execution);
  return gradients;
} catch (const Error& e) {
  refuse_as_passed(e, op);
}

std::string explain_op(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                       OptionalTensor b, OptionalTensor w, OptionalTensor initial_state, OptionalTensor A_log,
                       OptionalTensor dt_bias, OptionalTensor cu_seqlens, std::optional<double> scale,
                       std::optional<double> lower_bound, std::string options) try {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, A_log, dt_bias, cu_seqlens};
  // What a call refuses is refused here, in the call's order.
  const Options words = Options::parse(options, op);
  const Call forward(op, Direction::kForward, tensors, {scale, lower_bound}, words);
  const Call backward(op, Direction::kBackward, tensors, {scale, lower_bound}, words);
  const Device device = forward.execution.device;
  const DeviceScope scope(device);
  using Explained = std::pair<std::string, Explanation>;
  const auto explained = [](const auto& description, Direction direction, const Call& call) {
    return Explained(operation(description, direction), explain(description, direction, call.execution));
  };
  const Explained operators[] = {explained(forward.problem, Direction::kForward, forward),
                                 explained(backward.problem, Direction::kBackward, backward)};
  alignas(64) static std::byte anywhere[1];  // nothing is read or written
  const Inputs inputs =
      forward.inputs(tensors, forward.activates() ? lay_out(forward.activation, anywhere, device) : Activated{});
  validate(forward.problem, Direction::kForward, inputs, forward.execution);
  if (!operators[0].second.backend.empty()) {
    check_inputs(forward.problem, Direction::kForward, inputs, forward.execution);
  }
  std::vector<Explained> rows;
  if (forward.activates()) {
    rows.push_back(explained(forward.activation, Direction::kForward, forward));
    validate(forward.activation, Direction::kForward, forward.raw(tensors), forward.execution);
  }
  rows.push_back(operators[0]);
  if (backward.activates()) rows.push_back(explained(backward.activation, Direction::kBackward, backward));
  rows.push_back(operators[1]);
  std::string text;
  for (const auto& [name, explanation] : rows) {
    for (const Explanation::Row& row : explanation.rows) {
      text += name + ": " + row.backend + " " + row.answer() + "\n";
    }
    if (explanation.backend.empty()) text += name + ": no backend serves it\n";
  }
  return text;
} catch (const Error& e) {
  refuse_as_passed(e, op);
}

}  // namespace
}  // namespace rewy::torch_ops

// What `options` may say is in options.h.
STABLE_TORCH_LIBRARY(rewy, m) {
  m.def(
      "forward(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? b, Tensor? w, "
      "Tensor? initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? cu_seqlens=None, "
      "float? scale=None, float? lower_bound=None, str options=\"\") "
      "-> (Tensor o, Tensor final_state, Tensor saved, Tensor activated)");
  m.def(
      "backward(str op, Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
      "Tensor? b, Tensor? w, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, Tensor saved, "
      "Tensor activated, int needed, float? scale=None, float? lower_bound=None, str options=\"\") -> Tensor[]");
  m.def(
      "explain(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? b, Tensor? w, "
      "Tensor? initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? cu_seqlens=None, "
      "float? scale=None, float? lower_bound=None, str options=\"\") -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rewy, CPU, m) {
  m.impl("forward", TORCH_BOX(&rewy::torch_ops::forward_op));
  m.impl("backward", TORCH_BOX(&rewy::torch_ops::backward_op));
  m.impl("explain", TORCH_BOX(&rewy::torch_ops::explain_op));
}

// Registered in builds without CUDA too: the library says then that no backend serves such tensors.
STABLE_TORCH_LIBRARY_IMPL(rewy, CUDA, m) {
  m.impl("forward", TORCH_BOX(&rewy::torch_ops::forward_op));
  m.impl("backward", TORCH_BOX(&rewy::torch_ops::backward_op));
  m.impl("explain", TORCH_BOX(&rewy::torch_ops::explain_op));
}
