// The whole backend on every instruction set this machine has, not only on the best.
#include <hwy/targets.h>

#include <cstdint>

#include "cpu/stages.h"
#include "gtest/gtest.h"
#include "run_case.h"

namespace rewy::tool {
namespace {

TEST(CpuTargets, CasesOnEveryInstructionSet) {
  const char* cases[] = {
      "op=deltanet T=75 H=2 K=64 V=32 dtype=bf16 h0=1 dht=1",
      "op=gdn T=130 H=1 HV=3 K=100 V=60 gate=mixed h0=1 dht=1",
      "op=gdn T=65 H=2 K=24 V=40 dtype=f16 gate=const:-20",
      "op=kda T=200 H=2 K=128 V=128 gate=trained h0=1 dht=1",
      "op=kda T=90 H=1 K=48 V=16 gate=reset dtype=f16 packed=17,0,64,9",
      "op=gdn2 T=129 H=2 K=64 V=96 gate=strong dtype=bf16 policy=save",
      "op=gdn2 T=64 H=1 K=8 V=8 gate=trained intra=pairwise graph=expanded",
      "op=kda T=40 H=1 HV=2 K=100 V=60 gate=mixed h0=1 dtype=bf16 schedule=tokens",
      "op=gdn2 packed=1,0,17 H=1 K=8 V=90 gate=reset dtype=f16 layout=vk schedule=tokens",
  };
  const auto usable = static_cast<std::uint64_t>(hwy::SupportedTargets());
  int sets = 0;
  for (std::uint64_t rest = usable; rest != 0; rest &= rest - 1) {
    const auto target = static_cast<std::int64_t>(rest & ~(rest - 1));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    const std::string name = cpu::instruction_set();
    if (name != hwy::TargetName(target)) continue;  // one this build leaves out
    ++sets;
    for (const char* text : cases) {
      const CheckResult result = check_case(text, {.backend = Backend::kCpu, .threads = 2});
      EXPECT_TRUE(result.passed) << name << ": " << text << ": " << result.worst_output << ' ' << result.detail;
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_GE(sets, 1);
}

}  // namespace
}  // namespace rewy::tool
