// The built binary, run as a user does.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "console.h"
#include "run_case.h"
#include "safetensors.h"

namespace rewy::tool {
namespace {

namespace fs = std::filesystem;

struct Ran {
  int status;
  std::string out, err;
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("rewy_cli_test_" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string at(const std::string& name) const { return (dir_ / name).string(); }

  Ran rewy(const std::string& arguments) const {
    const std::string command =
        std::string(REWY_BINARY) + " " + arguments + " > " + at("stdout") + " 2> " + at("stderr");
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(at("stdout")), read_text(at("stderr"))};
  }

  using Spoil = std::function<void(std::vector<TensorToWrite>&, std::map<std::string, std::string>&)>;

  /// Writes the inputs of a case as a layer file, after `spoil` has had its way with them.
  std::string layer(const std::string& text, const Spoil& spoil = {},
                    const std::string& file = "in.safetensors") const {
    const Data data = make_data(parse_case(text));
    std::vector<TensorToWrite> tensors;
    const auto add = [&](const char* name, const Tensor& t) {
      if (!t.given()) return;
      tensors.push_back({name, t.view.dtype, Shape(t.view.dims().begin(), t.view.dims().end()), t.view.data});
    };
    add("q", data.q);
    add("k", data.k);
    add("v", data.v);
    add("do", data.d_o);
    add("g", data.g);
    add("beta", data.beta);
    add("b", data.b);
    add("w", data.w);
    add("initial_state", data.initial_state);
    add("dfinal_state", data.d_final_state);
    add("cu_seqlens", data.cu_seqlens);
    std::map<std::string, std::string> metadata{{"op", std::string(name(data.problem.op))}};
    if (spoil) spoil(tensors, metadata);
    write_safetensors(at(file), tensors, metadata);
    return at(file);
  }

  /// One clear line, exit status 2, and no output file.
  void expect_refused(const std::string& file, const std::string& reason, const std::string& options = "") const {
    const Ran r = rewy("grad " + file + " --out " + at("out.safetensors") + " " + options);
    EXPECT_EQ(r.status, 2) << r.err;
    EXPECT_TRUE(r.err.starts_with("rewy: " + file + ": ")) << r.err;
    EXPECT_NE(r.err.find(reason), std::string::npos) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    for (const auto& entry : fs::directory_iterator(dir_)) {
      EXPECT_FALSE(entry.path().filename().string().starts_with("out.safetensors")) << entry.path();
    }
  }

