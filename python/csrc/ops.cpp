// The operators torch.ops.rewy.forward, backward and explain: tensors become views, PyTorch's allocator gives outputs
// and workspace, the library does the rest. What a call may look like is checked by the library alone.
#include "tensors.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/backend.h"
#include "common/validate.h"
#include "saved.h"

namespace rewy::torch_ops {
namespace {

/// What the tensors of a call are: those of forward() and backward() that both have, in the order of the schemas.
struct Tensors {
  const Tensor &q, &k, &v;
  const OptionalTensor &g, &beta, &b, &w, &initial_state, &cu_seqlens;
};

struct Options {
  std::optional<double> scale;
  bool state_v_first;
  const std::string& policy;  ///< "none", "recompute" or "save"
  const std::string& backend;
};

/// A problem read off the tensors. Of their shapes only the axes of those it is read from are counted here: what they
/// must be is the library's to say.
struct Call {
  Call(const std::string& op, Direction direction, const Tensors& t, const Options& options) {
    problem.op = parse_operator(op);
    name = operation(problem, direction);
    const auto q = axes(t.q, "q", 4), v = axes(t.v, "v", 4);
    problem.B = q[0];
    problem.T = q[1];
    problem.H = q[2];
    problem.K = q[3];
    problem.HV = v[2];
    problem.V = v[3];
    if (t.cu_seqlens) problem.segments = axes(*t.cu_seqlens, "cu_seqlens", 1)[0] - 1;
    problem.dtype = dtype_of(t.q, name, "q");
    const bool shared = strength_of(problem.op) == Strength::kShared;
    if (const OptionalTensor& strength = shared ? t.beta : t.b) {
      problem.strength_dtype = dtype_of(*strength, name, shared ? "beta" : "b");
    } else {
      problem.strength_dtype = problem.dtype;  // its absence is refused, whatever the type
    }
    problem.state_layout = options.state_v_first ? StateLayout::kVK : StateLayout::kKV;
    keeps = options.policy != "none";
    if (keeps) problem.policy = parse_policy(options.policy);
    problem.scale = options.scale;
    execution.device = device_of(t.q, name, "q");
    execution.backend = parse_backend(options.backend);
    if (execution.device.kind == DeviceKind::kCpu) {
      execution.threads = static_cast<int>(torch::stable::get_num_threads());
    }
  }

  Inputs inputs(const Tensors& t) const {
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

  std::array<std::int64_t, 4> state_shape() const {
    const bool kv = problem.state_layout == StateLayout::kKV;
    return {problem.sequences(), problem.HV, kv ? problem.K : problem.V, kv ? problem.V : problem.K};
  }
  DType state_dtype() const { return problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  torch::headeronly::IntHeaderOnlyArrayRef axes(const Tensor& t, const char* argument, std::int64_t count) const {
    if (t.dim() != count) throw Error(name, argument, std::to_string(count) + " axes", std::to_string(t.dim()));
    return t.sizes();
  }

  Problem problem;
  std::string name;  ///< "kda forward", for messages
  Execution execution;
  bool keeps = true;  ///< whether the forward keeps what the backward can reuse
};

std::tuple<Tensor, Tensor, Tensor> forward_op(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g,
                                              OptionalTensor beta, OptionalTensor b, OptionalTensor w,
                                              OptionalTensor initial_state, OptionalTensor cu_seqlens,
                                              std::optional<double> scale, bool output_final_state, bool state_v_first,
                                              std::string policy, std::string backend) {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, cu_seqlens};
  Call call(op, Direction::kForward, tensors, {scale, state_v_first, policy, backend});
  const Device device = call.execution.device;
  const Problem& p = call.problem;
  ForwardArgs args{.in = call.inputs(tensors)};
  const DeviceScope scope(device);
  call.execution.stream = scope.stream();
  const Bytes bytes = workspace_bytes(p, Direction::kForward, call.execution);
  // A backward that nothing serves is refused now, not after the model's forward.
  if (call.keeps) static_cast<void>(workspace_bytes(p, Direction::kBackward, call.execution));

  const std::int64_t o_shape[] = {p.B, p.T, p.HV, p.V}, none[] = {0};
  const Tensor o = allocate(o_shape, p.dtype, device);
  args.o = view(o, call.name, "o");
  const Tensor final_state = output_final_state ? allocate(call.state_shape(), call.state_dtype(), device)
                                                : allocate(none, call.state_dtype(), device);
  if (output_final_state) args.final_state = view(final_state, call.name, "final_state");
  const Tensor saved =
      call.keeps ? allocate_kept(saved_shape(p, bytes, call.execution), device) : allocate_kept(none, device);
  args.saved = bytes_of(saved);
  const Tensor workspace = allocate_workspace(bytes.workspace + (args.saved.empty() ? bytes.unsaved : 0), device);
  call.execution.workspace = bytes_of(workspace);
  forward(p, args, call.execution);
  return {o, final_state, saved};
}

/// The gradients that can be asked for, in the order of their bits in `needed` and of the result.
enum Needed : std::int64_t { kQ = 1, kK = 2, kV = 4, kG = 8, kBeta = 16, kB = 32, kW = 64, kInitialState = 128 };

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

std::vector<Tensor> backward_op(std::string op, OptionalTensor d_o, OptionalTensor d_final_state, Tensor q, Tensor k,
                                Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor b, OptionalTensor w,
                                OptionalTensor initial_state, OptionalTensor cu_seqlens, Tensor saved,
                                std::optional<double> scale, bool state_v_first, std::string policy,
                                std::int64_t needed, std::string backend) {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, cu_seqlens};
  Call call(op, Direction::kBackward, tensors, {scale, state_v_first, policy, backend});
  const Device device = call.execution.device;
  const Problem& p = call.problem;
  const std::string& name = call.name;
  BackwardArgs args{.in = call.inputs(tensors)};
  const DeviceScope scope(device);
  call.execution.stream = scope.stream();
  const Bytes bytes = workspace_bytes(p, Direction::kBackward, call.execution);

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

