// What activations refuse, in whose words, and who serves them.
#include "rewy/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace rewy {
namespace {

template <class Call>
Error refusal(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error("nothing", "thrown", "", "");
}

Activation all_parts() {
  return {.B = 2,
          .T = 3,
          .H = 2,
          .HV = 4,
          .K = 8,
          .normalise = true,
          .dtype = DType::kBF16,
          .gate = Gate::kVector,
          .gate_dtype = DType::kF16,
          .strength = true,
          .strength_dtype = DType::kBF16};
}

/// A whole call in memory of its own; `spoil` changes what is to be refused.
struct Call {
  Activation a = all_parts();
  Execution execution;
  ActivateArgs forward;
  ActivateBackwardArgs backward;

  Call() {
    const DType half = DType::kBF16, f32 = DType::kF32;
    ActivationInputs in{.raw_q = tensor(half, {2, 3, 2, 8}),
                        .raw_k = tensor(half, {2, 3, 2, 8}),
                        .raw_g = tensor(DType::kF16, {2, 3, 4, 8}),
                        .A_log = tensor(f32, {4}),
                        .dt_bias = tensor(f32, {32}),
                        .raw_beta = tensor(half, {2, 3, 4})};
    forward = {.in = in,
               .q = tensor(half, {2, 3, 2, 8}),
               .k = tensor(half, {2, 3, 2, 8}),
               .q_rstd = tensor(f32, {2, 3, 2}),
               .k_rstd = tensor(f32, {2, 3, 2}),
               .g = tensor(f32, {2, 3, 4, 8}),
               .beta = tensor(f32, {2, 3, 4})};
    backward = {.in = in,
                .q_rstd = forward.q_rstd,
                .k_rstd = forward.k_rstd,
                .dq = tensor(half, {2, 3, 2, 8}),
                .dk = tensor(half, {2, 3, 2, 8}),
                .dg = tensor(f32, {2, 3, 4, 8}),
                .dbeta = tensor(f32, {2, 3, 4}),
                .d_raw_q = tensor(half, {2, 3, 2, 8}),
                .d_raw_k = tensor(half, {2, 3, 2, 8}),
                .d_raw_g = tensor(DType::kF16, {2, 3, 4, 8}),
                .d_A_log = tensor(f32, {4}),
                .d_dt_bias = tensor(f32, {32}),
                .d_raw_beta = tensor(half, {2, 3, 4})};
    execution.workspace = {memory_ + kBytes / 2, kBytes / 2};
  }
  TensorView tensor(DType t, std::initializer_list<std::int64_t> shape) {
    const TensorView view(memory_ + used_, t, shape);
    used_ += (static_cast<std::size_t>(view.elements()) * size_of(t) + 63) / 64 * 64;
    return view;
  }
  Error refused_forward() {
    return refusal([&] { activate(a, forward, execution); });
  }
  Error refused_backward() {
    return refusal([&] { activate_backward(a, backward, execution); });
  }