  fs::path dir_;
};

TensorToWrite& tensor(std::vector<TensorToWrite>& all, const std::string& name) {
  return *std::find_if(all.begin(), all.end(), [&](const TensorToWrite& t) { return t.name == name; });
}

void remove(std::vector<TensorToWrite>& all, const std::string& name) {
  std::erase_if(all, [&](const TensorToWrite& t) { return t.name == name; });
}

TEST_F(Cli, GradWritesWhatTheLibraryComputes) {
  for (const char* text :
       {"op=kda T=70 H=1 HV=2 K=24 V=40 h0=1 dht=1 dtype=bf16", "op=gdn packed=64,0,6 H=2 K=16 offsets=i64",
        "op=gdn2 B=2 T=20 H=1 K=8", "op=deltanet T=20 H=1 K=8 h0=1"}) {
    const std::string in = layer(text);
    const Ran r = rewy("grad " + in + " --verify --threads 1 --out " + at("out.safetensors"));
    ASSERT_EQ(r.status, 0) << r.err << r.out;
    const SafetensorsReader file = SafetensorsReader::open(at("out.safetensors"));
    Case c = parse_case(text);
    Data data = make_data(c);
    for (Tensor* t : {&data.q, &data.k, &data.v, &data.d_o, &data.beta}) *t = converted(t->view, DType::kF32);
    data.problem.dtype = DType::kF32;
    const tool::Run expected = run(data.call());
    EXPECT_EQ(file.tensors().size(), expected.outputs.size());
    for (const Output& output : expected.outputs) {
      const SafetensorsTensor* t = file.find(output.name);
      ASSERT_NE(t, nullptr) << output.name;
      const TensorView view(t->data.data(), *t->dtype, t->shape);
      EXPECT_EQ(first_difference(view, output.tensor.view).value_or(""), "") << output.name;
    }
  }
}

TEST_F(Cli, GradReportsAsJson) {
  const std::string in = layer("op=kda T=64 H=1 K=128");
  const Ran r = rewy("grad " + in + " --verify --graph expanded --policy save --json " + at("report.json"));
  ASSERT_EQ(r.status, 0) << r.err;
  const auto file = nlohmann::json::parse(read_text(at("report.json")))["files"][0];
  EXPECT_EQ(file["backend"], "cpu");
  EXPECT_EQ(file["graph"], "expanded");
  EXPECT_EQ(file["backward_work"]["local"]["products"], 7);
  EXPECT_LT(file["errors"]["dg"]["relative_error"], 1e-4);
  EXPECT_NE(r.out.find("7.34"), std::string::npos) << r.out;
}

TEST_F(Cli, GradComparesWithAnotherImplementation) {
  const std::string in = layer("op=gdn T=9 H=1 K=8");
  std::ofstream(at("coarse.json")) << R"({"gdn": {"o": 0.01, "dg": 0.01, "dinitial_state": 0.01}})";
  std::ofstream(at("fine.json")) << R"({"gdn": {"o": 1e-30}})";
  const Ran coarse = rewy("grad " + in + " --zero-state --against " + at("coarse.json") + " --json " + at("r.json"));
  EXPECT_EQ(coarse.status, 0) << coarse.out << coarse.err;
  EXPECT_NE(coarse.out.find("none above 1.1"), std::string::npos) << coarse.out;
  EXPECT_EQ(nlohmann::json::parse(read_text(at("r.json")))["files"][0]["against"].size(), 3u);
  EXPECT_EQ(rewy("grad " + in + " --against " + at("fine.json")).status, 1);
  std::ofstream(at("bad.json")) << "{";
  EXPECT_EQ(rewy("grad " + in + " --against " + at("bad.json")).status, 2);
}

TEST_F(Cli, GradRunsOnTheReference) {
  const Ran r = rewy("grad " + layer("op=gdn T=9 H=1 K=8") + " --device reference --verify");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("reference"), std::string::npos);
}

TEST_F(Cli, GradTakesSeveralFiles) {
  const std::string a = layer("op=kda T=9 H=1 K=8", {}, "a.safetensors");
  const std::string b = layer("op=gdn T=9 H=1 K=8", {}, "b.safetensors");
  const Ran to_file = rewy("grad " + a + " " + b + " --out " + at("out.safetensors"));
  EXPECT_EQ(to_file.status, 2);
  EXPECT_NE(to_file.err.find("must be a directory"), std::string::npos) << to_file.err;
  fs::create_directory(dir_ / "out");
  EXPECT_EQ(rewy("grad " + a + " " + b + " --out " + at("out")).status, 0);
  EXPECT_TRUE(fs::exists(dir_ / "out" / "a.safetensors") && fs::exists(dir_ / "out" / "b.safetensors"));
  // A bad one does not keep the others from being served.
  const Ran mixed = rewy("grad " + at("none") + " " + b + " --out " + at("out"));
  EXPECT_EQ(mixed.status, 2);
  EXPECT_NE(mixed.out.find("b.safetensors"), std::string::npos);
}

TEST_F(Cli, GradTakesOperatorAndScaleFromOptions) {
  const std::string in = layer("op=kda T=9 H=1 K=8", [](auto&, auto& metadata) { metadata.clear(); });
  expect_refused(in, "no operator");
  const Ran r = rewy("grad " + in + " --op kda --scale 0.5");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("scale 0.5"), std::string::npos) << r.out;
}

TEST_F(Cli, GradNotesUnknownTensorsAndPositiveGates) {
  const float extra[4] = {};
  const Ran r = rewy("grad " +
                     layer("op=kda T=64 H=1 K=8 gate=positive",
                           [&](auto& tensors, auto&) {
                             tensors.push_back({"extra", DType::kF32, {4}, extra});
                           }) +
                     " --verify");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("note: tensor 'extra' ignored"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("warning: g is above 0"), std::string::npos) << r.err;
}

