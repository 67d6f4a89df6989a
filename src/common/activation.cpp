#include "common/activation.h"

#include <cmath>
#include <vector>

#include "common/checker.h"
#include "common/choice.h"

namespace rewy {
namespace {

// Fastest first; the reference, which serves everything on the CPU, last.
constexpr const ActivationEntry* kTable[] = {
#ifdef REWY_CUDA
    &kCudaActivation,
#endif
    &kCpuActivation, &kReferenceActivation};
constexpr Entries<ActivationEntry> kEntries(kTable);

/// Shapes and types of an activation's tensors, each named once.
struct Call : Checker {
  const Activation& a;

  Call(const Activation& activation, Direction direction, const Execution& execution)
      : Checker(operation(activation, direction), execution.device), a(activation) {}

  void qk(const TensorView& t, const char* argument, Need need, bool output = false) {
    if (!a.normalise) return absent(t, argument, "nothing is normalised");
    const DType types[] = {a.dtype};
    expect(t, argument, need, types, {a.B, a.T, a.H, a.K}, output);
  }
  void rstd(const TensorView& t, const char* argument, Need need, bool output = false) {
    if (!a.normalise) return absent(t, argument, "nothing is normalised");
    expect(t, argument, need, wide(a.dtype), {a.B, a.T, a.H}, output);
  }
  void gate(const TensorView& t, const char* argument, Need need, const std::vector<DType>& types,
            bool output = false) {
    switch (a.gate) {
      case Gate::kNone: return no_gate(t, argument);
      case Gate::kScalar: return expect(t, argument, need, types, {a.B, a.T, a.HV}, output);
      case Gate::kVector: return expect(t, argument, need, types, {a.B, a.T, a.HV, a.K}, output);
    }
  }
  void raw_gate(const TensorView& t, const char* argument, Need need, bool output = false) {
    gate(t, argument, need, {a.gate_dtype}, output);
  }
  void decay(const TensorView& t, const char* argument, Need need, bool output = false) {
    gate(t, argument, need, wide(a.gate_dtype), output);
  }
  void parameter(const TensorView& t, const char* argument, Need need, std::int64_t count, bool output = false) {
    if (a.gate == Gate::kNone) return no_gate(t, argument);
    expect(t, argument, need, wide(a.gate_dtype), {count}, output);
  }
  void beta(const TensorView& t, const char* argument, Need need, DType type, bool output = false) {
    if (!a.strength) return absent(t, argument, "there is no strength");
    const DType types[] = {type};
    expect(t, argument, need, types, {a.B, a.T, a.HV}, output);
  }

  void inputs(const ActivationInputs& in, bool q, bool k, bool g, bool strength) {
    const auto need = [](bool used) { return used ? Need::kRequired : Need::kOptional; };
    qk(in.raw_q, "raw_q", need(q));
    qk(in.raw_k, "raw_k", need(k));
    raw_gate(in.raw_g, "raw_g", need(g));
    parameter(in.A_log, "A_log", need(g && !a.lower_bound), a.HV);
    parameter(in.dt_bias, "dt_bias", Need::kOptional, gate_width(a));
    beta(in.raw_beta, "raw_beta", need(strength), a.strength_dtype);
  }

