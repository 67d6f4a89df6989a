// The tool's commands. Each adds itself to the parser and, when chosen, leaves the exit status.
#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <string>
#include <vector>

#include "rewy/rewy.h"

namespace rewy::tool {

enum ExitStatus : int { kSuccess = 0, kFailedChecks = 1, kBadInput = 2 };

void add_grad(CLI::App&, int& status);
void add_check(CLI::App&, int& status);
void add_bench(CLI::App&, int& status);
void add_explain(CLI::App&, int& status);
void add_info(CLI::App&, int& status);

/// "rewy bench --file list.txt": what was typed, for JSON reports.
std::string command_line();
/// What went wrong, for a line on stderr: what() says nothing of use where memory ran out.
std::string reason_of(const std::exception&);

/// Options several commands share.
struct DeviceOptions {
  std::string device = "auto";
  int threads = 0;
  void add(CLI::App&);
  Backend backend() const { return parse_backend(device); }
};

/// Words of one problem, as the shell split them; also accepted as one quoted word.
std::string joined(const std::vector<std::string>& words);

}  // namespace rewy::tool