TEST_F(Cli, GradRefusesBadLayers) {
  const std::string good = "op=kda T=8 H=2 K=8 h0=1";
  expect_refused(layer(good, [](auto& t, auto&) { remove(t, "q"); }), "tensor 'q' is missing");
  expect_refused(layer(good, [](auto& t, auto&) { remove(t, "do"); }), "tensor 'do' is missing");
  expect_refused(layer(good, [](auto& t, auto&) { tensor(t, "q").shape = {8, 2, 8}; }), "expected 4 axes");
  expect_refused(layer(good, [](auto& t, auto&) { tensor(t, "g").shape = {1, 8, 16}; }), "argument 'g'");
  expect_refused(layer(good, [](auto& t, auto&) { tensor(t, "do").shape = {1, 8, 1, 16}; }), "argument 'do'");
  expect_refused(layer(good,
                       [](auto& t, auto&) {
                         tensor(t, "initial_state").shape = {2, 1, 8, 8};
                       }),
                 "argument 'initial_state'");
  expect_refused(layer(good, [](auto& t, auto&) { tensor(t, "k").dtype = DType::kI32; }), "element type");
  expect_refused(layer("op=kda T=8 H=2 HV=3 K=8"), "a multiple of H");
  expect_refused(layer(good, [](auto&, auto& metadata) { metadata["op"] = "mamba"; }), "metadata 'op'");
  expect_refused(layer(good, [](auto&, auto& metadata) { metadata["scale"] = "big"; }), "metadata 'scale'");
}

TEST_F(Cli, GradRefusesBadOffsets) {
  const std::string good = "op=gdn packed=4,4 H=1 K=8";
  const auto with = [&](std::vector<std::int32_t> offsets) {
    return layer(good, [offsets](auto& t, auto&) {
      static std::vector<std::int32_t> kept;
      kept = offsets;
      tensor(t, "cu_seqlens").data = kept.data();
    });
  };
  expect_refused(with({0, 6, 4}), "cu_seqlens");
  expect_refused(with({1, 4, 8}), "entry 0");
  expect_refused(with({0, 4, 9}), "at most T");
  expect_refused(layer(good, [](auto& t, auto&) { tensor(t, "cu_seqlens").dtype = DType::kF32; }), "I32 or I64");
  expect_refused(layer(good,
                       [](auto& t, auto&) {
                         for (auto& x : t)
                           if (x.shape.size() > 2) {
                             x.shape[0] = 2;
                             x.shape[1] = 4;
                           }
                       }),
                 "packed");
}

TEST_F(Cli, GradRefusesBadFilesAndOptions) {
  expect_refused(at("absent.safetensors"), "");
  std::ofstream(at("text.safetensors")) << "no safetensors at all";
  expect_refused(at("text.safetensors"), "");
  const std::string good = layer("op=kda T=8 H=1 K=8");
  EXPECT_EQ(rewy("grad " + good + " --out " + good).status, 2);
  EXPECT_EQ(rewy("grad " + good + " --policy forget").status, 2);
  EXPECT_EQ(rewy("grad").status, 2);
  EXPECT_EQ(rewy("").status, 2);
  const Ran unwritable = rewy("grad " + good + " --out " + at("no/such/dir/out.safetensors"));
  EXPECT_EQ(unwritable.status, 2);
  EXPECT_EQ(std::count(unwritable.err.begin(), unwritable.err.end(), '\n'), 1) << unwritable.err;
}

TEST_F(Cli, GradComputesThroughNaN) {
  std::vector<float> g(8 * 2 * 8, -0.1f);
  g[40] = NAN;
  const Ran r = rewy("grad " + layer("op=kda T=8 H=2 K=8", [&](auto& t, auto&) { tensor(t, "g").data = g.data(); }));
  EXPECT_EQ(r.status, 0) << r.err;
}

TEST_F(Cli, CheckRunsOneCaseAListAndAProperty) {
  const Ran one = rewy("check op=gdn T=65 H=1 K=16");
  EXPECT_EQ(one.status, 0) << one.out;
  EXPECT_NE(one.out.find("1 passed, 0 failed"), std::string::npos);
  std::ofstream(at("list.txt")) << "# two\nop=kda T=5 H=1 K=8\nop=gdn T=5 H=1 K=8\n";
  EXPECT_NE(rewy("check --cases " + at("list.txt")).out.find("2 passed"), std::string::npos);
  EXPECT_NE(rewy("check --op gdn --cases " + at("list.txt")).out.find("1 passed"), std::string::npos);
  EXPECT_EQ(rewy("check property=empty op=kda").status, 0);
  EXPECT_EQ(rewy("check --match packed=none --json " + at("check.json")).status, 0);
  EXPECT_EQ(nlohmann::json::parse(read_text(at("check.json")))["failed"], 0);
}

