// A user of the installed library: one forward on the CPU backend, whose answer is known by hand.
#include <rewy/rewy.h>

#include <cmath>
#include <cstdio>
#include <vector>

struct alignas(64) Line {
  std::byte bytes[64];
};

int main() {
  // One token from a zero state: o = beta (q . k) v, with scale 1.
  const rewy::Problem p{.op = rewy::Operator::kDeltaNet, .T = 1, .K = 2, .V = 3, .scale = 1.0};
  const std::vector<float> q{1.0f, 2.0f}, k{0.5f, 0.25f}, v{1.0f, 2.0f, 3.0f}, beta{0.5f};
  std::vector<float> o(3);

  rewy::Execution execution{.backend = rewy::Backend::kCpu};
  std::vector<Line> workspace(rewy::workspace_bytes(p, rewy::Direction::kForward, execution).workspace / 64 + 1);
  execution.workspace = std::as_writable_bytes(std::span(workspace));

  rewy::ForwardArgs args;
  args.in.q = {q.data(), rewy::DType::kF32, {1, 1, 1, 2}};
  args.in.k = {k.data(), rewy::DType::kF32, {1, 1, 1, 2}};
  args.in.v = {v.data(), rewy::DType::kF32, {1, 1, 1, 3}};
  args.in.beta = {beta.data(), rewy::DType::kF32, {1, 1, 1}};
  args.o = {o.data(), rewy::DType::kF32, {1, 1, 1, 3}};
  rewy::forward(p, args, execution);

  std::printf("rewy %s: o = %g %g %g\n", REWY_VERSION, o[0], o[1], o[2]);
  for (int i = 0; i < 3; ++i) {
    if (std::abs(o[i] - 0.5f * v[i]) > 1e-6f) return 1;
  }
  return 0;
}
