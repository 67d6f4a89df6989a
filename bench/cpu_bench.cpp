// Rates that the speed table needs besides whole calls (`rewy bench`): OpenBLAS's sgemm as the yardstick, and the local
// pullback of one chunk alone, by both derivative graphs. bench/run_cpu.sh runs all of it.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/cpu_bench.cpp"
// This order is Highway's: the choice of targets, then foreach_target, then the rest.
// clang-format off
#include "cpu/targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <hwy/aligned_allocator.h>
#include <hwy/highway.h>

#include <cstring>
#include <vector>

#include "cpu/local-inl.h"
#include "cpu/stages.h"

extern "C" {
void openblas_set_num_threads(int);
char* openblas_get_corename();
}

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {

/// One chunk at n = 64, K = V = 128. The tiles of a call stay in the second-level cache between its stages, as here.
struct LocalPullback {
  Problem problem{.K = 128, .V = 128};
  Sizes size{problem};
  std::size_t bytes = 4 << 20;
  hwy::AlignedFreeUniquePtr<std::byte[]> memory = hwy::AllocateAligned<std::byte>(bytes);
  Tile a, dr, r_t, state_t, e, z, p, d, de;
  ExpandedTiles expanded;
  Work::Stage work;

  LocalPullback() {
    Arena arena({memory.get(), bytes});
    TileTaker take(arena, size);
    a = take.matrix(), dr = take.values(), r_t = take.values_t(), e = take.keys(), z = take.values();
    p = take.values(), d = take.matrix(), de = take.keys();
    state_t = {arena.take<float>(size.state_t()), size.ldk};
    expanded = expanded_tiles(take);
    auto* floats = reinterpret_cast<float*>(memory.get());
    for (std::size_t i = 0; i < bytes / sizeof(float); ++i) floats[i] = static_cast<float>(i % 17) / 17 - 0.5f;
    mask_lower(a, kChunk, false);
  }
  void run(Graph graph) {
    const LocalShape shape{kChunk, 128, 128};
    const Count count{&work};
    if (graph == Graph::kRewy) {
      shared_sensitivity(a, dr, kChunk, 128, p, count);
      pull_back_rewy(shape, p, r_t, state_t, d, de, count);
    } else {
      pull_back_expanded(shape, a, dr, state_t, e, z, expanded, d, de, count);
    }
  }
};

void local_pullback(benchmark::State& state, Graph graph) {
  LocalPullback chunk;
  for (auto _ : state) {
    chunk.run(graph);
    benchmark::ClobberMemory();
  }
  const auto calls = static_cast<double>(state.iterations());
  state.counters["products"] = static_cast<double>(chunk.work.products) / calls;
  state.counters["dense_Mop"] = static_cast<double>(chunk.work.dense) / calls / 1e6;
  state.counters["executed_Mop"] = static_cast<double>(chunk.work.executed) / calls / 1e6;
  state.counters["op/s"] = benchmark::Counter(static_cast<double>(chunk.work.executed), benchmark::Counter::kIsRate);
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rewy::cpu {
namespace {

HWY_EXPORT(local_pullback);

void bench_local_pullback(benchmark::State& state, Graph graph) {
  state.SetLabel(instruction_set());
  HWY_DYNAMIC_DISPATCH(local_pullback)(state, graph);
}
BENCHMARK_CAPTURE(bench_local_pullback, rewy, Graph::kRewy)->Name("local_pullback/rewy");
BENCHMARK_CAPTURE(bench_local_pullback, expanded, Graph::kExpanded)->Name("local_pullback/expanded");

void bench_sgemm(benchmark::State& state) {
  const auto threads = static_cast<int>(state.range(0));
  constexpr int n = 2048;
  std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  openblas_set_num_threads(threads);
  state.SetLabel(openblas_get_corename());
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    benchmark::ClobberMemory();
  }
  state.counters["op/s"] =
      benchmark::Counter(2.0 * n * n * n * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
BENCHMARK(bench_sgemm)->Name("sgemm_2048")->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace rewy::cpu
#endif  // HWY_ONCE
