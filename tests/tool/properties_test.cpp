#include "properties.h"

#include <gtest/gtest.h>

namespace rewy::tool {
namespace {

class Properties : public testing::TestWithParam<std::string> {};

TEST_P(Properties, HoldOnTheCpu) {
  const CheckResult r = check_property(GetParam(), {.backend = Backend::kCpu});
  EXPECT_TRUE(r.passed) << r.text << ": " << r.detail;
}

INSTANTIATE_TEST_SUITE_P(All, Properties, testing::ValuesIn(property_lines()), [](const auto& line) {
  std::string name;
  for (const char c : line.param) name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
});

TEST(PropertyLine, RefusesUnknownNames) {
  EXPECT_THROW(check_property("property=beauty op=kda", {.backend = Backend::kCpu}), Error);
  EXPECT_THROW(check_property("property=reset op=deltanet", {.backend = Backend::kCpu}), Error);
  EXPECT_THROW(check_property("property=reset T=5", {.backend = Backend::kCpu}), Error);
  EXPECT_THROW(check_property("property=policy op=kda schedule=tokens", {.backend = Backend::kCpu}), Error);
}

}  // namespace
}  // namespace rewy::tool
