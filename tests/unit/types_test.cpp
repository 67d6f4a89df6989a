#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "rewy/rewy.h"

namespace rewy {
namespace {

template <class Enum>
void round_trip(int count, Enum (*parse)(std::string_view)) {
  std::set<std::string_view> words;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    EXPECT_EQ(parse(name(value)), value) << name(value);
    words.insert(name(value));
  }
  EXPECT_EQ(words.size(), static_cast<std::size_t>(count));
  EXPECT_EQ(name(static_cast<Enum>(count)), "unknown");
}

TEST(Names, RoundTrip) {
  round_trip<Operator>(4, parse_operator);
  round_trip<DType>(6, parse_dtype);
  round_trip<Policy>(2, parse_policy);
  round_trip<StateLayout>(2, parse_state_layout);
  round_trip<Schedule>(2, parse_schedule);
  round_trip<Graph>(2, parse_graph);
  round_trip<Intra>(2, parse_intra);
  round_trip<Gram>(2, parse_gram);
  round_trip<Backend>(4, parse_backend);
}

TEST(Names, Words) {
  EXPECT_EQ(name(Operator::kDeltaNet), "deltanet");
  EXPECT_EQ(name(Operator::kGdn), "gdn");
  EXPECT_EQ(name(Operator::kKda), "kda");
  EXPECT_EQ(name(Operator::kGdn2), "gdn2");
  EXPECT_EQ(name(DType::kF64), "f64");
  EXPECT_EQ(name(DType::kF32), "f32");
  EXPECT_EQ(name(DType::kBF16), "bf16");
  EXPECT_EQ(name(DType::kF16), "f16");
  EXPECT_EQ(name(DType::kI32), "i32");
  EXPECT_EQ(name(DType::kI64), "i64");
  EXPECT_EQ(name(DeviceKind::kCpu), "cpu");
  EXPECT_EQ(name(DeviceKind::kCuda), "cuda");
  EXPECT_EQ(name(Policy::kRecompute), "recompute");
  EXPECT_EQ(name(Policy::kSave), "save");
  EXPECT_EQ(name(StateLayout::kKV), "kv");
  EXPECT_EQ(name(StateLayout::kVK), "vk");
  EXPECT_EQ(name(Direction::kForward), "forward");
  EXPECT_EQ(name(Direction::kBackward), "backward");
  EXPECT_EQ(name(Graph::kRewy), "rewy");
  EXPECT_EQ(name(Graph::kExpanded), "expanded");
  EXPECT_EQ(name(Intra::kMatrix), "matrix");
  EXPECT_EQ(name(Intra::kPairwise), "pairwise");
  EXPECT_EQ(name(Gram::kOff), "off");
  EXPECT_EQ(name(Gram::kOn), "on");
  EXPECT_EQ(name(Backend::kAutomatic), "auto");
  EXPECT_EQ(name(Backend::kCpu), "cpu");
  EXPECT_EQ(name(Backend::kReference), "reference");
}

TEST(Names, ParseTellsTheAllowedWords) {
  const auto message = [](const std::function<void()>& parse) -> std::string {
    try {
      parse();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message([] { parse_operator("mamba"); }),
            "parse: argument 'op': expected deltanet, gdn, kda or gdn2, got \"mamba\"");
  EXPECT_EQ(message([] { parse_dtype("F32"); }),
            "parse: argument 'dtype': expected f64, f32, bf16, f16, i32 or i64, got \"F32\"");
  EXPECT_EQ(message([] { parse_policy(""); }), "parse: argument 'policy': expected recompute or save, got \"\"");
  EXPECT_EQ(message([] { parse_backend("gpu"); }),
            "parse: argument 'backend': expected auto, cpu, cuda or reference, got \"gpu\"");
}

TEST(Problem, QueryScale) {
  Problem p{.K = 16};
  EXPECT_EQ(p.query_scale(), 0.25);
  p.scale = 0.0;
  EXPECT_EQ(p.query_scale(), 0.0);
}

TEST(Work, Adds) {
  Work a;
  a.prepare = {1, 2, 3};
  a.scan = {10, 20, 30};
  a.local = {100, 200, 300};
  a.interact = {1000, 2000, 3000};
  a.pairwise = 7;
  a.chunks = 5;
  Work b = a;
  b += a;
  EXPECT_EQ(b.total().products, 2222);
  EXPECT_EQ(b.total().dense, 4444);
  EXPECT_EQ(b.total().executed, 6666);
  EXPECT_EQ(b.pairwise, 14);
  EXPECT_EQ(b.chunks, 10);
}

}  // namespace
}  // namespace rewy
