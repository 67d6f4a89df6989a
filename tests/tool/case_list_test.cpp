// The whole case list on the CPU backend; what `rewy check` runs.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "console.h"
#include "run_case.h"
#include "target.h"

namespace rewy::tool {
namespace {

std::vector<std::string> list(const char* name) {
  return case_lines(read_text(std::string(REWY_CASES "/") + name));
}

TEST(CaseList, AgreesWithTheReference) {
  for (const std::string& line : list("cpu.txt")) {
    const CheckResult r = check_case(line, {.backend = Backend::kCpu});
    EXPECT_TRUE(r.passed) << r.worst_output << " " << r.worst_error << " of " << r.worst_allowed << ", " << r.detail
                          << "\nrepeat: rewy check " << r.text;
  }
}

TEST(CaseList, AgreesWithTheReferenceTokenByToken) {
  for (const std::string& line : token_lines(list("cpu.txt"))) {
    const CheckResult r = check_case(line, {.backend = Backend::kCpu});
    EXPECT_TRUE(r.passed) << r.worst_output << " " << r.worst_error << " of " << r.worst_allowed << ", " << r.detail
                          << "\nrepeat: rewy check " << r.text;
    EXPECT_FALSE(r.declined) << line;
    for (const Comparison& c : r.comparisons) EXPECT_TRUE(c.output == "o" || c.output == "final_state") << c.output;
  }
}

TEST(CaseList, LinesAreDistinctAndFormatBack) {
  std::vector<std::string> seen;
  for (const std::string& line : list("cpu.txt")) {
    const Case c = parse_case(line);
    EXPECT_EQ(parse_case(format_case(c)), c) << line;
    seen.push_back(format_case(c));
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  EXPECT_EQ(twice, seen.end()) << *twice;
}

TEST(CaseList, SanitizedProblemsAreServedAsWritten) {
  const Device gpu{DeviceKind::kCuda, 0};
  std::set<std::pair<Operator, DType>> kinds;
  for (const std::string& line : list("sanitize.txt")) {
    const Case c = parse_case(line);
    if (c.schedule == Schedule::kChunks) kinds.emplace(c.problem.op, c.problem.dtype);
    EXPECT_EQ(for_device(c, gpu).problem.dtype, c.problem.dtype) << line;
    EXPECT_EQ(service(for_device(c, gpu), gpu).kind, Service::Kind::kServed) << line;
    EXPECT_TRUE(check_case(line, {.backend = Backend::kCpu}).passed) << line;
  }
  EXPECT_EQ(kinds.size(), 8u);  // four operators, two types
}

TEST(CaseList, BenchProblemsRead) {
  for (const char* name : {"bench.txt", "bench_cuda.txt", "bench_tokens.txt"}) {
    for (const std::string& line : list(name)) EXPECT_NO_THROW(parse_case(line)) << line;
  }
  // Nothing that a GPU would be given otherwise than it is written.
  for (const char* name : {"bench_cuda.txt", "bench_tokens.txt"}) {
    for (const std::string& line : list(name)) {
      const Device gpu{DeviceKind::kCuda, 0};
      EXPECT_EQ(for_device(parse_case(line), gpu), parse_case(line)) << line;
      EXPECT_EQ(service(parse_case(line), gpu).kind, Service::Kind::kServed) << line;
    }
  }
}

}  // namespace
}  // namespace rewy::tool
