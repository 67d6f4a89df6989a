#include "case.h"

#include <gtest/gtest.h>

#include <cmath>

namespace rewy::tool {
namespace {

TEST(Case, ReadsEveryKey) {
  const Case c = parse_case(
      "op=gdn2 B=1 T=300 H=2 HV=4 K=24 V=40 packed=128,0,1x3 offsets=i64 dtype=bf16 strength_dtype=f16 h0=1 ht=0 dht=1 "
      "layout=vk keys=repeat beta=0.835 gate=const:-20 strides=odd scale=0.25 policy=save graph=expanded "
      "intra=pairwise "
      "gram=off seed=7");
  EXPECT_EQ(c.problem.op, Operator::kGdn2);
  EXPECT_EQ(c.problem.T, 300);
  EXPECT_EQ(c.lengths, (std::vector<std::int64_t>{128, 0, 1, 1, 1}));
  EXPECT_EQ(c.problem.segments, 5);
  EXPECT_EQ(c.offsets, DType::kI64);
  EXPECT_EQ(c.problem.strength_dtype, DType::kF16);
  EXPECT_TRUE(c.initial_state && c.d_final_state && !c.final_state);
  EXPECT_EQ(c.gate_constant, -20);
  EXPECT_EQ(c.strides, Placement::kOdd);
  EXPECT_EQ(c.problem.scale, 0.25);
  EXPECT_EQ(c.problem.variant, (Variant{Graph::kExpanded, Intra::kPairwise, Gram::kOff}));
  EXPECT_EQ(c.seed, 7u);
}

TEST(Case, DerivesWhatIsNotGiven) {
  const Case c = parse_case("op=deltanet packed=5,6 H=3 K=8");
  EXPECT_EQ(c.problem.T, 11);
  EXPECT_EQ(c.problem.HV, 3);
  EXPECT_EQ(c.problem.V, 8);
  EXPECT_EQ(c.gate, GateKind::kNone);
  EXPECT_EQ(parse_case("dtype=f64").problem.strength_dtype, DType::kF64);
}

TEST(Case, FormatsBackToTheSameCase) {
  for (const char* text :
       {"op=kda T=64 H=1 K=64", "op=gdn T=0 H=2 HV=4 K=60 V=100 h0=1 ht=0", "op=kda packed=none T=20 H=1 K=16",
        "op=deltanet packed=1x2048 H=1 K=8 gate=zero", "op=gdn T=200 packed=0x3,64 H=1 K=8 gate=const:-0.001",
        "op=gdn2 T=5 H=1 K=8 dtype=f64 beta=tiny", "op=kda T=9 H=1 K=8 scale=0.08838834764831845 seed=12"}) {
    const Case c = parse_case(text);
    EXPECT_EQ(parse_case(format_case(c)), c) << format_case(c);
    EXPECT_EQ(format_case(parse_case(format_case(c))), format_case(c));
  }
  EXPECT_EQ(format_case(parse_case("op=kda T=64 H=1 HV=1 K=64 V=64 gate=mild policy=recompute")),
            "op=kda T=64 H=1 K=64");
}

struct Refusal {
  const char* text;
  const char* key;
  const char* allowed;
};

TEST(Case, RefusesNamingKeyAndAllowedValues) {
  for (const Refusal& r : std::initializer_list<Refusal>{{"op=mamba", "op", "deltanet"},
                                                         {"T=-1", "T", "at least 0"},
                                                         {"H=0", "H", "at least 1"},
                                                         {"K=8x", "K", "whole number"},
                                                         {"gate=wild", "gate", "none|zero|mild"},
                                                         {"gate=const:", "gate", "const:-20"},
                                                         {"gate=const", "gate", "const:-20"},
                                                         {"beta=3", "beta", "from 0 to 2"},
                                                         {"beta=nan", "beta", "from 0 to 2"},
                                                         {"packed=1,-2", "packed", "segment lengths"},
                                                         {"packed=", "packed", "segment lengths"},
                                                         {"T=4 packed=5", "packed", "at most T = 4"},
                                                         {"dtype=i32", "dtype", "bf16"},
                                                         {"offsets=f32", "offsets", "i32 or i64"},
                                                         {"h0=yes", "h0", "0 or 1"},
                                                         {"strides=weird", "strides", "dense|packed|odd"},
                                                         {"keys=none", "keys", "normal|repeat"},
                                                         {"T=5 T=6", "T", "one value"},
                                                         {"colour=red", "colour", "strength_dtype"},
                                                         {"gate", "gate", "key=value"},
                                                         {"policy=none", "policy", "recompute"},
                                                         {"seed=-1", "seed", "whole number"}}) {
    try {
      parse_case(r.text);
      ADD_FAILURE() << r.text << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.argument(), r.key) << r.text;
      EXPECT_NE(e.expected().find(r.allowed), std::string::npos) << e.what();
    }
  }
}

TEST(Case, ListsHaveCommentsAndBlankLines) {
  EXPECT_EQ(case_lines("# all\n\n op=kda T=1  # tail\r\nop=gdn"), (std::vector<std::string>{"op=kda T=1", "op=gdn"}));
}

TEST(Data, IsTheSameForEveryPlacementAndOnEveryPlatform) {
  const std::string text = "op=kda B=2 T=7 H=2 K=8 V=5 gate=mixed h0=1";
  const Data dense = make_data(parse_case(text));
  for (const char* strides : {" strides=packed", " strides=odd", " strides=aligned"}) {
    const Data other = make_data(parse_case(text + strides));
    EXPECT_EQ(values(dense.q.view), values(other.q.view));
    EXPECT_EQ(values(dense.g.view), values(other.g.view));
    EXPECT_EQ(values(dense.beta.view), values(other.beta.view));
    EXPECT_EQ(values(dense.initial_state.view), values(other.initial_state.view));
    EXPECT_NE(dense.beta.view.strides, other.beta.view.strides);
  }
  // From a second implementation; a change of the generator changes every case.
  EXPECT_EQ(gaussian(1, 0), 0.2678381881223183);
  EXPECT_EQ(uniform(1, 0), 0.8628561488610587);
}

TEST(Data, GaussiansHaveUnitVariance) {
  double sum = 0, squares = 0;
  constexpr int kCount = 100'000;
  for (int i = 0; i < kCount; ++i) {
    const double x = gaussian(3, static_cast<std::uint64_t>(i));
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Data, GatesAreWhatTheirNamesSay) {
  const auto gates = [](const std::string& gate) {
    return values(make_data(parse_case("op=kda T=64 H=2 K=16 gate=" + gate)).g.view);
  };
  const auto share = [](const std::vector<double>& g, auto holds) {
    return static_cast<double>(std::count_if(g.begin(), g.end(), holds)) / static_cast<double>(g.size());
  };
  EXPECT_EQ(share(gates("zero"), [](double g) { return g == 0; }), 1);
  EXPECT_EQ(share(gates("mild"), [](double g) { return g < 0 && g > -1; }), 1);
  EXPECT_EQ(share(gates("strong"), [](double g) { return g <= -20 && g >= -80; }), 1);
  EXPECT_EQ(share(gates("bounded"), [](double g) { return g < 0 && g >= -5; }), 1);
  EXPECT_EQ(share(gates("const:-3"), [](double g) { return g == -3; }), 1);
  const double resets = share(gates("reset"), [](double g) { return std::isinf(g); });
  EXPECT_GT(resets, 0.02);
  EXPECT_LT(resets, 0.3);
  const double above = share(gates("positive"), [](double g) { return g > 0; });
  EXPECT_GT(above, 0.2);
}

TEST(Elements, RoundToNearestEven) {
  EXPECT_EQ(round_to(DType::kF16, 65519.9), 65504);
  EXPECT_TRUE(std::isinf(round_to(DType::kF16, 65520)));
  EXPECT_EQ(round_to(DType::kF16, 2049), 2048);
  EXPECT_EQ(round_to(DType::kF16, 2051), 2052);
  EXPECT_EQ(round_to(DType::kF16, 0x1p-24), 0x1p-24);
  EXPECT_EQ(round_to(DType::kF16, 0x1p-25), 0);
  EXPECT_EQ(round_to(DType::kBF16, 4098), 4096);
  EXPECT_EQ(round_to(DType::kBF16, 1.00390625), 1);
  EXPECT_EQ(round_to(DType::kBF16, -1.01171875), -1.015625);
  EXPECT_TRUE(std::isnan(round_to(DType::kBF16, NAN)));
  EXPECT_TRUE(std::isnan(round_to(DType::kF16, NAN)));
  for (double x = 1; x < 2; x += 0x1p-10) EXPECT_EQ(round_to(DType::kF16, x), x);
}

}  // namespace
}  // namespace rewy::tool
