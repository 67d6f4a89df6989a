// Faults the CPU backend has had, each as a test of its kind.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "run_case.h"

namespace rewy::tool {
namespace {

float* floats(const TensorView& view) {
  return static_cast<float*>(view.data);
}

// Masked coefficients are zero, and zero times NaN is NaN: a product must not read what its rows do not depend on.
TEST(CpuBackend, NanInAQueryStaysOutOfLaterTokensOfItsBlock) {
  for (const char* op : {"gdn", "kda", "gdn2"}) {
    const Data data = make_data(parse_case(std::string("op=") + op + " T=80 H=1 HV=2 K=8 V=8 h0=1 dht=1"));
    constexpr std::int64_t kToken = 20;
    floats(data.q.view)[kToken * data.q.view.strides[1]] = std::numeric_limits<float>::quiet_NaN();
    const auto got = run(data.call(), {.backend = Backend::kCpu, .threads = 1});
    for (const char* name : {"dk", "dg", "dv"}) {
      const TensorView& view = got[name];
      const std::int64_t row = view.strides[1];
      for (std::int64_t i = (kToken + 1) * row; i < 80 * row; ++i) {
        ASSERT_TRUE(std::isfinite(floats(view)[i])) << op << ' ' << name << " token " << i / row;
      }
    }
  }
}

// A key with beta = 0 writes with strength 0 but is still multiplied by its send factor.
TEST(CpuBackend, LargeKeysInsideTheBoundStayFinite) {
  for (const char* op : {"deltanet", "gdn", "kda"}) {
    const bool gated = std::strcmp(op, "deltanet") != 0;
    const Data data =
        make_data(parse_case(std::string("op=") + op + " T=70 H=1 K=16 V=8 h0=1" + (gated ? " gate=const:-4" : "")));
    constexpr std::int64_t kToken = 29;
    for (int k = 0; k < 16; ++k) floats(data.k.view)[kToken * data.k.view.strides[1] + k] = 0x1p40f;
    floats(data.beta.view)[kToken * data.beta.view.strides[1]] = 0;
    floats(data.v.view)[kToken * data.v.view.strides[1]] = 0;
    const auto got = run(data.call(), {.backend = Backend::kCpu, .threads = 1});
    for (std::int64_t i = 0; i < 70 * 8; ++i) ASSERT_TRUE(std::isfinite(floats(got["o"])[i])) << op;
  }
}

// Worker threads have the default floating-point state; the caller's thread must not differ from them, and gets its own
// state back.
TEST(CpuBackend, RoundingModeOfTheCallerChangesNothing) {
  const Data data = make_data(parse_case("op=kda T=130 H=3 K=32 V=32 h0=1 dht=1"));
  const auto want = run(data.call(), {.backend = Backend::kCpu, .threads = 3});
  std::fesetround(FE_TOWARDZERO);
  const auto one = run(data.call(), {.backend = Backend::kCpu, .threads = 1});
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(mode, FE_TOWARDZERO);
  for (const Output& output : want.outputs) {
    const TensorView& a = output.tensor.view;
    const TensorView& b = one[output.name];
    EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(a.elements()) * size_of(a.dtype)), 0) << output.name;
  }
}

TEST(CpuBackend, OutputsInsideTheWorkspaceAreRefused) {
  const Problem p{.op = Operator::kDeltaNet, .T = 4, .K = 8, .V = 8};
  Execution execution;
  const Bytes bytes = workspace_bytes(p, Direction::kForward, execution);
  alignas(64) static std::byte memory[1 << 22];
  ASSERT_LE(bytes.workspace, sizeof(memory));
  execution.workspace = memory;
  const float inputs[4 * 8] = {};
  const TensorView in(inputs, DType::kF32, {1, 4, 1, 8});
  const std::int64_t shape[] = {1, 4, 1, 8};
  const std::int64_t strides[] = {64, 16, 16, 2};
  const TensorView o(memory + 64, DType::kF32, shape, strides);
  const TensorView beta(inputs, DType::kF32, {1, 4, 1});
  EXPECT_THROW(forward(p, {.in = {.q = in, .k = in, .v = in, .beta = beta}, .o = o}, execution), Error);
}

TEST(CpuBackend, ScaleBeyondFp32GoesToTheReference) {
  Problem p{.op = Operator::kDeltaNet, .T = 4, .K = 8, .V = 8};
  EXPECT_EQ(explain(p, Direction::kForward).backend, "cpu");
  p.scale = 1e300;
  EXPECT_EQ(explain(p, Direction::kForward).backend, "reference");
}

// Gaussian numbers made from few bits are exactly 0 now and then, and one feature has no norm to be divided by.
TEST(Cases, OneFeatureIsNeverNan) {
  const Data data = make_data(parse_case("op=deltanet T=200 H=1 K=1 V=1 seed=456"));
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(std::isfinite(floats(data.q.view)[i]));
    ASSERT_TRUE(std::isfinite(floats(data.k.view)[i]));
  }
  EXPECT_THROW(parse_case("op=gdn T=10 gate=const:nan"), Error);
}

}  // namespace
}  // namespace rewy::tool