  std::vector<Tensor> gradients;
  gradients.reserve(8);
  const auto give = [&](Needed bit, TensorView& gradient, const TensorView& input) {
    if ((needed & bit) == 0) return;
    gradients.push_back(allocate(input.dims(), input.dtype, device));
    gradient = view(gradients.back(), name, "gradients");
  };
  give(kQ, args.dq, args.in.q);
  give(kK, args.dk, args.in.k);
  give(kV, args.dv, args.in.v);
  give(kG, args.dg, args.in.g);
  give(kBeta, args.dbeta, args.in.beta);
  give(kB, args.db, args.in.b);
  give(kW, args.dw, args.in.w);
  give(kInitialState, args.d_initial_state, args.in.initial_state);

  const Tensor workspace = allocate_workspace(
      bytes.workspace + (args.saved.empty() ? bytes.unsaved : 0) + (args.dg.given() ? 0 : bytes.without_dg), device);
  call.execution.workspace = bytes_of(workspace);
  backward(p, args, call.execution);
  return gradients;
}

std::string explain_op(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                       OptionalTensor b, OptionalTensor w, OptionalTensor initial_state, OptionalTensor cu_seqlens,
                       std::optional<double> scale, bool state_v_first, std::string policy, std::string backend) {
  const Tensors tensors{q, k, v, g, beta, b, w, initial_state, cu_seqlens};
  std::string text;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Call call(op, direction, tensors, {scale, state_v_first, policy, backend});
    const DeviceScope scope(call.execution.device);
    const Explanation explanation = explain(call.problem, direction, call.execution);
    for (const Explanation::Row& row : explanation.rows) {
      text += call.name + ": " + row.backend + " " + row.answer() + "\n";
    }
    if (explanation.backend.empty()) text += call.name + ": no backend serves it\n";
  }
  return text;
}

}  // namespace
}  // namespace rewy::torch_ops

STABLE_TORCH_LIBRARY(rewy, m) {
  m.def(
      "forward(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? b, Tensor? w, "
      "Tensor? initial_state, Tensor? cu_seqlens, float? scale=None, bool output_final_state=False, "
      "bool state_v_first=False, str policy=\"recompute\", str backend=\"auto\") "
      "-> (Tensor o, Tensor final_state, Tensor saved)");
  m.def(
      "backward(str op, Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
      "Tensor? b, Tensor? w, Tensor? initial_state, Tensor? cu_seqlens, Tensor saved, float? scale, "
      "bool state_v_first, str policy, int needed, str backend=\"auto\") -> Tensor[]");
  m.def(
      "explain(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? b, Tensor? w, "
      "Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool state_v_first, str policy, str backend) -> str");
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
