#include "common/dispatch.h"

#include <gtest/gtest.h>

namespace rewy {
namespace {

// Rows of a table of the test's own: the first serves up to eight key features, the second even V only.
Bytes bytes(const Problem&, Direction, const Execution&) {
  return {};
}
void forward(const Problem&, const ForwardArgs&, const Execution&) {}
void backward(const Problem&, const BackwardArgs&, const Execution&) {}
std::string wide(const Problem& p, Direction, const Execution&) {
  return p.K > 8 ? "K is above 8" : "";
}
std::string odd(const Problem& p, Direction direction, const Execution&) {
  return p.V % 2 != 0 && direction == Direction::kBackward ? "V is odd" : "";
}
const BackendEntry kFirst{Backend::kCpu, DeviceKind::kCpu, wide, bytes, forward, backward};
const BackendEntry kSecond{Backend::kReference, DeviceKind::kCpu, odd, bytes, forward, backward};
constexpr const BackendEntry* kTable[] = {&kFirst, &kSecond};

// The same with a row for another device before them.
std::string by_architecture(const Problem&, Direction, const Execution& execution) {
  return execution.architecture == 80 ? "old kernels" : "";
}
const BackendEntry kOther{Backend::kCuda, DeviceKind::kCuda, wide, bytes, forward, backward, by_architecture};
constexpr const BackendEntry* kBothDevices[] = {&kOther, &kFirst, &kSecond};

// What the library's own table says first of a call on the CPU: a line more in builds with CUDA.
std::string lines_before_cpu() {
  const bool cuda =
      !explain(Problem{.T = 1, .K = 8, .V = 8}, Direction::kForward, {.backend = Backend::kCuda}).rows.empty();
  return cuda ? "cuda declines: serves cuda tensors only\n" : "";
}

Problem problem(std::int64_t K, std::int64_t V) {
  return {.op = Operator::kGdn, .T = 4, .K = K, .V = V};
}

template <class Call>
Error refusal(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error("nothing", "thrown", "", "");
}

TEST(Dispatch, FirstThatServes) {
  EXPECT_EQ(&choose(kTable, problem(8, 3), Direction::kBackward, {}), &kFirst);
  EXPECT_EQ(&choose(kTable, problem(9, 2), Direction::kBackward, {}), &kSecond);
  EXPECT_EQ(&choose(kTable, problem(9, 3), Direction::kForward, {}), &kSecond);
}

TEST(Dispatch, Forced) {
  EXPECT_EQ(&choose(kTable, problem(8, 4), Direction::kForward, {.backend = Backend::kReference}), &kSecond);
  const Error e = refusal([] { choose(kTable, problem(9, 4), Direction::kForward, {.backend = Backend::kCpu}); });
  EXPECT_EQ(e.operation(), "gdn forward");
  EXPECT_EQ(e.argument(), "backend");
  EXPECT_EQ(e.expected(), "a backend that serves gdn of dtype f32, K = 9, V = 4 on cpu");
  EXPECT_EQ(e.actual(), "cpu: K is above 8");
}

TEST(Dispatch, NoneServes) {
  const Error e = refusal([] { choose(kTable, problem(9, 3), Direction::kBackward, {}); });
  EXPECT_EQ(e.operation(), "gdn backward");
  EXPECT_EQ(e.argument(), "backend");
  EXPECT_EQ(e.actual(), "cpu: K is above 8; reference: V is odd");
  const Error empty = refusal([] { choose({}, problem(9, 3), Direction::kBackward, {.backend = Backend::kCpu}); });
  EXPECT_EQ(empty.actual(), "cpu, which is not in this build");
}

TEST(Dispatch, OtherDevices) {
  const Execution execution{.device = {DeviceKind::kCuda, 0}};
  const Error e = refusal([&] { choose(kTable, problem(8, 4), Direction::kForward, execution); });
  EXPECT_EQ(e.argument(), "device");
  EXPECT_EQ(e.expected(), "cpu");
  EXPECT_EQ(e.actual(), "cuda: no backend of this build serves cuda tensors");
  EXPECT_EQ(explain(kTable, problem(8, 4), Direction::kForward, execution).text(),
            "cpu declines: no backend of this build serves cuda tensors\n"
            "reference declines: no backend of this build serves cuda tensors\n"
            "no backend serves it\n");
}

TEST(Dispatch, EachDeviceItsBackends) {
  const Execution cuda{.device = {DeviceKind::kCuda, 0}};
  EXPECT_EQ(&choose(kBothDevices, problem(8, 4), Direction::kForward, cuda), &kOther);
  EXPECT_EQ(&choose(kBothDevices, problem(8, 4), Direction::kForward, {}), &kFirst);
  EXPECT_EQ(explain(kBothDevices, problem(9, 4), Direction::kForward, {}).text(),
            "cuda declines: serves cuda tensors only\n"
            "cpu declines: K is above 8\n"
            "reference serves it\n");
  const Error e = refusal([&] { choose(kBothDevices, problem(9, 4), Direction::kForward, cuda); });
  EXPECT_EQ(e.argument(), "backend");
  EXPECT_EQ(e.expected(), "a backend that serves gdn of dtype f32, K = 9, V = 4 on cuda");
  EXPECT_EQ(e.actual(), "cuda: K is above 8; cpu: serves cpu tensors only; reference: serves cpu tensors only");
  Execution forced{.device = {DeviceKind::kCuda, 0}, .backend = Backend::kCpu};
  EXPECT_EQ(refusal([&] { choose(kBothDevices, problem(8, 4), Direction::kForward, forced); }).actual(),
            "cpu: serves cpu tensors only");
  forced = {.backend = Backend::kCuda};
  EXPECT_EQ(refusal([&] { choose(kBothDevices, problem(8, 4), Direction::kForward, forced); }).actual(),
            "cuda: serves cuda tensors only");
  EXPECT_EQ(refusal([&] { choose(kTable, problem(8, 4), Direction::kForward, forced); }).actual(),
            "cuda, which is not in this build");
}

TEST(Explain, RowsUpToTheChosen) {
  const Explanation first = explain(kTable, problem(8, 3), Direction::kBackward, {});
  EXPECT_EQ(first.backend, "cpu");
  EXPECT_EQ(first.rows.size(), 1u);
  EXPECT_EQ(first.text(), "cpu serves it\n");
  const Explanation second = explain(kTable, problem(9, 4), Direction::kBackward, {});
  EXPECT_EQ(second.backend, "reference");
  EXPECT_EQ(second.text(), "cpu declines: K is above 8\nreference serves it\n");
  const Explanation none = explain(kTable, problem(9, 3), Direction::kBackward, {});
  EXPECT_EQ(none.backend, "");
  EXPECT_EQ(none.text(), "cpu declines: K is above 8\nreference declines: V is odd\nno backend serves it\n");
}

TEST(Explain, NamesTheKernelsOfTheChosen) {
  const auto text = [](std::int64_t K, int architecture) {
    const Execution execution{.device = {DeviceKind::kCuda, 0}, .architecture = architecture};
    return explain(kBothDevices, problem(K, 4), Direction::kForward, execution).rows.front().answer();
  };
  EXPECT_EQ(text(8, 0), "serves it");
  EXPECT_EQ(text(8, 80), "serves it, old kernels");
  EXPECT_EQ(text(9, 80), "declines: K is above 8");
}

TEST(Explain, RefusesWhatIsNoProblem) {
  EXPECT_EQ(refusal([] { explain(problem(0, 8), Direction::kForward); }).argument(), "K");
}

TEST(Explain, TheTableOfTheLibrary) {
  Problem p = problem(32, 48);
  EXPECT_EQ(explain(p, Direction::kForward).text(), lines_before_cpu() + "cpu serves it\n");
  p.dtype = p.strength_dtype = DType::kF64;
  const Explanation e = explain(p, Direction::kBackward);
  EXPECT_EQ(e.backend, "reference");
  ASSERT_EQ(e.rows.size(), lines_before_cpu().empty() ? 2u : 3u);
  const Explanation::Row& cpu = e.rows[e.rows.size() - 2];
  EXPECT_EQ(cpu.backend, "cpu");
  EXPECT_FALSE(cpu.reason.empty());
  const Error forced = refusal([&] { workspace_bytes(p, Direction::kForward, {.backend = Backend::kCpu}); });
  EXPECT_EQ(forced.argument(), "backend");
  EXPECT_EQ(forced.actual(), "cpu: " + cpu.reason);
}

// What no backend has token by token is declined by all of them, in the same words.
TEST(Explain, TokenByToken) {
  const Execution tokens{.schedule = Schedule::kTokens};
  const auto text = [&](const Problem& p, Direction direction) { return explain(p, direction, tokens).text(); };
  const auto declined = [](const std::string& reason) {
    return lines_before_cpu() + "cpu declines: " + reason + "\nreference declines: " + reason +
           "\nno backend serves it\n";
  };
  Problem p = problem(32, 48);
  EXPECT_EQ(text(p, Direction::kForward), lines_before_cpu() + "cpu serves it\n");
  EXPECT_EQ(text(p, Direction::kBackward),
            declined("token by token there is no backward (schedule tokens is for decoding)"));
  EXPECT_EQ(refusal([&] { workspace_bytes(p, Direction::kBackward, tokens); }).argument(), "backend");
  EXPECT_EQ(refusal([&] { rewy::backward(p, {}, tokens); }).argument(), "backend");
  p.policy = Policy::kSave;
  EXPECT_EQ(text(p, Direction::kForward),
            declined("token by token nothing is saved for a backward, as policy save asks for"));
  p.policy = Policy::kRecompute;
  p.variant.gram = Gram::kOff;
  EXPECT_EQ(text(p, Direction::kForward), declined("the choice of a derivative graph is the schedule chunks'"));
}

TEST(WorkspaceBytes, TokenByTokenNothingIsSavedAndLengthDoesNotMatter) {
  Problem p = problem(32, 48);
  const Execution tokens{.threads = 3, .schedule = Schedule::kTokens};
  const Bytes few = workspace_bytes(p, Direction::kForward, tokens);
  EXPECT_EQ(few.saved, 0u);
  EXPECT_EQ(few.unsaved, 0u);
  p.T = 100'000;
  EXPECT_EQ(workspace_bytes(p, Direction::kForward, tokens).workspace, few.workspace);
  EXPECT_LT(few.workspace, workspace_bytes(p, Direction::kForward, {.threads = 3}).workspace);
}

TEST(WorkspaceBytes, AreThoseOfTheChosenRow) {
  const Problem p = problem(32, 48);
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Bytes automatic = workspace_bytes(p, direction);
    const Bytes cpu = workspace_bytes(p, direction, {.backend = Backend::kCpu});
    EXPECT_EQ(automatic.workspace, cpu.workspace);
    EXPECT_EQ(automatic.saved, cpu.saved);
  }
}

}  // namespace
}  // namespace rewy
