// One layer, forward and backward: Kimi Delta Attention, FP32, 256 tokens, two heads. The forward keeps what the
// backward can reuse.
#include <rewy/rewy.h>

#include <algorithm>
#include <cmath>
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

int main() {
  constexpr auto f32 = rewy::DType::kF32;
  constexpr int T = 256, H = 2, K = 64, V = 32;
  const rewy::Problem p{
      .op = rewy::Operator::kKda, .T = T, .H = H, .HV = H, .K = K, .V = V, .policy = rewy::Policy::kSave};

  const auto q = uniform(T * H * K, -0.2f, 0.2f), k = uniform(T * H * K, -0.2f, 0.2f), v = uniform(T * H * V, -1, 1);
  const auto g = uniform(T * H * K, -0.1f, 0), beta = uniform(T * H, 0, 1), d_o = uniform(T * H * V, -1, 1);
  std::vector<float> o(v.size()), dq(q.size()), dk(k.size()), dv(v.size()), dg(g.size()), dbeta(beta.size());

  rewy::Execution execution;
  const rewy::Bytes forward_bytes = rewy::workspace_bytes(p, rewy::Direction::kForward, execution);
  const rewy::Bytes backward_bytes = rewy::workspace_bytes(p, rewy::Direction::kBackward, execution);
  std::vector<Line> workspace(std::max(forward_bytes.workspace, backward_bytes.workspace) / sizeof(Line) + 1);
  std::vector<Line> saved(forward_bytes.saved / sizeof(Line) + 1);
  execution.workspace = std::as_writable_bytes(std::span(workspace));

  const rewy::Inputs in{.q = {q.data(), f32, {1, T, H, K}},
                        .k = {k.data(), f32, {1, T, H, K}},
                        .v = {v.data(), f32, {1, T, H, V}},
                        .g = {g.data(), f32, {1, T, H, K}},
                        .beta = {beta.data(), f32, {1, T, H}}};
  rewy::forward(p, {.in = in, .o = {o.data(), f32, {1, T, H, V}}, .saved = std::as_writable_bytes(std::span(saved))},
                execution);
  rewy::backward(p,
                 {.in = in,
                  .d_o = {d_o.data(), f32, {1, T, H, V}},
                  .dq = {dq.data(), f32, {1, T, H, K}},
                  .dk = {dk.data(), f32, {1, T, H, K}},
                  .dv = {dv.data(), f32, {1, T, H, V}},
                  .dg = {dg.data(), f32, {1, T, H, K}},
                  .dbeta = {dbeta.data(), f32, {1, T, H}},
                  .saved = std::as_bytes(std::span(saved))},
                 execution);

  const auto norm = [](const std::vector<float>& x) {
    double sum = 0;
    for (const float value : x) sum += static_cast<double>(value) * value;
    return std::sqrt(sum);
  };
  std::printf("norms: o %.4f dq %.4f dk %.4f dv %.4f dg %.4f dbeta %.4f\n", norm(o), norm(dq), norm(dk), norm(dv),
              norm(dg), norm(dbeta));
}
