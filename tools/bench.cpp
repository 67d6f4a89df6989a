// rewy bench: times problems given as text.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "commands.h"
#include "console.h"
#include "cpu/stages.h"
#include "report.h"
#include "run_case.h"
#include "safetensors.h"

namespace rewy::tool {
namespace {

struct Options {
  DeviceOptions device;
  std::vector<std::string> problem;
  std::string file, json, direction = "both";
  int repeats = 7;
  bool work = false;
};

struct Timing {
  std::string text, direction, backend;
  std::vector<double> seconds;  ///< sorted
  Work work;
  std::uint64_t workspace = 0;

  double rate() const { return static_cast<double>(work.total().executed) / median(seconds); }
};

/// A forward that saves and a backward that uses it, as in training; `direction` says which of them counts.
Timing time_problem(const std::string& text, const Options& o, const std::string& direction,
                    const std::function<void()>& tick) {
  const Case c = parse_case(text);
  const Data data = make_data(c);
  const Call call = data.call();
  RunOptions options{.backend = o.device.backend(), .threads = o.device.threads};
  options.backward = direction != "fwd";
  const bool count_forward = direction != "bwd";
  Timing t;
  t.text = format_case(c);
  t.direction = direction;
  for (int i = -1; i < o.repeats; ++i) {  // the first is the warm-up
    tick();
    const Run r = run(call, options);
    t.backend = r.backend;
    t.work = r.backward_work;
    if (count_forward) t.work += r.forward_work;
    t.work.chunks = std::max(r.forward_work.chunks, r.backward_work.chunks);  // once, so that averages are per chunk
    t.workspace = std::max(count_forward ? r.forward_bytes.workspace : 0, r.backward_bytes.workspace);
    if (i >= 0) t.seconds.push_back((count_forward ? r.forward_seconds : 0) + r.backward_seconds);
  }
  std::sort(t.seconds.begin(), t.seconds.end());
  return t;
}

void bench(const Options& o, const std::string& command) {
  std::vector<std::string> lines;
  if (!o.file.empty()) lines = case_lines(read_text(o.file));
  if (!o.problem.empty()) lines.push_back(joined(o.problem));
  if (lines.empty() && !o.file.empty()) throw FileError(o.file, "no problems in it");
  if (lines.empty()) throw Error("bench", "problem", "a problem as text, or --file", "none");
  for (const std::string& line : lines) parse_case(line);
  const std::vector<std::string> directions =
      o.direction == "all" ? std::vector<std::string>{"fwd", "bwd", "both"} : std::vector<std::string>{o.direction};

  const int threads = o.device.threads == 0 ? default_threads() : o.device.threads;
  std::printf("%s, %s, %d threads, %d observations\n", cpu_model().c_str(), cpu::instruction_set(), threads, o.repeats);
  std::printf("%-5s %-10s %11s %9s %9s %9s %11s  %s\n", "dir", "backend", "median ms", "min", "max", "GFLOP/s",
              "workspace", "problem");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const std::size_t runs = static_cast<std::size_t>(o.repeats) + 1;
  Progress progress(lines.size() * directions.size() * runs);
  std::size_t done = 0;
  for (const std::string& line : lines) {
    for (const std::string& direction : directions) {
      const Timing t = time_problem(line, o, direction, [&] { progress.at(done++, line); });
      progress.clear();
      std::printf("%-5s %-10s %11.3f %9.3f %9.3f %9.1f %11s  %s\n", direction.c_str(), t.backend.c_str(),
                  median(t.seconds) * 1e3, t.seconds.front() * 1e3, t.seconds.back() * 1e3, t.rate() * 1e-9,
                  bytes_text(t.workspace).c_str(), t.text.c_str());
      if (o.work) std::printf("%s", work_table(t.work, "      ").c_str());
      std::fflush(stdout);
      rows.push_back({{"problem", t.text},
                      {"direction", direction},
                      {"backend", t.backend},
                      {"median_s", median(t.seconds)},
                      {"min_s", t.seconds.front()},
                      {"max_s", t.seconds.back()},
                      {"observations_s", t.seconds},
                      {"work", to_json(t.work)},
                      {"operations_per_s", t.rate()},
                      {"workspace_bytes", t.workspace}});
    }
  }
  if (o.json.empty()) return;
  const nlohmann::ordered_json report{
      {"command", command},
      {"machine", {{"cpu", cpu_model()}, {"instruction_set", cpu::instruction_set()}, {"threads", threads}}},
      {"problems", rows}};
  write_json(o.json, report);
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Time problems given as text");
  command->add_option("problem", o->problem, "op=kda B=1 T=2048 H=4 K=128 V=128 dtype=bf16 gate=mild policy=recompute");
  command->add_option("--file", o->file, "A list of problems, one a line");
  command
      ->add_option("--direction", o->direction,
                   "What is timed: fwd, bwd (after a forward that is not timed), both, or all three")
      ->check(CLI::IsMember({"fwd", "bwd", "both", "all"}))
      ->capture_default_str();
  command->add_option("--repeats", o->repeats, "Observations after one warm-up")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_flag("--work", o->work, "Print products and operations by stage, a chunk and head");
  command->add_option("--json", o->json, "Write the results to this file");
  o->device.add(*command);
  command->callback([o] { bench(*o, command_line()); });
}

}  // namespace rewy::tool
