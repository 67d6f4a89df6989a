#include <cstdio>
#include <memory>

#include "case.h"
#include "commands.h"
#include "console.h"

namespace rewy::tool {

void add_explain(CLI::App& app, int&) {
  struct Options {
    DeviceOptions device;
    std::vector<std::string> problem;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("explain", "Which backend serves a problem, and why those before it decline");
  options->device.add(*command);
  command->add_option("problem", options->problem, "One problem: op=kda B=1 T=2048 H=4 K=128 V=128 dtype=bf16 ...")
      ->required();
  command->callback([options] {
    const Case c = parse_case(joined(options->problem));
    const Execution execution{.device = options->device.target(),
                              .threads = options->device.threads,
                              .backend = options->device.backend(),
                              .schedule = c.schedule,
                              .architecture = options->device.architecture};
    std::printf("%s\n", format_case(c).c_str());
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Explanation explanation = explain(c.problem, direction, execution);
      Table table({"backend", "answer"});
      for (const Explanation::Row& row : explanation.rows) {
        table.add({row.backend, row.answer()});
      }
      std::printf("\n%s\n%s", std::string(name(direction)).c_str(), table.text("  ").c_str());
      if (explanation.backend.empty()) {
        std::printf("  no backend serves it\n");
        continue;
      }
      const Bytes bytes = workspace_bytes(c.problem, direction, execution);
      std::printf("  workspace %s", bytes_text(bytes.workspace).c_str());
      if (bytes.unsaved > 0) std::printf(", and %s where nothing is saved", bytes_text(bytes.unsaved).c_str());
      if (bytes.without_dg > 0) std::printf(", and %s where no dg is given", bytes_text(bytes.without_dg).c_str());
      if (direction == Direction::kForward) std::printf(", saved for the backward %s", bytes_text(bytes.saved).c_str());
      std::printf("\n");
    }
  });
}

}  // namespace rewy::tool
