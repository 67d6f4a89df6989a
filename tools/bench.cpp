// rewy bench: times problems given as text.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "bench_device.h"
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
  std::string file, match, json, direction = "both";
  int repeats = 0;
  bool work = false, cold_l2 = false;

  int observations() const { return repeats > 0 ? repeats : device.on_gpu() ? 60 : 7; }
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
  RunOptions options = o.device.how();
  options.schedule = c.schedule;
  options.backward = direction != "fwd";
  const bool count_forward = direction != "bwd";
  Timing t;
  t.text = format_case(c);
  t.direction = direction;
  for (int i = -1; i < o.observations(); ++i) {  // the first is the warm-up
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

std::vector<std::string> problem_lines(const Options& o) {
  std::vector<std::string> lines;
  if (!o.file.empty()) lines = case_lines(read_text(o.file));
  std::erase_if(lines, [&](const std::string& line) { return line.find(o.match) == std::string::npos; });
  if (!o.problem.empty()) lines.push_back(joined(o.problem));
  if (lines.empty() && !o.file.empty()) throw FileError(o.file, "no problems in it that the filter leaves");
  if (lines.empty()) throw Error("bench", "problem", "a problem as text, or --file", "none");
  for (const std::string& line : lines) parse_case(line);
  return lines;
}

void bench_gpu(const Options& o, const std::string& command) {
  const std::vector<std::string> lines = problem_lines(o);
  const Device device = o.device.target();
  const DeviceInfo gpu = device_info(device);
  constexpr std::size_t kFlush = std::size_t{256} << 20;  // larger than any L2 cache
  TimingOptions timing{.observations = o.observations()};
  if (o.cold_l2) {
    timing.calls = 1;  // a second one would find what the first left
    timing.flush_bytes = kFlush;
  }
  const char* l2 = o.cold_l2 ? "256 MiB written before every replay" : "as the previous replay left it";
  std::printf("%s, driver %s, CUDA %s; graphs of %d calls, %d observations, L2 state: %s\n", gpu.name.c_str(),
              gpu.driver_version.empty() ? "unknown" : gpu.driver_version.c_str(),
              cuda_version_text(gpu.runtime).c_str(), timing.calls, timing.observations, l2);
  if (o.device.architecture != 0) {
    std::printf("kernels for at most compute capability %d.%d\n", o.device.architecture / 10,
                o.device.architecture % 10);
  }
  std::printf(
      "floor: the bytes at %.2f TB/s or the products at %.0f TFLOP/s, whichever takes longer (H200, measured)\n",
      kH200BytesPerSecond * 1e-12, kH200OperationsPerSecond * 1e-12);
  std::printf("%-9s %10s %9s %9s %7s %8s %6s %10s %10s %9s  %s\n", "call", "median us", "min", "max", "TB/s", "TFLOP/s",
              "floor", "workspace", "saved", "peak MiB", "problem");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Progress progress(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    progress.at(i, lines[i]);
    const Case c = for_device(parse_case(lines[i]), device);
    const std::string text = format_case(c);
    for (const DeviceTiming& t : time_on_device(c, o.device.how(), o.direction, timing)) {
      const double seconds = median(t.seconds);
      const double mib = static_cast<double>(t.peak()) / (1 << 20);
      progress.clear();
      std::printf("%-9s %10.2f %9.2f %9.2f %7.3f %8.1f %5.0f%% %10s %10s %9.1f  %s\n",
                  (t.direction + (t.direction == "fwd" && t.saved ? "+saved" : "")).c_str(), seconds * 1e6,
                  t.seconds.front() * 1e6, t.seconds.back() * 1e6, t.floor.bytes / seconds * 1e-12,
                  t.floor.operations / seconds * 1e-12, 100 * t.floor.seconds() / seconds,
                  bytes_text(t.workspace).c_str(), bytes_text(t.saved_bytes).c_str(), mib, text.c_str());
      std::fflush(stdout);
      rows.push_back({{"problem", text},
                      {"op", name(c.problem.op)},
                      {"B", c.problem.B},
                      {"T", c.problem.T},
                      {"H", c.problem.H},
                      {"HV", c.problem.HV},
                      {"K", c.problem.K},
                      {"V", c.problem.V},
                      {"policy", name(c.problem.policy)},
                      {"direction", t.direction},
                      {"saved", t.saved},
                      {"backend", t.backend},
                      {"kernels", t.kernels},
                      {"median_s", seconds},
                      {"min_s", t.seconds.front()},
                      {"max_s", t.seconds.back()},
                      {"observations_s", t.seconds},
                      {"bytes", t.floor.bytes},
                      {"operations", t.floor.operations},
                      {"bytes_per_s", t.floor.bytes / seconds},
                      {"operations_per_s", t.floor.operations / seconds},
                      {"floor_s", t.floor.seconds()},
                      {"fraction_of_floor", t.floor.seconds() / seconds},
                      {"workspace_bytes", t.workspace},
                      {"saved_bytes", t.saved_bytes},
                      {"outputs_bytes", t.outputs},
                      {"peak_mib", mib}});
    }
  }
  if (o.json.empty()) return;
  write_json(o.json, {{"command", command},
                      {"machine",
                       {{"cpu", cpu_model()},
                        {"gpu", gpu.name},
                        {"compute_capability", std::to_string(gpu.major) + "." + std::to_string(gpu.minor)},
                        {"driver", gpu.driver_version},
                        {"driver_cuda", cuda_version_text(gpu.driver)},
                        {"toolkit", cuda_version_text(gpu.runtime)},
                        {"l2_state", l2},
                        {"calls_a_graph", timing.calls}}},
                      {"architecture", o.device.architecture},
                      {"problems", rows}});
}

void bench(const Options& o, const std::string& command) {
  o.device.require();
  if (o.device.on_gpu()) return bench_gpu(o, command);
  const std::vector<std::string> lines = problem_lines(o);
  const auto directions_of = [&](const std::string& line) -> std::vector<std::string> {
    if (parse_case(line).schedule == Schedule::kTokens) return {"fwd"};  // there is no other
    if (o.direction == "all") return {"fwd", "bwd", "both"};
    return {o.direction};
  };

  const int threads = o.device.threads == 0 ? default_threads() : o.device.threads;
  std::printf("%s, %s, %d threads, %d observations\n", cpu_model().c_str(), cpu::instruction_set(), threads,
              o.observations());
  std::printf("%-5s %-10s %11s %9s %9s %9s %11s  %s\n", "dir", "backend", "median ms", "min", "max", "GFLOP/s",
              "workspace", "problem");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const std::size_t runs = static_cast<std::size_t>(o.observations()) + 1;
  std::size_t rows_to_come = 0;
  for (const std::string& line : lines) rows_to_come += directions_of(line).size();
  Progress progress(rows_to_come * runs);
  std::size_t done = 0;
  for (const std::string& line : lines) {
    for (const std::string& direction : directions_of(line)) {
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
  command->add_option("problem", o->problem,
                      "One problem: op=kda B=1 T=2048 H=4 K=128 V=128 dtype=bf16 gate=mild policy=recompute");
  command->add_option("--file", o->file, "A list of problems, one a line");
  command->add_option("--match,--filter", o->match, "Only problems of the list whose text contains this");
  command
      ->add_option("--direction", o->direction,
                   "What is timed: fwd, bwd (after a forward that is not timed), both, or all three; on a GPU both and "
                   "all time the two apart")
      ->check(CLI::IsMember({"fwd", "bwd", "both", "all"}))
      ->capture_default_str();
  command->add_option("--repeats", o->repeats, "Observations after the warm-up; 0: 7, on a GPU 60")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->add_flag("--cold-l2", o->cold_l2, "On a GPU: write 256 MiB before every replay, and capture one call");
  command->add_flag("--work", o->work, "Print products and operations by stage, a chunk and head");
  command->add_option("--json", o->json, "Write the results to this file");
  o->device.add(*command);
  command->callback([o] { bench(*o, command_line()); });
}

}  // namespace rewy::tool