TEST_F(Cli, CheckFailsWithStatusOneAndTheCommandThatRepeats) {
  std::ofstream(at("list.txt")) << "op=kda T=5 H=1 K=8\nop=kda T=5 H=2 HV=3 K=8\n";
  const Ran r = rewy("check --threads 1 --cases " + at("list.txt"));
  EXPECT_EQ(r.status, 1);
  EXPECT_NE(r.out.find("repeat: rewy check op=kda T=5 H=2 HV=3 K=8 --threads 1"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("1 passed, 1 failed"), std::string::npos) << r.out;
  EXPECT_EQ(rewy("check gate=wild").status, 2);
  EXPECT_EQ(rewy("check --match nothing-matches-this").status, 2);
}

TEST_F(Cli, BenchTimesAndReports) {
  const Ran r = rewy("bench op=kda T=64 H=1 K=32 --direction all --repeats 3 --work --json " + at("bench.json"));
  ASSERT_EQ(r.status, 0) << r.err;
  const auto report = nlohmann::json::parse(read_text(at("bench.json")));
  ASSERT_EQ(report["problems"].size(), 3u);
  for (const auto& problem : report["problems"]) {
    EXPECT_EQ(problem["observations_s"].size(), 3u);
    EXPECT_GT(problem["operations_per_s"], 0);
    EXPECT_LE(problem["min_s"], problem["median_s"]);
  }
  EXPECT_EQ(rewy("bench").status, 2);
}

// There is a forward alone, whatever is asked for.
TEST_F(Cli, TokenByToken) {
  const std::string problem = "op=gdn T=3 H=2 K=32 h0=1 schedule=tokens";
  const Ran r = rewy("bench " + problem + " --direction all --repeats 2 --json " + at("bench.json"));
  ASSERT_EQ(r.status, 0) << r.err;
  const auto rows = nlohmann::json::parse(read_text(at("bench.json")))["problems"];
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["direction"], "fwd");
  EXPECT_EQ(rows[0]["work"]["scan"]["executed"], 3 * 2 * 3 * 2 * 32 * 32);
  const Ran explained = rewy("explain " + problem);
  EXPECT_EQ(explained.status, 0);
  EXPECT_NE(explained.out.find("saved for the backward 0 B"), std::string::npos) << explained.out;
  EXPECT_NE(explained.out.find("token by token there is no backward"), std::string::npos) << explained.out;
  EXPECT_NE(rewy("check " + problem).out.find("1 passed"), std::string::npos);
  EXPECT_NE(rewy("check " + problem + " policy=save").out.find("nothing is saved"), std::string::npos);
  EXPECT_NE(rewy("check --op kda --match property=split").out.find("2 passed"), std::string::npos);
}

TEST_F(Cli, DevicesAreNamedOrRefused) {
  for (const char* word : {"gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA"}) {
    const Ran r = rewy(std::string("info --device ") + word);
    EXPECT_EQ(r.status, 2) << word;
    EXPECT_NE(r.err.find("cuda:N"), std::string::npos) << r.err;
  }
  EXPECT_EQ(rewy("info --device cpu").status, 0);
}

TEST_F(Cli, ArchitecturesAreRefusedOrTaken) {
  for (const char* word : {"79", "-80", "sm_80", "8.0", "80a", "1000"}) {
    const Ran r = rewy(std::string("info --device cuda --arch ") + word);
    EXPECT_EQ(r.status, 2) << word;
    EXPECT_NE(r.err.find("expected 0, or 80 and up"), std::string::npos) << r.err;
  }
  for (const char* command : {"info", "check op=kda T=8 H=1 K=8", "bench op=kda T=8 H=1 K=8"}) {
    const Ran r = rewy(std::string(command) + " --arch 80");
    EXPECT_EQ(r.status, 2) << command;
    EXPECT_NE(r.err.find("argument 'arch': expected --device cuda"), std::string::npos) << r.err;
  }
  EXPECT_EQ(rewy("explain op=kda T=8 H=1 K=8 --arch 80").status, 2);
  const std::string explain = "explain op=kda T=8 H=1 K=8 dtype=bf16 --device cuda --arch ";
  EXPECT_EQ(rewy(explain + "80").status, rewy(explain + "0").status);
}

