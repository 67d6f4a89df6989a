#include "common/arena.h"

#include <gtest/gtest.h>

#include <vector>

#include "rewy/rewy.h"

namespace rewy {
namespace {

struct Layout {
  char* c;
  double* d;
  float* f;
  std::byte* none;
};

Layout lay_out(Arena& arena) {
  return {arena.take<char>(1), arena.take<double>(9), arena.take<float>(16), arena.take<std::byte>(0)};
}

TEST(Arena, MeasuresWhatItCarves) {
  Arena measure;
  const Layout none = lay_out(measure);
  EXPECT_EQ(measure.used(), 64u + 128u + 64u);
  EXPECT_EQ(none.c, nullptr);
  EXPECT_EQ(none.d, nullptr);

  struct alignas(Arena::kAlign) Line {
    std::byte bytes[Arena::kAlign];
  };
  std::vector<Line> memory(measure.used() / sizeof(Line));
  Arena carve(std::span(memory.front().bytes, measure.used()));
  const Layout at = lay_out(carve);
  EXPECT_EQ(carve.used(), measure.used());
  std::byte* base = memory.front().bytes;
  EXPECT_EQ(reinterpret_cast<std::byte*>(at.c), base);
  EXPECT_EQ(reinterpret_cast<std::byte*>(at.d), base + 64);
  EXPECT_EQ(reinterpret_cast<std::byte*>(at.f), base + 192);
  EXPECT_EQ(at.none, base + 256);
}

TEST(WorkspaceBytes, GrowLinearlyAndKeepAlignment) {
  Problem p{.op = Operator::kKda, .T = 64 * 16, .H = 2, .HV = 2, .K = 16, .V = 24, .policy = Policy::kSave};
  const Execution execution{.threads = 2};
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    p.T = 64 * 16;
    const Bytes one = workspace_bytes(p, direction, execution);
    p.T = 64 * 32;
    const Bytes two = workspace_bytes(p, direction, execution);
    p.T = 64 * 48;
    const Bytes three = workspace_bytes(p, direction, execution);
    // Up to the rounding of each table to whole lines.
    EXPECT_NEAR(static_cast<double>(three.workspace - two.workspace),
                static_cast<double>(two.workspace - one.workspace), 2048);
    EXPECT_EQ(three.saved - two.saved, two.saved - one.saved);
    EXPECT_EQ(one.workspace % Arena::kAlign, 0u);
    EXPECT_EQ(one.saved % Arena::kAlign, 0u);
  }
}

}  // namespace
}  // namespace rewy