 private:
  static constexpr std::size_t kBytes = 1 << 16;
  alignas(64) std::byte memory_[kBytes] = {};
  std::size_t used_ = 0;
};

std::string text(const Error& e) {
  return e.what();
}

Error refused(auto&& change) {
  Activation a = all_parts();
  change(a);
  return refusal([&] { activation_workspace_bytes(a, Direction::kBackward); });
}

TEST(ActivationRefuses, WhatIsNoActivation) {
  const std::string head = "activation backward: argument ";
  EXPECT_EQ(text(refused([](Activation& a) { a.B = 0; })), head + "'B': expected at least 1, got 0");
  EXPECT_EQ(text(refused([](Activation& a) { a.T = -1; })), head + "'T': expected at least 0, got -1");
  EXPECT_EQ(text(refused([](Activation& a) { a.H = 0; })), head + "'H': expected at least 1, got 0");
  EXPECT_EQ(text(refused([](Activation& a) { a.HV = 0; })), head + "'HV': expected at least 1, got 0");
  EXPECT_EQ(text(refused([](Activation& a) { a.K = 0; })), head + "'K': expected at least 1, got 0");
  EXPECT_EQ(text(refused([](Activation& a) { a.dtype = DType::kI32; })),
            head + "'dtype': expected f64, f32, bf16 or f16, got i32");
  EXPECT_EQ(text(refused([](Activation& a) { a.gate_dtype = DType::kI64; })),
            head + "'gate_dtype': expected f64, f32, bf16 or f16, got i64");
  EXPECT_EQ(text(refused([](Activation& a) { a.beta_dtype = DType::kF16; })),
            head + "'beta_dtype': expected f32 or bf16, got f16");
  EXPECT_EQ(text(refused([](Activation& a) { a.lower_bound = 0; })),
            head + "'lower_bound': expected a finite number below 0, got 0.000000");
  EXPECT_EQ(refused([](Activation& a) { a.lower_bound = -INFINITY; }).argument(), "lower_bound");
  EXPECT_EQ(text(refused([](Activation& a) { a.gate = Gate::kNone, a.lower_bound = -5; })),
            head + "'lower_bound': expected none, as there is no gate, got one");
  EXPECT_EQ(refused([](Activation& a) { a.gate = static_cast<Gate>(7); }).argument(), "gate");
  EXPECT_EQ(refused([](Activation& a) { a.T = std::int64_t{1} << 50; }).argument(), "B, T, heads and K");
  // A width is nobody's business where nothing has one.
  const Activation scalars{.T = 5, .HV = 2, .gate = Gate::kScalar, .strength = true};
  EXPECT_GT(activation_workspace_bytes(scalars, Direction::kBackward), 0u);
  EXPECT_EQ(activation_workspace_bytes(scalars, Direction::kForward), 0u);
}

TEST(ActivationRefuses, WrongExecutions) {
  const auto refused = [](const Execution& e) {
    return refusal([&] { activation_workspace_bytes(all_parts(), Direction::kForward, e); }).argument();
  };
  int stream = 0;
  EXPECT_EQ(refused({.stream = &stream}), "stream");
  EXPECT_EQ(refused({.threads = -1}), "threads");
  EXPECT_EQ(refused({.architecture = 90}), "architecture");
}

TEST(Activation, ACallOfAllPartsIsServed) {
  Call call;
  EXPECT_EQ(text(call.refused_forward()), text(refusal([] {})));
  EXPECT_EQ(text(call.refused_backward()), text(refusal([] {})));
}

TEST(ActivationRefuses, WrongTensorsForward) {
  const auto refused = [](auto&& spoil) {
    Call call;
    spoil(call);
    return text(call.refused_forward());
  };
  const std::string head = "activation forward: argument ";
  EXPECT_EQ(refused([](Call& c) { c.forward.in.raw_q = {}; }),
            head + "'raw_q': expected a tensor of shape [2, 3, 2, 8], got none");
  EXPECT_EQ(refused([](Call& c) { c.forward.in.raw_k.shape[3] = 7; }),
            head + "'raw_k': expected shape [2, 3, 2, 8], got [2, 3, 2, 7]");
  EXPECT_EQ(refused([](Call& c) { c.forward.in.raw_g.dtype = DType::kBF16; }),
            head + "'raw_g': expected dtype f16, got bf16");
  EXPECT_EQ(refused([](Call& c) { c.forward.in.A_log = {}; }),
            head + "'A_log': expected a tensor of shape [4], got none");
  EXPECT_EQ(refused([](Call& c) { c.forward.in.dt_bias.shape[0] = 4; }),
            head + "'dt_bias': expected shape [32], got [4]");
  EXPECT_EQ(refused([](Call& c) {
              c.forward.in.raw_beta.device = {DeviceKind::kCuda, 0};
            }),
            head + "'raw_beta': expected a tensor on cpu, got one on cuda:0");
  EXPECT_EQ(refused([](Call& c) { c.forward.q = {}; }),
            head + "'q': expected a tensor of shape [2, 3, 2, 8], got none");
  EXPECT_EQ(refused([](Call& c) { c.forward.g.dtype = DType::kF64; }), head + "'g': expected dtype f32, got f64");
  EXPECT_EQ(refused([](Call& c) { c.forward.beta.dtype = DType::kBF16; }),
            head + "'beta': expected dtype f32, got bf16");
  EXPECT_EQ(refused([](Call& c) { c.forward.k.data = c.forward.in.raw_k.data; }),
            head + "'k': expected memory of its own, got memory shared with 'raw_k'");
  EXPECT_EQ(refused([](Call& c) { c.a.normalise = false; }),
            head + "'raw_q': expected no tensor, as nothing is normalised, got one of rank 4");
  EXPECT_EQ(refused([](Call& c) { c.a.gate = Gate::kNone; }),
            head + "'raw_g': expected no tensor, as there is no gate, got one of rank 4");
  EXPECT_EQ(refused([](Call& c) { c.a.strength = false; }),
            head + "'raw_beta': expected no tensor, as there is no strength, got one of rank 3");
  // With a lower bound A_log may be left out.
  EXPECT_EQ(refused([](Call& c) { c.a.lower_bound = -5, c.forward.in.A_log = {}; }), text(refusal([] {})));
}

TEST(ActivationRefuses, WrongTensorsBackward) {
  const auto refused = [](auto&& spoil) {
    Call call;
    spoil(call);
    return text(call.refused_backward());
  };
  const std::string head = "activation backward: argument ", none = text(refusal([] {}));
  EXPECT_EQ(refused([](Call& c) { c.backward.q_rstd = {}; }),
            head + "'q_rstd': expected a tensor of shape [2, 3, 2], got none");
  EXPECT_EQ(refused([](Call& c) { c.backward.dg = {}; }),
            head + "'dg': expected a tensor of shape [2, 3, 4, 8], got none");
  EXPECT_EQ(refused([](Call& c) { c.backward.in.dt_bias = {}; }),
            head +
                "'d_dt_bias': expected no tensor, as there is no dt_bias and no gradient is invented, got one of "
                "rank 1");
  EXPECT_EQ(
      refused([](Call& c) { c.a.lower_bound = -5, c.backward.in.A_log = {}; }),
      head + "'d_A_log': expected no tensor, as there is no A_log and no gradient is invented, got one of rank 1");
  EXPECT_EQ(refused([](Call& c) { c.execution.workspace = {}; }),
            head + "'workspace': expected at least " +
                std::to_string(activation_workspace_bytes(all_parts(), Direction::kBackward)) + " bytes, got 0");
  EXPECT_EQ(refused([](Call& c) { c.execution.workspace = c.execution.workspace.subspan(8); }),
            head + "'workspace': expected memory aligned to 64 bytes, got an address 8 bytes past it");
  EXPECT_EQ(refused([](Call& c) { c.backward.d_raw_g.strides[0] = 0; }),
            head +
                "'d_raw_g': expected an output that does not overlap itself, got strides [0, 32, 8, 1] for shape "
                "[2, 3, 4, 8]");
  // What no output needs may be left out.
  EXPECT_EQ(refused([](Call& c) {
              c.backward.d_A_log = c.backward.d_dt_bias = {};
              c.execution.workspace = {};
            }),
            none);
  EXPECT_EQ(refused([](Call& c) { c.backward.d_raw_q = c.backward.dq = c.backward.q_rstd = c.backward.in.raw_q = {}; }),
            none);
  EXPECT_EQ(refused([](Call& c) {
              ActivateBackwardArgs& b = c.backward;
              b.d_raw_g = b.d_A_log = b.d_dt_bias = b.dg = b.in.raw_g = b.in.A_log = b.in.dt_bias = {};
              b.d_raw_beta = b.dbeta = b.in.raw_beta = {};
            }),
            none);
}

TEST(ActivationDispatch, CpuFirstReferenceLast) {
  Activation a = all_parts();
  const auto explained = [&] { return explain(a, Direction::kForward).backend; };
  EXPECT_EQ(explained(), "cpu");
  a.gate_dtype = DType::kF64;
  EXPECT_EQ(explained(), "reference");
  a.gate = Gate::kNone;  // the type of a part that is not there is nobody's business
  EXPECT_EQ(explained(), "cpu");
  a.dtype = DType::kF64;
  const Error e = refusal([&] { activation_workspace_bytes(a, Direction::kForward, {.backend = Backend::kCpu}); });
  EXPECT_EQ(text(e),
            "activation forward: argument 'backend': expected a backend that serves an activation of dtype f64, "
            "strength_dtype bf16, K = 8 on cpu, got cpu: dtype f64 is the reference's (this one computes in FP32)");
}

TEST(Activation, WorkspaceHoldsTheSumsOfEveryTile) {
  const Activation a = {.B = 2, .T = 65, .HV = 16, .K = 32, .gate = Gate::kVector};
  EXPECT_EQ(activation_workspace_bytes(a, Direction::kBackward), 4u * (16 * 32 + 16) * sizeof(float));
  EXPECT_EQ(activation_workspace_bytes(a, Direction::kForward), 0u);
  EXPECT_EQ(activation_workspace_bytes(a, Direction::kBackward, {.backend = Backend::kReference}), 0u);
}

}  // namespace
}  // namespace rewy
