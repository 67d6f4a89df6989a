// Sequences of different lengths in one call: Gated DeltaNet, FP32, four value heads on two query/key heads. A packed
// sequence gets the same bits as it gets alone.
#include <rewy/rewy.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

struct alignas(64) Line {  // the library's buffers are 64-byte aligned
  std::byte bytes[64];
};

std::vector<float> uniform(std::size_t n, float low, float high) {
  static std::mt19937 random(1);
  std::vector<float> x(n);
  for (float& value : x) value = low + (high - low) * static_cast<float>(random()) * 0x1p-32f;
  return x;
}

constexpr auto f32 = rewy::DType::kF32;
constexpr std::int64_t H = 2, HV = 4, K = 32, V = 48;

/// The rows [first, first + rows) of a contiguous [1, T, ...] array; `row` holds the axes after T.
rewy::TensorView rows_of(const std::vector<float>& x, std::int64_t first, std::int64_t rows,
                         std::vector<std::int64_t> row) {
  std::int64_t width = 1;
  for (const std::int64_t n : row) width *= n;
  row.insert(row.begin(), {1, rows});
  return {x.data() + first * width, f32, row};
}

int main() {
  const std::vector<std::int32_t> offsets{0, 100, 100, 101, 256};  // lengths 100, 0, 1 and 155
  const std::int64_t T = offsets.back(), N = static_cast<std::int64_t>(offsets.size()) - 1;
  const auto q = uniform(T * H * K, -0.3f, 0.3f), k = uniform(T * H * K, -0.3f, 0.3f), v = uniform(T * HV * V, -1, 1);
  const auto g = uniform(T * HV, -0.1f, 0), beta = uniform(T * HV, 0, 1);

  const auto run = [&](const rewy::Problem& p, std::int64_t first, const rewy::TensorView& cu_seqlens,
                       const rewy::TensorView& o, const rewy::TensorView& final_state) {
    rewy::Execution execution;
    std::vector<Line> workspace(rewy::workspace_bytes(p, rewy::Direction::kForward).workspace / sizeof(Line) + 1);
    execution.workspace = std::as_writable_bytes(std::span(workspace));
    const rewy::Inputs in{.q = rows_of(q, first, p.T, {H, K}),
                          .k = rows_of(k, first, p.T, {H, K}),
                          .v = rows_of(v, first, p.T, {HV, V}),
                          .g = rows_of(g, first, p.T, {HV}),
                          .beta = rows_of(beta, first, p.T, {HV}),
                          .cu_seqlens = cu_seqlens};
    rewy::forward(p, {.in = in, .o = o, .final_state = final_state}, execution);
  };

  rewy::Problem p{.op = rewy::Operator::kGdn, .T = T, .H = H, .HV = HV, .K = K, .V = V, .segments = N};
  std::vector<float> o(v.size()), states(N * HV * K * V);
  run(p, 0, {offsets.data(), rewy::DType::kI32, {N + 1}}, rows_of(o, 0, T, {HV, V}),
      {states.data(), f32, {N, HV, K, V}});

  bool equal = true;
  p.segments.reset();
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t first = offsets[n];
    p.T = offsets[n + 1] - first;
    std::vector<float> alone(p.T * HV * V), state(HV * K * V);
    run(p, first, {}, rows_of(alone, 0, p.T, {HV, V}), {state.data(), f32, {1, HV, K, V}});
    const bool same = std::equal(alone.begin(), alone.end(), o.begin() + first * HV * V) &&
                      std::equal(state.begin(), state.end(), states.begin() + n * HV * K * V);
    std::printf("sequence %d, %3d tokens: packed and alone %s\n", static_cast<int>(n), static_cast<int>(p.T),
                same ? "agree in every bit" : "DIFFER");
    equal = equal && same;
  }
  return equal ? 0 : 1;
}
