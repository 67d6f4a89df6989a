#include <cstdio>
#include <memory>

#include "commands.h"
#include "console.h"
#include "cpu/stages.h"
#include "rewy/version.h"

namespace rewy::tool {

void add_info(CLI::App& app, int&) {
  app.add_subcommand("info", "Version, processor and instruction sets")->callback([] {
    std::printf("rewy %s\n", REWY_VERSION);
    std::printf("cpu               %s\n", cpu_model().c_str());
    std::printf("instruction sets  %s; %s is used\n", cpu::usable_instruction_sets().c_str(), cpu::instruction_set());
    std::printf("threads           %d\n", default_threads());
    std::printf("operators         deltanet, gdn, kda, gdn2\n");
    std::printf("backends          cpu, reference\n");
  });
}

}  // namespace rewy::tool
