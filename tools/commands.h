// The tool's commands. Each adds itself to the parser and, when chosen, leaves the exit status.
#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <string>
#include <vector>

#include "device.h"
#include "rewy/rewy.h"
#include "run_case.h"
#include "target.h"

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
  int architecture = 0;
  void add(CLI::App&);
  Device target() const { return parse_device(device); }
  bool on_gpu() const { return names_cuda(device); }
  /// On a GPU the first backend of its table that serves the problem.
  Backend backend() const { return on_gpu() ? Backend::kAutomatic : parse_backend(device); }
  /// Throws DeviceError where a GPU is asked for and none can be used, before any work is done.
  void require() const {
    if (on_gpu()) use_device(target());
    if (!on_gpu() && architecture != 0) throw Error("device", "arch", "--device cuda", "--device " + device);
  }
  RunOptions how() const {
    return {.device = target(), .backend = backend(), .architecture = architecture, .threads = threads};
  }
  /// What --device, --arch and --threads are to be to repeat this, with a space before each.
  std::string text() const;
};

/// Words of one problem, as the shell split them; also accepted as one quoted word.
std::string joined(const std::vector<std::string>& words);

}  // namespace rewy::tool
