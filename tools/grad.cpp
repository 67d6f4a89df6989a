// rewy grad: reads a layer's inputs from safetensors files, writes its outputs and gradients.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <stdexcept>

#include "commands.h"
#include "console.h"
#include "report.h"
#include "run_case.h"
#include "safetensors.h"

namespace rewy::tool {
namespace {

namespace fs = std::filesystem;

struct Options {
  DeviceOptions device;
  std::vector<std::string> files;
  std::string out, json, op, policy = "recompute", graph = "rewy", intra = "matrix", gram = "on";
  std::optional<double> scale;
  std::string against;
  int repeats = 1;
  bool verify = false, zero_state = false;
};

/// A file's call, in FP32; for a GPU, in the 16-bit type it is stored in. Its tensors belong to `data`.
struct Layer {
  Data data;
  std::vector<std::string> ignored;
  std::vector<std::string> warnings;
};

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw FileError(path, reason);
}

class LayerReader {
 public:
  explicit LayerReader(const std::string& path) : path_(path), file_(SafetensorsReader::open(path)) {}

  Layer read(const Options& o) {
    Layer layer;
    Data& d = layer.data;
    Problem& p = d.problem;
    p.op = operator_of(o);
    p.scale = scale_of(o);
    p.policy = parse_policy(o.policy);
    p.variant = {parse_graph(o.graph), parse_intra(o.intra), parse_gram(o.gram)};
    if (o.device.on_gpu()) choose_types(p, layer);

    d.q = take("q", true, p.dtype);
    d.k = take("k", true, p.dtype);
    d.v = take("v", true, p.dtype);
    d.d_o = take("do", true, p.dtype);
    if (gate_of(p.op) != Gate::kNone) d.g = take("g", true);
    if (strength_of(p.op) == Strength::kShared) {
      d.beta = take("beta", true, p.strength_dtype);
    } else {
      d.b = take("b", true, p.strength_dtype);
      d.w = take("w", true, p.strength_dtype);
    }
    d.initial_state = take("initial_state", false);
    d.d_final_state = take("dfinal_state", false);
    d.cu_seqlens = take("cu_seqlens", false);
    rank("q", d.q.view, 4, "[B, T, H, K]");
    rank("v", d.v.view, 4, "[B, T, HV, V]");
    const auto& q = d.q.view.shape;
    const auto& v = d.v.view.shape;
    p.B = q[0];
    p.T = q[1];
    p.H = q[2];
    p.K = q[3];
    p.HV = v[2];
    p.V = v[3];
    if (d.cu_seqlens.given()) {
      rank("cu_seqlens", d.cu_seqlens.view, 1, "[N + 1]");
      if (d.cu_seqlens.view.shape[0] < 1) refuse(path_, "tensor 'cu_seqlens': expected [N + 1] offsets, got none");
      p.segments = d.cu_seqlens.view.shape[0] - 1;
    }
    if (o.zero_state && !d.initial_state.given()) {
      d.initial_state = Tensor(DType::kF32, {p.sequences(), p.HV, p.K, p.V});
      fill(d.initial_state.view, 0);
    }

    for (const SafetensorsTensor& t : file_.tensors()) {
      if (!taken_.contains(t.name)) layer.ignored.push_back(printable(t.name));
    }
    std::int64_t above = 0;
    for (const double g : values(d.g.view)) above += g > 0 ? 1 : 0;
    if (above > 0) {
      layer.warnings.push_back("g is above 0 in " + std::to_string(above) + " of " +
                               std::to_string(d.g.view.elements()) +
                               " elements: outside the contract (g <= 0), computed as given");
    }
    return layer;
  }

 private:
  const std::string* metadata(const char* key) const {
    const auto found = file_.metadata().find(key);
    return found == file_.metadata().end() ? nullptr : &found->second;
  }

  Operator operator_of(const Options& o) const {
    if (!o.op.empty()) return parse_operator(o.op);
    const std::string* op = metadata("op");
    if (op == nullptr) refuse(path_, "no operator: expected 'op' in the metadata, or the option --op");
    try {
      return parse_operator(*op);
    } catch (const Error& e) {
      refuse(path_, "metadata 'op': expected " + e.expected() + ", got '" + printable(*op) + "'");
    }
  }

  std::optional<double> scale_of(const Options& o) const {
    if (o.scale) return o.scale;
    const std::string* text = metadata("scale");
    if (text == nullptr) return std::nullopt;
    char* end = nullptr;
    const double scale = std::strtod(text->c_str(), &end);
    if (text->empty() || *end != '\0' || !std::isfinite(scale)) {
      refuse(path_, "metadata 'scale': expected a finite number, got '" + printable(*text) + "'");
    }
    return scale;
  }