 private:
  static std::vector<DType> wide(DType type) {
    return type == DType::kF64 ? std::vector{DType::kF32, DType::kF64} : std::vector{DType::kF32};
  }
  void no_gate(const TensorView& t, const char* argument) const { absent(t, argument, "there is no gate"); }
};

}  // namespace

std::string operation(const Activation&, Direction direction) {
  return "activation " + std::string(name(direction));
}

std::string describe(const Activation& a, const Execution& execution) {
  std::string text = "an activation of ";
  const auto part = [&](bool there, const char* what, DType type) {
    if (there) text += what + std::string(name(type)) + ", ";
  };
  part(a.normalise, "dtype ", a.dtype);
  part(a.gate != Gate::kNone, "gate_dtype ", a.gate_dtype);
  part(a.strength, "strength_dtype ", a.strength_dtype);
  return text + "K = " + std::to_string(a.K) + " on " + std::string(name(execution.device.kind));
}

void validate(const Activation& a, Direction direction, const Execution& execution) {
  const Checker check(operation(a, direction), execution.device);
  check.known("device", name(execution.device.kind));
  check.known("backend", name(execution.backend));
  if (a.gate != Gate::kNone && a.gate != Gate::kScalar && a.gate != Gate::kVector) {
    check.refuse("gate", "a value of its enum", "another one");
  }
  const bool wide = a.normalise || a.gate == Gate::kVector;
  check.at_least("B", a.B, 1);
  check.at_least("T", a.T, 0);
  check.at_least("H", a.H, 1);
  check.at_least("HV", a.HV, 1);
  check.at_least("K", a.K, wide ? 1 : 0);
  const std::int64_t heads = std::max(a.H, a.HV);
  check.product("B, T, heads and K", {a.B, std::max(a.T, kTokenTile), heads, std::max<std::int64_t>(a.K, 1)});

  check.floating("dtype", a.dtype);
  check.floating("gate_dtype", a.gate_dtype);
  check.floating("strength_dtype", a.strength_dtype);
  if (a.beta_dtype != DType::kF32 && a.beta_dtype != a.strength_dtype) {
    const DType types[] = {DType::kF32, a.strength_dtype};
    check.refuse("beta_dtype", one_of({types, a.strength_dtype == DType::kF32 ? 1u : 2u}),
                 std::string(name(a.beta_dtype)));
  }
  if (a.lower_bound && a.gate == Gate::kNone) check.refuse("lower_bound", "none, as there is no gate", "one");
  if (a.lower_bound && !(std::isfinite(*a.lower_bound) && *a.lower_bound < 0)) {
    check.refuse("lower_bound", "a finite number below 0", std::to_string(*a.lower_bound));
  }
  check.execution(execution);
}

void validate(const Activation& a, Direction direction, const ActivationInputs& in, const Execution& execution) {
  Call(a, direction, execution).inputs(in, a.normalise, a.normalise, a.gate != Gate::kNone, a.strength);
}

void validate(const Activation& a, const ActivateArgs& args, const Execution& execution, std::size_t bytes) {
  Call call(a, Direction::kForward, execution);
  call.inputs(args.in, a.normalise, a.normalise, a.gate != Gate::kNone, a.strength);
  call.qk(args.q, "q", Need::kRequired, true);
  call.qk(args.k, "k", Need::kRequired, true);
  call.rstd(args.q_rstd, "q_rstd", Need::kOptional, true);
  call.rstd(args.k_rstd, "k_rstd", Need::kOptional, true);
  call.decay(args.g, "g", Need::kRequired, true);
  call.beta(args.beta, "beta", Need::kRequired, a.beta_dtype, true);
  call.memory(execution.workspace, "workspace", bytes, true);
  call.disjoint();
}

void validate(const Activation& a, const ActivateBackwardArgs& args, const Execution& execution, std::size_t bytes) {
  Call call(a, Direction::kBackward, execution);
  const auto need = [](bool used) { return used ? Need::kRequired : Need::kOptional; };
  const bool q = args.d_raw_q.given(), k = args.d_raw_k.given(), strength = args.d_raw_beta.given();
  const bool sums = args.d_A_log.given() || args.d_dt_bias.given(), g = args.d_raw_g.given() || sums;
  call.inputs(args.in, q, k, g, strength);
  call.rstd(args.q_rstd, "q_rstd", need(q));
  call.rstd(args.k_rstd, "k_rstd", need(k));
  call.qk(args.dq, "dq", need(q));
  call.qk(args.dk, "dk", need(k));
  call.decay(args.dg, "dg", need(g));
  call.beta(args.dbeta, "dbeta", need(strength), a.beta_dtype);
  call.qk(args.d_raw_q, "d_raw_q", Need::kOptional, true);
  call.qk(args.d_raw_k, "d_raw_k", Need::kOptional, true);
  call.raw_gate(args.d_raw_g, "d_raw_g", Need::kOptional, true);
  if (!args.in.A_log.given()) call.absent(args.d_A_log, "d_A_log", "there is no A_log and no gradient is invented");
  call.parameter(args.d_A_log, "d_A_log", Need::kOptional, a.HV, true);
  if (!args.in.dt_bias.given()) {
    call.absent(args.d_dt_bias, "d_dt_bias", "there is no dt_bias and no gradient is invented");
  }
  call.parameter(args.d_dt_bias, "d_dt_bias", Need::kOptional, gate_width(a), true);
  call.beta(args.d_raw_beta, "d_raw_beta", Need::kOptional, a.strength_dtype, true);
  call.memory(execution.workspace, "workspace", sums ? bytes : 0, true);
  call.disjoint();
}

Explanation explain(const Activation& a, Direction direction, const Execution& execution) {
  validate(a, direction, execution);
  return look_up(kEntries, a, direction, execution).explanation;
}

std::size_t activation_workspace_bytes(const Activation& a, Direction direction, const Execution& execution) {
  validate(a, direction, execution);
  return choose_entry(kEntries, a, direction, execution).bytes(a, direction, execution);
}

void activate(const Activation& a, const ActivateArgs& args, const Execution& execution) {
  validate(a, Direction::kForward, execution);
  const ActivationEntry& entry = choose_entry(kEntries, a, Direction::kForward, execution);
  validate(a, args, execution, entry.bytes(a, Direction::kForward, execution));
  entry.forward(a, args, execution);
}

void activate_backward(const Activation& a, const ActivateBackwardArgs& args, const Execution& execution) {
  validate(a, Direction::kBackward, execution);
  const ActivationEntry& entry = choose_entry(kEntries, a, Direction::kBackward, execution);
  validate(a, args, execution, entry.bytes(a, Direction::kBackward, execution));
  entry.backward(a, args, execution);
}

}  // namespace rewy
