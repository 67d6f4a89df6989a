// The host side of the CUDA backend's activations, without a GPU: what they decline and refuse, and their memory. What
// the kernels compute is held against the reference by `rewy check property=activation --device cuda`.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "common/activation.h"

namespace rewy::cuda {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};
const Execution kOnCuda{.device = kGpu};

Activation all_parts() {
  return {.B = 2,
          .T = 130,
          .H = 4,
          .HV = 8,
          .K = 128,
          .normalise = true,
          .dtype = DType::kBF16,
          .gate = Gate::kVector,
          .gate_dtype = DType::kBF16,
          .strength = true,
          .strength_dtype = DType::kBF16};
}

std::string declines(auto&& change) {
  Activation a = all_parts();
  change(a);
  return kCudaActivation.declines(a, Direction::kBackward, kOnCuda);
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing";
}

bool has_device() {
  int count = 0;
  const bool has = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();
  return has;
}

TEST(CudaActivation, DeclinesByShapeAndType) {
  EXPECT_EQ(declines([](Activation& a) { a.dtype = DType::kF64; }), "dtype f64 is the reference's");
  EXPECT_EQ(declines([](Activation& a) { a.gate_dtype = DType::kF64; }), "gate_dtype f64 is the reference's");
  EXPECT_EQ(declines([](Activation& a) { a.strength_dtype = DType::kF64; }), "strength_dtype f64 is the reference's");
  for (const std::int64_t K : {1, 4, 12, 100, 264, 512}) {
    const std::string width = "K = " + std::to_string(K) + " is not a multiple of 8 from 8 to 256";
    EXPECT_EQ(declines([=](Activation& a) { a.K = K; }), width);
    EXPECT_EQ(declines([=](Activation& a) { a.K = K, a.normalise = false; }), width);
  }
  const std::string counts = "T, heads * K or B * heads * T / 64 reaches 2^31";
  EXPECT_EQ(declines([](Activation& a) { a.T = std::int64_t{1} << 31; }), counts);
  EXPECT_EQ(declines([](Activation& a) { a.B = std::int64_t{1} << 30; }), counts);
  EXPECT_EQ(declines([](Activation& a) { a.H = std::int64_t{1} << 24, a.T = 1; }), counts);
  EXPECT_EQ(declines([](Activation& a) { a.lower_bound = -1e39; }), "lower_bound is beyond the range of FP32");
}

TEST(CudaActivation, ServesTheRest) {
  const std::string reason = declines([](Activation&) {});
  EXPECT_EQ(reason.empty(), has_device()) << reason;
  const auto same = [&](auto&& change) { EXPECT_EQ(declines(change), reason); };
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    same([=](Activation& a) { a.dtype = a.gate_dtype = a.strength_dtype = t; });
  }
  same([](Activation& a) { a.lower_bound = -5; });
  same([](Activation& a) { a.T = 0; });
  same([](Activation& a) { a.K = 8, a.HV = 3; });
  // No width where nothing has one, no type of a part that is not there.
  same([](Activation& a) { a.K = 0, a.normalise = false, a.gate = Gate::kScalar, a.dtype = DType::kF64; });
  // 2^32 and more elements.
  same([](Activation& a) { a.B = 64, a.T = 8192, a.H = a.HV = 64; });
}

// One validation for all backends: the same words as on the CPU, before the driver is asked for anything.
TEST(CudaActivation, RefusesAsTheCpuDoes) {
  const auto both = [](auto&& change) {
    Activation a = all_parts();
    change(a);
    const std::string cpu = refusal([&] { activation_workspace_bytes(a, Direction::kBackward); });
    EXPECT_NE(cpu, "nothing");
    EXPECT_EQ(refusal([&] { activation_workspace_bytes(a, Direction::kBackward, kOnCuda); }), cpu);
  };
  both([](Activation& a) { a.B = 0; });
  both([](Activation& a) { a.K = 0; });
  both([](Activation& a) { a.lower_bound = 1; });
  both([](Activation& a) { a.beta_dtype = DType::kF16; });
  both([](Activation& a) { a.dtype = DType::kI32; });
  const std::string tensors = refusal([] { validate(all_parts(), ActivateArgs{}, kOnCuda, 0); });
  EXPECT_EQ(tensors, "activation forward: argument 'raw_q': expected a tensor of shape [2, 130, 4, 128], got none");
}

TEST(CudaActivation, WithoutADeviceAnErrorThatSaysSo) {
  if (has_device()) GTEST_SKIP() << "there is a GPU";
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const std::string text = refusal([&] { activation_workspace_bytes(all_parts(), direction, kOnCuda); });
    EXPECT_EQ(text.find("activation " + std::string(name(direction)) +
                        ": argument 'backend': expected a backend that serves an activation of dtype bf16, "
                        "gate_dtype bf16, strength_dtype bf16, K = 128 on cuda, got cuda: no usable CUDA device ("),
              0u)
        << text;
  }
}

TEST(CudaActivation, WorkspaceHoldsTheSumsOfEveryTile) {
  const Activation a = all_parts();
  EXPECT_EQ(kCudaActivation.bytes(a, Direction::kForward, kOnCuda), 0u);
  EXPECT_EQ(kCudaActivation.bytes(a, Direction::kBackward, kOnCuda), kCpuActivation.bytes(a, Direction::kBackward, {}));
  EXPECT_EQ(kCudaActivation.bytes(a, Direction::kBackward, kOnCuda), 2u * 3 * (8 * 128 + 8) * sizeof(float));
}

}  // namespace
}  // namespace rewy::cuda