  /// A GPU multiplies 16-bit numbers: the queries' type decides, and BF16 where they are wider.
  void choose_types(Problem& p, Layer& layer) const {
    const SafetensorsTensor* q = file_.find("q");
    const bool narrow = q != nullptr && (q->dtype == DType::kBF16 || q->dtype == DType::kF16);
    p.dtype = narrow ? *q->dtype : DType::kBF16;
    if (!narrow) layer.warnings.push_back("q is rounded to bf16 for the GPU, as k, v and do are");
    if (strength_of(p.op) == Strength::kIndependent) p.strength_dtype = p.dtype;
  }

  Tensor take(const char* name, bool required, DType as = DType::kF32) {
    const SafetensorsTensor* t = file_.find(name);
    if (t == nullptr) {
      if (required) refuse(path_, std::string("tensor '") + name + "' is missing");
      return {};
    }
    taken_.insert(name);
    if (!t->supported()) refuse(path_, std::string("tensor '") + name + "': " + t->unsupported);
    const DType dtype = *t->dtype;
    const bool integer = dtype == DType::kI32 || dtype == DType::kI64;
    const bool offsets = std::string_view(name) == "cu_seqlens";
    if (integer != offsets) {
      refuse(path_, std::string("tensor '") + name + "': expected element type " +
                        (offsets ? "I32 or I64" : "F64, F32, BF16 or F16") + ", got " + t->dtype_name);
    }
    return converted(TensorView(t->data.data(), dtype, t->shape), offsets ? dtype : as);
  }

  void rank(const char* name, const TensorView& view, int expected, const char* shape) const {
    if (view.rank == expected) return;
    refuse(path_, std::string("tensor '") + name + "': expected " + std::to_string(expected) + " axes " + shape +
                      ", got shape " + shape_text(view.dims()));
  }

