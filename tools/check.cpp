// rewy check: the case list against the FP64 reference, and the properties that hold in bits.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <future>
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
  int jobs = 0, repeat = 1;
  bool no_properties = false, no_poison = false;
};

std::string row_text(const CheckResult& r) {
  std::string row = printf_text("%s %8s  ",
                                r.passed     ? "pass"
                                : r.declined ? "decl"
                                             : "FAIL",
                                seconds_text(r.seconds).c_str());
  if (!r.worst_output.empty()) {
    row += printf_text("%-14s %.1e of %.0e  ", r.worst_output.c_str(), r.worst_error, r.worst_allowed);
  } else {
    row += std::string(31, ' ');
  }
  return row + r.text;
}

nlohmann::ordered_json json_of(const CheckResult& r) {
  nlohmann::ordered_json row{
      {"case", r.text},       {"passed", r.passed},   {"declined", r.declined}, {"beyond_contract", r.beyond_contract},
      {"backend", r.backend}, {"kernels", r.kernels}, {"seconds", r.seconds},   {"detail", r.detail}};
  if (!r.comparisons.empty()) row["outputs"] = to_json(r.comparisons);
  return row;
}

std::string repeat_command(const CheckResult& r, const Options& o) {
  std::string command = "rewy check " + r.text;
  if (o.repeat > 1) command += " --repeat " + std::to_string(o.repeat);
  return command + o.device.text();
}

/// The built-in cases, in chunks as they are written and once more token by token.
std::vector<std::string> default_lines() {
  std::vector<std::string> lines = case_lines(kDefaultCases);
  for (std::string& line : token_lines(lines)) lines.push_back(std::move(line));
  return lines;
}

std::vector<std::string> chosen_lines(const Options& o) {
  if (!o.text.empty()) return {joined(o.text)};
  std::vector<std::string> lines = o.cases.empty() ? default_lines() : case_lines(read_text(o.cases));
  // Properties belong to the built-in list; a file of one's own is checked alone.
  if (o.cases.empty() && !o.no_properties) {
    for (std::string& line : property_lines(o.device.target())) lines.push_back(std::move(line));
  }
  std::erase_if(lines, [&](const std::string& line) {
    const bool other_op = !o.op.empty() && (" " + line + " ").find(" op=" + o.op + " ") == std::string::npos;
    return other_op || line.find(o.match) == std::string::npos;
  });
  return lines;
}

CheckResult check_line(const std::string& line, const Options& o, int jobs) {
  RunOptions options = o.device.how();
  if (is_property_line(line)) return check_property(line, options);
  if (o.no_poison) options.poison.reset();
  if (jobs > 1 && options.threads == 0) options.threads = 1;  // the rows are spread over the threads already
  return check_case(line, options, o.repeat);
}

/// Checks rows on `jobs` threads, and hands them out in their order.
class Rows {
 public:
  Rows(const std::vector<std::string>& lines, const Options& o, int jobs) : promises_(lines.size()) {
    const auto count = std::min(static_cast<std::size_t>(jobs), lines.size());
    if (count < 2) return;
    for (std::size_t i = 0; i < count; ++i) {
      workers_.push_back(std::async(std::launch::async, [this, &lines, &o, jobs] {
        for (std::size_t row; (row = next_++) < lines.size();) {
          try {
            promises_[row].set_value(check_line(lines[row], o, jobs));
          } catch (...) {
            promises_[row].set_exception(std::current_exception());
          }
        }
      }));
    }
  }
  ~Rows() { next_ = promises_.size(); }  // then the futures wait for the rows under way

  /// Once for every row.
  CheckResult at(std::size_t row, const std::vector<std::string>& lines, const Options& o) {
    return workers_.empty() ? check_line(lines[row], o, 1) : promises_[row].get_future().get();
  }

 private:
  std::vector<std::promise<CheckResult>> promises_;
  std::atomic<std::size_t> next_ = 0;
  std::vector<std::future<void>> workers_;
};

int check(const Options& o, const std::string& command) {
  o.device.require();
  const std::vector<std::string> lines = chosen_lines(o);
  if (lines.empty()) throw Error("check", "cases", "at least one case that the filters leave", "none");
  // A line that cannot be read is the list's fault, not a failed check: known before anything runs.
  for (const std::string& line : lines) {
    if (!is_property_line(line)) parse_case(line);
  }
  // On the CPU a row takes all threads itself; on a GPU most of the time goes into the reference and the data.
  const int jobs = o.jobs > 0 ? o.jobs : o.device.on_gpu() ? default_threads() : 1;
  std::size_t passed = 0, declined = 0, beyond = 0;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Progress progress(lines.size());
  Rows all(lines, o, jobs);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    progress.at(i, lines[i]);
    const CheckResult r = all.at(i, lines, o);
    progress.clear();
    std::printf("%s\n", row_text(r).c_str());
    const bool failed = !r.passed && !r.declined;
    if (failed || (lines.size() == 1 && r.comparisons.empty())) std::printf("     %s\n", r.detail.c_str());
    if (lines.size() == 1) std::printf("%s", error_table(r.comparisons, "     ").c_str());
    if (failed) std::printf("     repeat: %s\n", repeat_command(r, o).c_str());
    std::fflush(stdout);
    passed += r.passed ? 1 : 0;
    declined += r.declined ? 1 : 0;
    beyond += r.passed && r.beyond_contract ? 1 : 0;
    if (!o.json.empty()) rows.push_back(json_of(r));
  }
  const std::size_t failed = lines.size() - passed - declined;
  std::printf("%zu passed, %zu failed", passed, failed);
  if (o.device.on_gpu()) std::printf(", %zu declined as documented", declined);
  if (beyond > 0) std::printf("; of those passed, %zu where 16-bit storage alone loses more than the contract", beyond);
  std::printf("\n");
  if (!o.json.empty()) {
    write_json(o.json, {{"command", command},
                        {"device", o.device.on_gpu() ? device_info(o.device.target()).name : "cpu"},
                        {"architecture", o.device.architecture},
                        {"passed", passed},
                        {"failed", failed},
                        {"declined", declined},
                        {"beyond_contract", beyond},
                        {"cases", rows}});
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
  command->add_option("--match,--filter", o->match, "Only cases whose text contains this");
  command->add_option("--repeat", o->repeat, "Run every case so often and demand the same bits every time")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command
      ->add_option("--jobs", o->jobs,
                   "Rows checked at a time, a GPU's own work one after the other; 0: one, on a GPU one a thread")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_flag("--no-poison", o->no_poison,
                    "Leave a GPU's memory as it is before a call, for tools that find reads of what nobody wrote");
  command->add_option("--json", o->json, "Write the rows to this file");
  command->add_flag("--no-properties", o->no_properties, "Leave the bitwise properties out");
  o->device.add(*command);
  command->callback([o, &status] { status = check(*o, command_line()); });
}

}  // namespace rewy::tool