TEST_F(Cli, WithoutAGpuEveryCommandSaysSoInOneLine) {
  if (rewy("info --device cuda").status == 0) GTEST_SKIP() << "this machine has a GPU";
  const std::string file = layer("op=kda T=8 H=1 K=8 dtype=bf16");
  for (const std::string& command : {std::string("info"), std::string("check op=kda T=8 H=1 K=8"),
                                     std::string("bench op=kda T=8 H=1 K=8"), "grad " + file}) {
    const Ran r = rewy(command + " --device cuda");
    EXPECT_EQ(r.status, 2) << command;
    EXPECT_TRUE(r.err.starts_with("rewy: --device cuda: ")) << r.err;
    EXPECT_TRUE(r.err.find("CUDA backend") != std::string::npos || r.err.find("no usable GPU") != std::string::npos)
        << r.err;
    EXPECT_NE(r.err.find("CPU"), std::string::npos) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  }
}

TEST_F(Cli, CheckOnSeveralJobsKeepsTheOrder) {
  std::ofstream(at("list.txt")) << "op=kda T=5 H=1 K=8\nop=gdn T=5 H=2 HV=3 K=8\nop=gdn T=70 H=1 K=8\n";
  const Ran r = rewy("check --jobs 3 --repeat 2 --cases " + at("list.txt"));
  EXPECT_EQ(r.status, 1);
  EXPECT_NE(r.out.find("2 passed, 1 failed\n"), std::string::npos) << r.out;
  EXPECT_LT(r.out.find("op=kda T=5"), r.out.find("HV=3"));
  EXPECT_LT(r.out.find("HV=3"), r.out.find("T=70"));
  EXPECT_NE(rewy("check --filter T=70 --cases " + at("list.txt")).out.find("1 passed"), std::string::npos);
}

// A report is written like any output: a link is followed, and a pipe or device is never replaced by a file.
TEST_F(Cli, ReportsFollowLinksAndLeavePipesAlone) {
  const std::string file = layer("op=gdn T=20 H=1 K=8 V=8");
  std::ofstream(at("real")) << "old";
  fs::create_symlink(at("real"), at("link"));
  ASSERT_EQ(rewy("grad " + file + " --json " + at("link")).status, 0);
  EXPECT_TRUE(fs::is_symlink(at("link")));
  EXPECT_TRUE(nlohmann::json::parse(read_text(at("real"))).contains("files"));
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  const Ran r = rewy("grad " + file + " --json " + at("pipe"));
  EXPECT_EQ(r.status, 2);
  EXPECT_NE(r.err.find("not a regular file"), std::string::npos) << r.err;
  EXPECT_TRUE(fs::is_fifo(at("pipe")));
}

TEST_F(Cli, ProblemsBeyondThisMachineAreRefusedInWords) {
  const Ran r = rewy("bench op=kda T=1000000000000");
  EXPECT_EQ(r.status, 2);
  EXPECT_NE(r.err.find("memory"), std::string::npos) << r.err;
  EXPECT_EQ(rewy("info --threads 4097").status, 2);
}

TEST_F(Cli, ExplainAndInfoPrint) {
  const Ran served = rewy("explain op=kda T=64 H=1 K=128");
  EXPECT_EQ(served.status, 0);
  EXPECT_NE(served.out.find("serves it"), std::string::npos);
  EXPECT_NE(rewy("explain dtype=f64").out.find("declines"), std::string::npos);
  EXPECT_EQ(rewy("explain op=kda HV=3 H=2").status, 2);
  EXPECT_NE(rewy("info").out.find(REWY_VERSION), std::string::npos);
  EXPECT_EQ(rewy("--version").status, 0);
  EXPECT_EQ(rewy("--help").status, 0);
}

}  // namespace
}  // namespace rewy::tool