  std::string path_;
  SafetensorsReader file_;
  std::set<std::string, std::less<>> taken_;
};

/// The library's refusal, with its arguments under the file's names.
std::string refusal_text(const Error& e) {
  const std::string argument = e.argument() == "d_o"             ? "do"
                               : e.argument() == "d_final_state" ? "dfinal_state"
                                                                 : e.argument();
  return Error(e.operation(), argument, e.expected(), e.actual()).what();
}

std::string output_path(const Options& o, const std::string& input) {
  if (o.out.empty()) return {};
  const fs::path path = fs::is_directory(o.out) ? fs::path(o.out) / fs::path(input).filename() : fs::path(o.out);
  std::error_code ignored;
  if (fs::equivalent(path, input, ignored)) refuse(path.string(), "the output would replace the input");
  return path.string();
}

void write_outputs(const std::string& path, const Run& run, const Problem& p) {
  std::vector<TensorToWrite> tensors;
  for (const Output& output : run.outputs) {
    const TensorView& v = output.tensor.view;
    tensors.push_back({output.name, v.dtype, Shape(v.dims().begin(), v.dims().end()), v.data});
  }
  write_safetensors(path, tensors,
                    {{"op", std::string(name(p.op))},
                     {"scale", printf_text("%.17g", p.query_scale())},
                     {"producer", "rewy " REWY_VERSION}});
}

std::string problem_text(const Problem& p) {
  std::string text =
      printf_text("%s  B=%lld T=%lld H=%lld HV=%lld K=%lld V=%lld", std::string(name(p.op)).c_str(),
                  static_cast<long long>(p.B), static_cast<long long>(p.T), static_cast<long long>(p.H),
                  static_cast<long long>(p.HV), static_cast<long long>(p.K), static_cast<long long>(p.V));
  if (p.segments) text += printf_text(" segments=%lld", static_cast<long long>(*p.segments));
  return text + printf_text("  scale %.6g", p.query_scale());
}

/// Replaces the times of a first run, the warm-up, by the medians of so many more.
void take_median_times(const Call& call, const RunOptions& how, int repeats, Run& result) {
  std::vector<double> forward, backward;
  for (int i = 0; i < repeats; ++i) {
    const Run again = run(call, how);
    forward.push_back(again.forward_seconds);
    backward.push_back(again.backward_seconds);
  }
  result.forward_seconds = median(std::move(forward));
  result.backward_seconds = median(std::move(backward));
}

/// Errors of another implementation on the files at hand: {"kda": {"o": 0.0036, ...}, ...}.
nlohmann::json read_errors(const std::string& path) {
  if (path.empty()) return {};
  nlohmann::json errors = nlohmann::json::parse(read_text(path), nullptr, false);
  if (!errors.is_object()) refuse(path, "expected a JSON object of operators, each with errors by output");
  return errors;
}

/// Prints both errors of every output that the other one has; whether none here is above 1.1 of its.
bool print_against(const std::vector<Comparison>& ours, const nlohmann::json& theirs, const std::string& path,
                   nlohmann::ordered_json& report) {
  constexpr double kMost = 1.1;
  Table table({"output", "here", "there", "ratio"});
  bool passed = true;
  for (const Comparison& c : ours) {
    const auto found = theirs.find(c.output);
    if (found == theirs.end() || !found->is_number()) continue;
    const double ratio = c.relative / found->get<double>();
    passed = passed && ratio <= kMost;
    table.add({c.output, printf_text("%.2e", c.relative), printf_text("%.2e", found->get<double>()),
               printf_text("%.2f", ratio)});
    report[c.output] = {{"here", c.relative}, {"there", found->get<double>()}, {"ratio", ratio}};
  }
  std::printf("  errors against those of %s: %s\n%s", path.c_str(),
              passed ? "none above 1.1 of them" : "SOME ABOVE 1.1 OF THEM", table.text("    ").c_str());
  return passed;
}

/// The exit status of one file; bad input throws.
int grad_file(const std::string& path, const Options& o, nlohmann::ordered_json& report) {
  Layer layer = LayerReader(path).read(o);
  const Problem& p = layer.data.problem;
  std::fflush(stdout);  // of the file before, so that both streams read in order where they are one
  for (const std::string& warning : layer.warnings) {
    std::fprintf(stderr, "rewy: %s: warning: %s\n", path.c_str(), warning.c_str());
  }
  for (const std::string& name : layer.ignored) {
    std::fprintf(stderr, "rewy: %s: note: tensor '%s' ignored\n", path.c_str(), name.c_str());
  }
  const std::string out = output_path(o, path);
  const RunOptions how = o.device.how();
  Run result = run(layer.data.call(), how);
  if (o.repeats > 1) take_median_times(layer.data.call(), how, o.repeats, result);

  std::printf("%s\n", path.c_str());
  std::printf("  problem    %s\n", problem_text(p).c_str());
  const std::string ran = result.backend + (result.kernels.empty() ? "" : ", " + result.kernels);
  std::printf("  ran        %s, policy %s, graph %s, intra %s, gram %s\n", ran.c_str(), o.policy.c_str(),
              o.graph.c_str(), o.intra.c_str(), o.gram.c_str());
  const std::string where =
      o.device.on_gpu() ? device_info(how.device).name
                        : std::to_string(o.device.threads == 0 ? default_threads() : o.device.threads) + " threads";
  std::printf("  time       forward %s, backward %s, %s\n", seconds_text(result.forward_seconds).c_str(),
              seconds_text(result.backward_seconds).c_str(), where.c_str());
  std::printf("  workspace  forward %s, backward %s, saved between them %s\n",
              bytes_text(result.forward_bytes.workspace).c_str(), bytes_text(result.backward_bytes.workspace).c_str(),
              bytes_text(result.forward_bytes.saved).c_str());
  for (const auto& [direction, work] :
       {std::pair("forward", &result.forward_work), std::pair("backward", &result.backward_work)}) {
    const std::string table = work_table(*work, "    ");
    if (!table.empty()) std::printf("  %s, a chunk and head\n%s", direction, table.c_str());
  }

  bool passed = true;
  std::vector<Comparison> errors;
  const nlohmann::json others = read_errors(o.against);
  nlohmann::ordered_json against;
  if (o.verify || !o.against.empty()) {
    // The reference takes about a second for 1e8 state elements updated.
    constexpr double kSlow = 1e8;
    const double updates = static_cast<double>(p.B * p.T * p.HV) * static_cast<double>(p.K * p.V);
    Progress progress(1, updates > kSlow);
    progress.at(0, "verifying " + path);
    errors = compare(result, run_reference(layer.data.call()));
    progress.clear();
    for (const Comparison& c : errors) passed = passed && c.passed;
    std::printf("  errors against the FP64 reference: %s\n%s", passed ? "all as small as they should be" : "TOO LARGE",
                error_table(errors, "    ").c_str());
    if (const auto theirs = others.find(name(p.op)); theirs != others.end()) {
      passed = print_against(errors, *theirs, o.against, against) && passed;
    }
  }
  if (!out.empty()) {
    write_outputs(out, result, p);
    std::printf("  written    %s\n", out.c_str());
  }
  report = {{"file", path},
            {"op", name(p.op)},
            {"B", p.B},
            {"T", p.T},
            {"H", p.H},
            {"HV", p.HV},
            {"K", p.K},
            {"V", p.V},
            {"scale", p.query_scale()},
            {"backend", result.backend},
            {"kernels", result.kernels},
            {"policy", o.policy},
            {"graph", o.graph},
            {"intra", o.intra},
            {"gram", o.gram},
            {"forward_s", result.forward_seconds},
            {"backward_s", result.backward_seconds},
            {"forward_work", to_json(result.forward_work)},
            {"backward_work", to_json(result.backward_work)},
            {"forward_workspace_bytes", result.forward_bytes.workspace},
            {"backward_workspace_bytes", result.backward_bytes.workspace},
            {"saved_bytes", result.forward_bytes.saved},
            {"warnings", layer.warnings},
            {"ignored", layer.ignored}};
  if (p.segments) report["segments"] = *p.segments;
  if (!errors.empty()) report["errors"] = to_json(errors);
  if (!against.empty()) report["against"] = against;
  return passed ? kSuccess : kFailedChecks;
}

void check_outputs(const Options& o) {
  if (o.out.empty()) return;
  if (o.files.size() > 1 && !fs::is_directory(o.out)) {
    refuse(o.out, "with several inputs --out must be a directory that exists");
  }
  std::set<std::string> names;
  for (const std::string& file : o.files) {
    if (o.files.size() > 1 && !names.insert(fs::path(file).filename().string()).second) {
      refuse(file, "two inputs of this name would be written to one file");
    }
  }
}

int grad(const Options& o, const std::string& command) {
  o.device.require();
  check_outputs(o);
  int status = kSuccess;
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const std::string& path : o.files) {
    nlohmann::ordered_json report;
    int one = kBadInput;
    std::string reason;
    try {
      one = grad_file(path, o, report);
    } catch (const FileError& e) {
      reason = e.what();
    } catch (const Error& e) {
      reason = path + ": " + refusal_text(e);
    } catch (const std::exception& e) {
      reason = path + ": " + reason_of(e);
    }
    if (!reason.empty()) {
      std::fflush(stdout);
      std::fprintf(stderr, "rewy: %s\n", reason.c_str());
      report = {{"file", path}, {"error", reason}};
    }
    status = std::max(status, one);
    files.push_back(std::move(report));
  }
  if (!o.json.empty()) write_json(o.json, {{"command", command}, {"files", files}});
  return status;
}

}  // namespace

