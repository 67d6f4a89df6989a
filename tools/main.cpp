// rewy: gradients of delta-rule attention from files, and the checks and timings of this library.
#include <charconv>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#include "commands.h"
#include "rewy/version.h"

namespace rewy::tool {
namespace {

std::vector<std::string> arguments;

}  // namespace

std::string command_line() {
  return "rewy " + joined(arguments);
}

void DeviceOptions::add(CLI::App& app) {
  const auto known = [](const std::string& text) -> std::string {
    try {
      if (names_cuda(text)) {
        parse_device(text);
        return {};
      }
    } catch (const Error&) {
    }
    for (const char* word : {"auto", "cpu", "reference"}) {
      if (text == word) return {};
    }
    return "expected auto, cpu, reference, cuda or cuda:N, got '" + text + "'";
  };
  const auto architecture_known = [](const std::string& text) -> std::string {
    int value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = error == std::errc{} && end == text.data() + text.size();
    if (number && (value == 0 || (value >= 80 && value < 1000))) return {};
    return "expected 0, or 80 and up (below 1000), got '" + text + "'";
  };
  app.add_option("--device", device, "auto (the CPU), cpu, reference, cuda or cuda:N (a GPU by its number)")
      ->check(known)
      ->capture_default_str();
  app.add_option("--arch", architecture,
                 "On a GPU: only kernels for at most this compute capability, 80 for 8.0; 0: the GPU's own")
      ->check(architecture_known)
      ->capture_default_str();
  app.add_option("--threads", threads, "CPU threads; 0: all")->check(CLI::Range(0, 4096))->capture_default_str();
}

std::string DeviceOptions::text() const {
  std::string text;
  if (device != "auto") text += " --device " + device;
  if (architecture != 0) text += " --arch " + std::to_string(architecture);
  if (threads != 0) text += " --threads " + std::to_string(threads);
  return text;
}

std::string reason_of(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr || dynamic_cast<const std::length_error*>(&e) != nullptr) {
    return "this machine has not the memory that the problem needs";
  }
  return e.what();
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace rewy::tool

int main(int argc, char** argv) {
  using namespace rewy::tool;
  arguments.assign(argv + 1, argv + argc);
  CLI::App app{"Exact gradients of delta-rule attention (DeltaNet, GDN, KDA, GDN2)", "rewy"};
  app.set_version_flag("--version", "rewy " REWY_VERSION);
  app.require_subcommand(1);
  int status = kSuccess;
  add_grad(app, status);
  add_check(app, status);
  add_bench(app, status);
  add_explain(app, status);
  add_info(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);
    std::fprintf(stderr, "rewy: %s\n", e.what());
    return kBadInput;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rewy: %s\n", reason_of(e).c_str());
    return kBadInput;
  }
  return status;
}
