// Faults this field and the CPU backend have had, each as a test of its kind.
#include <sys/mman.h>

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

/// Address space of more than 2^31 floats, of which only the pages that are touched take memory.
class FarMemory {
 public:
  static constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 48;  // elements from one batch row to the next
  FarMemory() {
    void* at = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) data_ = static_cast<float*>(at);
  }
  ~FarMemory() {
    if (data_ != nullptr) ::munmap(data_, kBytes);
  }
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;

  /// The same shape, batch rows kStride apart.
  TensorView spread(const TensorView& dense) const {
    TensorView view = dense;
    view.data = data_;
    view.strides[0] = kStride;
    const auto row = static_cast<std::size_t>(dense.elements() / dense.shape[0]);
    for (std::int64_t b = 0; b < dense.shape[0]; ++b) {
      std::memcpy(data_ + b * kStride, floats(dense) + b * dense.strides[0], row * sizeof(float));
    }
    return view;
  }
  bool ok() const { return data_ != nullptr; }

 private:
  static constexpr std::size_t kBytes = (static_cast<std::size_t>(kStride) + (1 << 20)) * sizeof(float);
  float* data_ = nullptr;
};

TEST(CpuBackend, OffsetsBeyond31Bits) {
  const Data data = make_data(parse_case("op=kda B=2 T=20 H=2 K=16 V=16"));
  const auto want = run(data.call(), {.backend = Backend::kCpu, .threads = 1});
  FarMemory q, k, v, g, beta, d_o, o;
  for (const FarMemory* memory : {&q, &k, &v, &g, &beta, &d_o, &o}) ASSERT_TRUE(memory->ok());
  Call call = data.call();
  call.in.q = q.spread(call.in.q);
  call.in.k = k.spread(call.in.k);
  call.in.v = v.spread(call.in.v);
  call.in.g = g.spread(call.in.g);
  call.in.beta = beta.spread(call.in.beta);
  call.d_o = d_o.spread(call.d_o);
  const auto got = run(call, {.backend = Backend::kCpu, .threads = 1});
  for (const Output& output : want.outputs) {
    const TensorView& view = output.tensor.view;
    const auto bytes = static_cast<std::size_t>(view.elements()) * sizeof(float);
    EXPECT_EQ(std::memcmp(view.data, got[output.name].data, bytes), 0) << output.name;
  }
  // And an output written there.
  const TensorView far = o.spread(want["o"]);
  std::memset(far.data, 0xff, 20 * 2 * 16 * sizeof(float));
  std::memset(floats(far) + FarMemory::kStride, 0xff, 20 * 2 * 16 * sizeof(float));
  alignas(64) static std::byte memory[1 << 22];
  const Execution execution{.threads = 1, .workspace = memory};
  ASSERT_LE(workspace_bytes(call.problem, Direction::kForward, execution).workspace, sizeof(memory));
  forward(call.problem, {.in = call.in, .o = far}, execution);
  for (const std::int64_t b : {0, 1}) {
    EXPECT_EQ(std::memcmp(floats(far) + b * FarMemory::kStride, floats(want["o"]) + b * 20 * 2 * 16,
                          20 * 2 * 16 * sizeof(float)),
              0);
  }
}

// A slice of value columns is computed alone: threads, and the columns beside it, change no bit.
TEST(CpuBackend, TokenByTokenSlicesGiveTheBitsOfTheirColumnsAlone) {
  const Data data = make_data(parse_case("op=kda T=37 H=1 K=24 V=150 h0=1 gate=mixed"));
  const auto all = run(data.call(), {.backend = Backend::kCpu, .schedule = Schedule::kTokens, .threads = 1});
  const auto threads = run(data.call(), {.backend = Backend::kCpu, .schedule = Schedule::kTokens, .threads = 3});
  for (const Output& output : all.outputs) {
    EXPECT_FALSE(first_difference(output.tensor.view, threads[output.name])) << output.name;
  }
  for (const std::int64_t first : {0, 1, 33, 149}) {
    Call call = data.call();
    call.problem.V = 1;
    call.in.v = slice(call.in.v, 3, first, 1);
    call.d_o = slice(call.d_o, 3, first, 1);
    call.in.initial_state = slice(call.in.initial_state, 3, first, 1);
    const auto one = run(call, {.backend = Backend::kCpu, .schedule = Schedule::kTokens, .threads = 1});
    EXPECT_FALSE(first_difference(one["o"], slice(all["o"], 3, first, 1))) << first;
    EXPECT_FALSE(first_difference(one["final_state"], slice(all["final_state"], 3, first, 1))) << first;
  }
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