void add_grad(CLI::App& app, int& status) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("grad", "Outputs and gradients of the layers in safetensors files");
  command->add_option("files", o->files, "Files with q k v do, g, beta or b w; initial_state dfinal_state cu_seqlens")
      ->required();
  command->add_option("--out", o->out,
                      "Write o final_state dq dk dv dg dbeta|db dw dinitial_state here (FP32, on a GPU as computed); a "
                      "directory where there are several inputs");
  command->add_option("--op", o->op, "Operator; left out: the file's metadata")
      ->check(CLI::IsMember({"deltanet", "gdn", "kda", "gdn2"}));
  command->add_option("--scale", o->scale, "Factor on the queries; left out: the file's metadata, else K^-0.5");
  command->add_option("--policy", o->policy, "What the forward keeps for the backward")
      ->check(CLI::IsMember({"recompute", "save"}))
      ->capture_default_str();
  command->add_option("--graph", o->graph, "Derivative graph")
      ->check(CLI::IsMember({"rewy", "expanded"}))
      ->capture_default_str();
  command->add_option("--intra", o->intra, "Vector gates inside a chunk")
      ->check(CLI::IsMember({"matrix", "pairwise"}))
      ->capture_default_str();
  command->add_option("--gram", o->gram, "Scalar gates: Gram elimination")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  command->add_flag("--verify", o->verify, "Compare every output with the FP64 reference; exit status 1 if one is off");
  command->add_option("--against", o->against,
                      "Verify, and compare with another implementation's errors on the same files, such as "
                      "examples/layers/fla.json; exit status 1 if one here is above 1.1 of the other's");
  command->add_flag("--zero-state", o->zero_state,
                    "Give an initial state of zeros where a file has none, so that its gradient is computed");
  command->add_option("--repeats", o->repeats, "Run so often and give the median times; the first run is the warm-up")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_option("--json", o->json, "Write what was printed to this file");
  o->device.add(*command);
  command->callback([o, &status] { status = grad(*o, command_line()); });
}

}  // namespace rewy::tool
