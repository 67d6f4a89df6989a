#include "common/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>

#include "common/checker.h"

namespace rewy {
namespace {

/// Shapes and types of a problem's tensors, each named once.
struct Call : Checker {
  const Problem& p;
  const Execution& execution;
  std::array<DType, 1> data, strength;  // q k v o; beta b w
  std::span<const DType> wide;          // the gate and the states

  Call(const Problem& problem, Direction direction, const Execution& execution_)
      : Checker(operation(problem, direction), execution_.device),
        p(problem),
        execution(execution_),
        data{p.dtype},
        strength{p.strength_dtype} {
    static constexpr DType kWide[] = {DType::kF32, DType::kF64};
    wide = std::span(kWide).first(p.dtype == DType::kF64 ? 2 : 1);
  }

  void qk(const TensorView& t, const char* argument, Need need, bool output = false) {
    expect(t, argument, need, data, {p.B, p.T, p.H, p.K}, output);
  }
  void v(const TensorView& t, const char* argument, Need need, bool output = false) {
    expect(t, argument, need, data, {p.B, p.T, p.HV, p.V}, output);
  }
  void gate(const TensorView& t, const char* argument, Need need, bool output = false) {
    switch (gate_of(p.op)) {
      case Gate::kNone: return absent(t, argument, std::string(name(p.op)) + " has no gate");
      case Gate::kScalar: return expect(t, argument, need, wide, {p.B, p.T, p.HV}, output);
      case Gate::kVector: return expect(t, argument, need, wide, {p.B, p.T, p.HV, p.K}, output);
    }
  }
  void shared_strength(const TensorView& t, const char* argument, Need need, bool output = false) {
    if (strength_of(p.op) != Strength::kShared) {
      return absent(t, argument, std::string(name(p.op)) + " has b and w instead of beta");
    }
    expect(t, argument, need, strength, {p.B, p.T, p.HV}, output);
  }
  void own_strength(const TensorView& t, const char* argument, std::int64_t width, Need need, bool output = false) {
    if (strength_of(p.op) != Strength::kIndependent) {
      return absent(t, argument, std::string(name(p.op)) + " has beta instead of b and w");
    }
    expect(t, argument, need, strength, {p.B, p.T, p.HV, width}, output);
  }
  void state(const TensorView& t, const char* argument, bool output = false) {
    const bool kv = p.state_layout == StateLayout::kKV;
    expect(t, argument, Need::kOptional, wide, {p.sequences(), p.HV, kv ? p.K : p.V, kv ? p.V : p.K}, output);
  }

  void workspace(const Bytes& bytes, bool saved, bool dg) {
    const std::size_t unsaved = saved ? 0 : bytes.unsaved, without_dg = dg ? 0 : bytes.without_dg;
    memory(execution.workspace, "workspace", bytes.workspace + unsaved + without_dg, true);
  }

  void inputs(const Inputs& in) {
    qk(in.q, "q", Need::kRequired);
    qk(in.k, "k", Need::kRequired);
    v(in.v, "v", Need::kRequired);
    gate(in.g, "g", Need::kRequired);
    shared_strength(in.beta, "beta", Need::kRequired);
    own_strength(in.b, "b", p.K, Need::kRequired);
    own_strength(in.w, "w", p.V, Need::kRequired);
    state(in.initial_state, "initial_state");
    offsets(in.cu_seqlens);
  }

