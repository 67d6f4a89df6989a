// What 16-bit storage alone costs: right in FP64, small where nothing cancels, and no excuse for a wrong result.
#include "rounded.h"

#include <gtest/gtest.h>

#include <cmath>

namespace rewy::tool {
namespace {

std::vector<Comparison> errors(const std::string& text) {
  const Data data = make_data(parse_case(text));
  return compare(run_rounded(data.call()), run_reference(data.call()));
}

TEST(Rounded, IsTheReferenceWhereNothingIsRounded) {
  for (const char* text : {"op=deltanet B=2 T=70 H=1 HV=2 K=5 V=7 h0=1 dht=1", "op=gdn T=130 H=2 K=8 h0=1 gate=mixed",
                           "op=gdn packed=20,0,65 H=1 HV=3 K=8 V=3 h0=1 dht=1 gate=reset layout=vk",
                           "op=kda packed=3,66 H=1 HV=2 K=6 h0=1 dht=1 gate=reset", "op=kda T=40 H=1 K=8 gate=strong",
                           "op=gdn2 T=70 H=1 HV=2 K=5 V=7 h0=1 dht=1 gate=mixed layout=vk", "op=gdn2 T=0 H=1 K=5"}) {
    const std::string wide = std::string(text) + " dtype=f64 strength_dtype=f64";
    for (const Comparison& c : errors(wide)) {
      EXPECT_TRUE(c.relative < 1e-9 || c.largest < 1e-12) << text << ": " << c.output << " " << c.relative;
    }
  }
}

TEST(Rounded, IsWithinTheContractWhereNothingCancels) {
  for (const char* text : {"op=deltanet T=130 H=1 HV=2 K=32 h0=1 dht=1", "op=gdn T=131 H=1 K=32 V=40 gate=mixed",
                           "op=kda T=75 H=1 K=24 h0=1 dht=1 gate=trained", "op=gdn2 T=75 H=1 K=24 gate=bounded"}) {
    for (const Comparison& c : errors(std::string(text) + " dtype=bf16 strength_dtype=bf16")) {
      EXPECT_LT(c.relative, 0.006) << text << ": " << c.output;
    }
    for (const Comparison& c : errors(std::string(text) + " dtype=f16 strength_dtype=f16")) {
      EXPECT_LT(c.relative, 0.001) << text << ": " << c.output;
    }
  }
}

TEST(Rounded, AllowsWhatRoundingCostsAndNoMore) {
  const Data data = make_data(parse_case("op=deltanet T=131 H=1 K=64 dtype=bf16 h0=1 keys=repeat beta=0.835"));
  const Call call = data.call();
  const tool::Run exact = run_reference(call);
  const auto judged = [&](const tool::Run& actual) {
    std::vector<Comparison> all = compare(actual, exact);
    allow_rounding(call, actual, exact, all);
    return all;
  };
  const auto o = [](const std::vector<Comparison>& all) { return all.front(); };
  tool::Run plain = run_rounded(call);
  EXPECT_FALSE(o(compare(plain, exact)).passed);
  for (const Comparison& c : judged(plain)) EXPECT_TRUE(c.passed) << c.output;
  EXPECT_NEAR(o(judged(plain)).used(), 1 / 1.5, 1e-9);
  EXPECT_EQ(judged(plain)[1].allowed.relative, 0.008);  // the final state, which stays within the contract

  for_each(plain["o"], [&](std::byte* at, const Index&, std::int64_t) {
    store_element(at, DType::kBF16, 1.06 * load_element(at, DType::kBF16));
  });
  EXPECT_FALSE(o(judged(plain)).passed);
  fill(plain["o"], NAN);
  EXPECT_FALSE(o(judged(plain)).passed);
}

}  // namespace
}  // namespace rewy::tool
