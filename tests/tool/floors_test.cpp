#include "floors.h"

#include <gtest/gtest.h>

#include "case.h"

namespace rewy::tool {
namespace {

double backward_kib(const std::string& text, bool saved = false) {
  return chunk_floor(parse_case("T=64 H=1 dtype=bf16 strength_dtype=bf16 " + text).problem, Direction::kBackward, saved)
             .bytes /
         1024;
}

TEST(Floors, AreTheSumsOfTheirPieces) {
  EXPECT_EQ(backward_kib("op=gdn K=128"), 408);
  EXPECT_EQ(backward_kib("op=deltanet K=128"), 408);
  EXPECT_EQ(backward_kib("op=kda K=128"), 536);
  EXPECT_EQ(backward_kib("op=gdn2 K=128"), 648);
  // Without the scan of S and R, which the forward left.
  EXPECT_EQ(backward_kib("op=gdn K=128 policy=save", true), 408 - 88);
  EXPECT_EQ(backward_kib("op=gdn K=128 policy=save", false), 408);
  // Queries and keys of a group move once.
  EXPECT_EQ(backward_kib("op=gdn K=128 HV=2"), 408 - 7 * 8);
  EXPECT_EQ(backward_kib("op=gdn K=64 V=256"), 7 * 8 + 9 * 32 + 4 * 32 + 3 * 8);
}

TEST(Floors, OfACallCountChunksAndHeads) {
  const Problem p = parse_case("op=kda B=2 T=8192 H=16 K=128 dtype=bf16").problem;
  const Floor call = call_floor(p, Direction::kBackward, true);
  EXPECT_EQ(call.bytes, 536.0 * 1024 * 2 * 128 * 16);
  EXPECT_NEAR(call.operations / (2 * 128 * 16), 31e6, 1e6);
  EXPECT_EQ(call.seconds(), call.bytes / kH200BytesPerSecond);
  const Floor forward = call_floor(p, Direction::kForward, false);
  EXPECT_EQ(forward.bytes, (4.0 * 16 + 32) * 1024 * 2 * 128 * 16);
}

TEST(Floors, TokenByTokenStatesMoveOnceEachWay) {
  const auto floor = [](const std::string& text, bool initial, bool final) {
    return token_floor(parse_case("K=128 dtype=bf16 strength_dtype=bf16 " + text).problem, initial, final);
  };
  constexpr double kState = 16 * 128 * 128 * 4, kRow = 128 * 2;
  EXPECT_EQ(floor("op=deltanet T=1 H=16", true, true).bytes, 2 * kState + 16 * (4 * kRow + 2));
  EXPECT_EQ(floor("op=deltanet T=1 H=16", false, true).bytes, kState + 16 * (4 * kRow + 2));
  EXPECT_EQ(floor("op=gdn T=4 H=4 HV=16", true, false).bytes, kState + 4 * (8 * kRow + 16 * (2 * kRow + 6)));
  EXPECT_EQ(floor("op=kda B=3 T=1 H=16", false, false).bytes, 3 * 16 * (6 * kRow + 2));
  EXPECT_EQ(floor("op=gdn2 packed=1,1 H=16", true, true).bytes, 2 * (2 * kState + 16 * 8 * kRow));
  EXPECT_EQ(floor("op=gdn2 T=5 H=16", true, true).operations, 5 * 16 * 3 * 2 * 128 * 128);
}

}  // namespace
}  // namespace rewy::tool