  void offsets(const TensorView& t) {
    static constexpr DType kInts[] = {DType::kI32, DType::kI64};
    if (!p.segments) return absent(t, "cu_seqlens", "the problem has no segments");
    expect(t, "cu_seqlens", Need::kRequired, kInts, {*p.segments + 1});
    if (t.device.kind != DeviceKind::kCpu) return;  // reading them would synchronise the device
    const auto at = [&](std::int64_t i) -> std::int64_t {
      const std::int64_t offset = i * t.strides[0];
      return t.dtype == DType::kI32 ? static_cast<const std::int32_t*>(t.data)[offset]
                                    : static_cast<const std::int64_t*>(t.data)[offset];
    };
    const auto entry = [](std::int64_t i) { return "entry " + std::to_string(i); };
    if (at(0) != 0) refuse("cu_seqlens", "entry 0 to be 0", std::to_string(at(0)));
    for (std::int64_t i = 1, before = 0; i <= *p.segments; ++i) {
      const std::int64_t now = at(i);
      if (now < before) {
        refuse("cu_seqlens", entry(i) + " of at least the " + std::to_string(before) + " of " + entry(i - 1),
               std::to_string(now));
      }
      if (now > p.T) refuse("cu_seqlens", entry(i) + " of at most T = " + std::to_string(p.T), std::to_string(now));
      before = now;
    }
  }
};

}  // namespace

std::string operation(const Problem& p, Direction direction) {
  return std::string(name(p.op)) + " " + std::string(name(direction));
}

void validate(const Problem& p, Direction direction, const Execution& execution) {
  const Checker check(operation(p, direction), execution.device);
  check.known("op", name(p.op));
  check.known("state_layout", name(p.state_layout));
  check.known("policy", name(p.policy));
  check.known("variant.graph", name(p.variant.graph));
  check.known("variant.intra", name(p.variant.intra));
  check.known("variant.gram", name(p.variant.gram));
  check.known("device", name(execution.device.kind));
  check.known("backend", name(execution.backend));
  check.known("schedule", name(execution.schedule));

  check.at_least("B", p.B, 1);
  check.at_least("T", p.T, 0);
  check.at_least("H", p.H, 1);
  check.at_least("HV", p.HV, 1);
  check.at_least("K", p.K, 1);
  check.at_least("V", p.V, 1);
  if (p.HV % p.H != 0) check.refuse("HV", "a multiple of H = " + std::to_string(p.H), std::to_string(p.HV));
  if (p.segments) {
    check.at_least("segments", *p.segments, 0);
    if (p.B != 1) check.refuse("B", "1 with packed sequences", std::to_string(p.B));
  }

  // Element counts of the longest tensors and of all chunk states.
  const std::int64_t longest = std::max({p.K, p.V, kChunk});
  check.product("B, T, HV and K, V", {p.B, std::max<std::int64_t>(p.T, kChunk), p.HV, longest});
  const std::int64_t chunks = check.product("B, T", {p.B, p.T / kChunk + 1});
  check.product("sequences, HV, K, V", {p.sequences(), p.HV, longest, longest});
  check.product("chunks, HV, K, V", {chunks, p.HV, p.K, p.V});

  check.floating("dtype", p.dtype);
  check.floating("strength_dtype", p.strength_dtype);
  if ((p.dtype == DType::kF64) != (p.strength_dtype == DType::kF64)) {
    const std::string others = p.dtype == DType::kF64 ? "f64" : "f32, bf16 or f16";
    check.refuse("strength_dtype", others + " with dtype " + std::string(name(p.dtype)),
                 std::string(name(p.strength_dtype)));
  }
  if (p.scale && !std::isfinite(*p.scale)) check.refuse("scale", "a finite number", std::to_string(*p.scale));

  check.execution(execution);
}

void validate(const Problem& p, Direction direction, const Inputs& in, const Execution& execution) {
  Call(p, direction, execution).inputs(in);
}

void validate(const Problem& p, const ForwardArgs& args, const Execution& execution, const Bytes& bytes) {
  Call call(p, Direction::kForward, execution);
  call.inputs(args.in);
  call.v(args.o, "o", Need::kRequired, true);
  call.state(args.final_state, "final_state", true);
  if (!args.saved.empty()) call.memory(args.saved, "saved", bytes.saved, true);
  call.workspace(bytes, !args.saved.empty(), true);
  call.disjoint();
}

void validate(const Problem& p, const BackwardArgs& args, const Execution& execution, const Bytes& bytes) {
  Call call(p, Direction::kBackward, execution);
  call.inputs(args.in);
  call.v(args.d_o, "d_o", Need::kRequired);
  call.state(args.d_final_state, "d_final_state");
  call.qk(args.dq, "dq", Need::kOptional, true);
  call.qk(args.dk, "dk", Need::kOptional, true);
  call.v(args.dv, "dv", Need::kOptional, true);
  call.gate(args.dg, "dg", Need::kOptional, true);
  call.shared_strength(args.dbeta, "dbeta", Need::kOptional, true);
  call.own_strength(args.db, "db", p.K, Need::kOptional, true);
  call.own_strength(args.dw, "dw", p.V, Need::kOptional, true);
  if (!args.in.initial_state.given()) {
    call.absent(args.d_initial_state, "d_initial_state", "there is no initial_state and no gradient is invented");
  }
  call.state(args.d_initial_state, "d_initial_state", true);
  if (!args.saved.empty()) call.memory(args.saved, "saved", bytes.saved, false);
  call.workspace(bytes, !args.saved.empty(), args.dg.given());
  call.disjoint();
}

}  // namespace rewy
