// The judge itself: it must see every kind of wrong output.
#include <gtest/gtest.h>

#include <cmath>

#include "run_case.h"

namespace rewy::tool {
namespace {

Tensor tensor(DType dtype, const std::vector<double>& x) {
  Tensor t(dtype, {1, static_cast<std::int64_t>(x.size())});
  for_each(t.view, [&](std::byte* at, const Index&, std::int64_t i) {
    store_element(at, dtype, x[static_cast<std::size_t>(i)]);
  });
  return t;
}

Comparison judge(const std::vector<double>& actual, const std::vector<double>& expected, DType dtype = DType::kF32) {
  return compare("o", tensor(dtype, actual).view, tensor(DType::kF64, expected).view, Keys::kNormal);
}

TEST(Compare, PassesRoundingAndFailsErrors) {
  EXPECT_TRUE(judge({1, 2, 3.00001}, {1, 2, 3}).passed);
  const Comparison c = judge({1, 2, 3.1}, {1, 2, 3});
  EXPECT_FALSE(c.passed);
  EXPECT_EQ(c.worst, "3.1 against 3 at [0, 2]");
  EXPECT_NEAR(c.relative, 0.1 / std::sqrt(14.0), 1e-6);
}

TEST(Compare, WantsNaNAndInfinityInTheSamePlaces) {
  EXPECT_TRUE(judge({NAN, 1, INFINITY}, {NAN, 1, INFINITY}).passed);
  EXPECT_FALSE(judge({NAN, 1}, {1, NAN}).passed);
  EXPECT_FALSE(judge({1, 1}, {1, NAN}).passed);
  EXPECT_FALSE(judge({INFINITY}, {-INFINITY}).passed);
  EXPECT_EQ(judge({0, NAN}, {0, 0}).worst, "nan against 0 at [0, 1]");
}

TEST(Compare, TakesTinyErrorsOfZeroReferencesAsNothing) {
  EXPECT_TRUE(judge({5e-7, 0}, {0, 0}).passed);
  EXPECT_FALSE(judge({5e-6, 0}, {0, 0}).passed);
}

TEST(Compare, ExpectsInfinityWhereHalfPrecisionEnds) {
  EXPECT_TRUE(judge({INFINITY, 1}, {70000, 1}, DType::kF16).passed);
  EXPECT_FALSE(judge({65504, 1}, {70000, 1}, DType::kF16).passed);
}

TEST(Tolerance, OfSixteenBitProductsIsTheContractForEveryOutput) {
  for (const DType stored : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const Keys keys : {Keys::kNormal, Keys::kRepeat, Keys::kRaw}) {
      for (const char* output : {"o", "final_state", "dq", "dk", "dv", "dinitial_state"}) {
        EXPECT_EQ(tolerance(output, stored, keys, Products::k16Bit).relative, 0.008) << output;
      }
      for (const char* output : {"dg", "dbeta", "db", "dw"}) {
        EXPECT_EQ(tolerance(output, stored, keys, Products::k16Bit).relative, 0.02) << output;
      }
      EXPECT_EQ(tolerance("dq", stored, keys, Products::k16Bit).absolute, 1e-6);
    }
  }
}

TEST(Tolerance, OfWideProductsFollowsTheStorage) {
  EXPECT_EQ(tolerance("o", DType::kF32).relative, 2e-5);
  EXPECT_EQ(tolerance("dg", DType::kF32).relative, 1e-4);
  EXPECT_EQ(tolerance("o", DType::kF32, Keys::kRepeat).relative, 20 * 2e-5);
  EXPECT_EQ(tolerance("o", DType::kBF16).relative, 0.008);
  EXPECT_EQ(tolerance("dg", DType::kF16).relative, 0.02);
  EXPECT_EQ(tolerance("o", DType::kF64).relative, 1e-10);
  const Device gpu{DeviceKind::kCuda, 1};
  EXPECT_EQ(products_of({}, Schedule::kChunks), Products::kWide);
  EXPECT_EQ(products_of(gpu, Schedule::kChunks), Products::k16Bit);
  EXPECT_EQ(products_of(gpu, Schedule::kTokens), Products::kWide);
}

TEST(FirstDifference, SeesOneBit) {
  const Tensor a = tensor(DType::kF32, {1, 2});
  EXPECT_FALSE(first_difference(a.view, tensor(DType::kF32, {1, 2}).view));
  EXPECT_TRUE(first_difference(a.view, tensor(DType::kF32, {1, 2.0000002384185791}).view));
  EXPECT_FALSE(first_difference(tensor(DType::kF32, {0, NAN}).view, tensor(DType::kF32, {-0.0, NAN}).view));
  EXPECT_TRUE(first_difference(a.view, tensor(DType::kF32, {1, NAN}).view));
}

TEST(Buffer, KnowsWhenItsEndWasPassed) {
  Buffer buffer(64);
  EXPECT_TRUE(buffer.guard_intact());
  buffer.data()[64] = std::byte{0};
  EXPECT_FALSE(buffer.guard_intact());
}

TEST(Run, CountsTheLocalPullbackOfBothGraphs) {
  // Three products against seven, a full chunk and head at K = V = 128.
  const auto local = [](const char* graph) {
    const Data data = make_data(parse_case(std::string("op=kda T=64 H=1 K=128 graph=") + graph));
    return run(data.call(), {.backend = Backend::kCpu}).backward_work.local;
  };
  EXPECT_EQ(local("rewy").products, 3);
  EXPECT_EQ(local("expanded").products, 7);
  EXPECT_NEAR(static_cast<double>(local("rewy").dense) * 1e-6, 4.19, 0.01);
  EXPECT_NEAR(static_cast<double>(local("expanded").dense) * 1e-6, 7.34, 0.01);
}

TEST(CheckCase, RunsAgainForTheSameBits) {
  EXPECT_TRUE(check_case("op=kda T=70 H=2 K=16 h0=1 dht=1", {.backend = Backend::kCpu}, 4).passed);
}

TEST(PlacedCall, CanBeIssuedAgain) {
  const Data data = make_data(parse_case("op=gdn T=70 H=1 K=16 h0=1 dht=1"));
  const RunOptions options{.backend = Backend::kCpu};
  PlacedCall placed(data.call(), options);
  for (int i = 0; i < 2; ++i) {
    placed.forward();
    placed.backward();
  }
  placed.finish();
  const tool::Run twice = placed.collect();
  const tool::Run once = run(data.call(), options);
  for (const Output& output : once.outputs) {
    EXPECT_EQ(first_difference(output.tensor.view, twice[output.name]).value_or(""), "") << output.name;
  }
}

TEST(CheckCase, FailsWithTheReasonOfARefusal) {
  const CheckResult r = check_case("op=kda T=4 H=2 HV=3 K=8");
  EXPECT_FALSE(r.passed);
  EXPECT_NE(r.detail.find("a multiple of H"), std::string::npos) << r.detail;
}

}  // namespace
}  // namespace rewy::tool
