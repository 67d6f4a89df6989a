// rewy check: the case list against the FP64 reference, and the properties that hold in bits.
#include <cstdio>
#include <memory>

#include "commands.h"
#include "console.h"
#include "default_cases.h"  // made by CMake from tests/cases/cpu.txt
#include "properties.h"
#include "report.h"
#include "run_case.h"

namespace rewy::tool {
namespace {

struct Options {
  DeviceOptions device;
  std::vector<std::string> text;
  std::string cases, op, match, json;
  bool no_properties = false;
};

std::string row_text(const CheckResult& r) {
  std::string row = printf_text("%s %8s  ", r.passed ? "pass" : "FAIL", seconds_text(r.seconds).c_str());
  if (!r.worst_output.empty()) {
    row += printf_text("%-14s %.1e of %.0e  ", r.worst_output.c_str(), r.worst_error, r.worst_allowed);
  } else {
    row += std::string(31, ' ');
  }
  return row + r.text;
}

nlohmann::ordered_json json_of(const CheckResult& r) {
  nlohmann::ordered_json row{
      {"case", r.text}, {"passed", r.passed}, {"backend", r.backend}, {"seconds", r.seconds}, {"detail", r.detail}};
  if (!r.comparisons.empty()) row["outputs"] = to_json(r.comparisons);
  return row;
}

std::string repeat_command(const CheckResult& r, const Options& o) {
  std::string command = "rewy check " + r.text;
  if (o.device.device != "auto") command += " --device " + o.device.device;
  if (o.device.threads != 0) command += " --threads " + std::to_string(o.device.threads);
  return command;
}

std::vector<std::string> chosen_lines(const Options& o) {
  if (!o.text.empty()) return {joined(o.text)};
  std::vector<std::string> lines = case_lines(o.cases.empty() ? std::string(kDefaultCases) : read_text(o.cases));
  // Properties belong to the built-in list; a file of one's own is checked alone.
  if (o.cases.empty() && !o.no_properties) {
    for (std::string& line : property_lines()) lines.push_back(std::move(line));
  }
  std::erase_if(lines, [&](const std::string& line) {
    const bool other_op = !o.op.empty() && (" " + line + " ").find(" op=" + o.op + " ") == std::string::npos;
    return other_op || line.find(o.match) == std::string::npos;
  });
  return lines;
}

int check(const Options& o, const std::string& command) {
  const std::vector<std::string> lines = chosen_lines(o);
  if (lines.empty()) throw Error("check", "cases", "at least one case that the filters leave", "none");
  // A line that cannot be read is the list's fault, not a failed check: known before anything runs.
  for (const std::string& line : lines) {
    if (!is_property_line(line)) parse_case(line);
  }
  std::size_t passed = 0;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Progress progress(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    progress.at(i, lines[i]);
    const CheckResult r = is_property_line(lines[i])
                              ? check_property(lines[i], o.device.backend())
                              : check_case(lines[i], {.backend = o.device.backend(), .threads = o.device.threads});
    progress.clear();
    std::printf("%s\n", row_text(r).c_str());
    if (!r.passed || (lines.size() == 1 && r.comparisons.empty())) std::printf("     %s\n", r.detail.c_str());
    if (lines.size() == 1) std::printf("%s", error_table(r.comparisons, "     ").c_str());
    if (!r.passed) std::printf("     repeat: %s\n", repeat_command(r, o).c_str());
    std::fflush(stdout);
    passed += r.passed ? 1 : 0;
    if (!o.json.empty()) rows.push_back(json_of(r));
  }
  const std::size_t failed = lines.size() - passed;
  std::printf("%zu passed, %zu failed\n", passed, failed);
  if (!o.json.empty()) {
    write_json(o.json, {{"command", command}, {"passed", passed}, {"failed", failed}, {"cases", rows}});
  }
  return failed == 0 ? kSuccess : kFailedChecks;
}

}  // namespace

void add_check(CLI::App& app, int& status) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("check", "Check against the FP64 reference; exit status 1 if anything fails");
  command->add_option("case", o->text, "One case, such as op=gdn T=65 H=1 K=64, or property=causality op=kda");
  command->add_option("--cases", o->cases, "A case list; left out: the built-in one and all properties");
  command->add_option("--op", o->op, "Only cases of this operator")
      ->check(CLI::IsMember({"deltanet", "gdn", "kda", "gdn2"}));
  command->add_option("--match", o->match, "Only cases whose text contains this");
  command->add_option("--json", o->json, "Write the rows to this file");
  command->add_flag("--no-properties", o->no_properties, "Leave the bitwise properties out");
  o->device.add(*command);
  command->callback([o, &status] { status = check(*o, command_line()); });
}

}  // namespace rewy::tool
