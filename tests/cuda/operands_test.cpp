// E, F, Qg and lambda of vector gates against plain loops in FP64. Skipped where there is no GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/workspace.h"
#include "on_device.h"

namespace rewy::cuda {
namespace {

template <class T>
T stored(double x) {
  return T(static_cast<float>(x));
}

template <class T>
struct Trial {
  Operator op;
  std::int64_t B, tokens, H, HV, K;
  bool in_dg;
};

/// Rows of q, k and b have a gap behind each token. What must not be written holds kUntouched.
template <class T>
void check_operands(const Trial<T>& trial) {
  const auto [op, B, tokens, H, HV, K, in_dg] = trial;
  SCOPED_TRACE(std::string(name(op)) + " T = " + std::to_string(tokens) + ", K = " + std::to_string(K));
  constexpr std::int64_t kPad = 8;
  constexpr float kUntouched = 77.0f, kScale = 0.3f;
  constexpr bool kHalf = std::is_same_v<T, __half>;
  std::mt19937_64 random(static_cast<std::uint64_t>(tokens * 1000 + K));
  std::normal_distribution<double> normal;
  const auto filled = [&](std::int64_t heads, std::int64_t width) {
    std::vector<T> x(static_cast<std::size_t>(B * tokens * (heads * width + kPad)));
    for (T& e : x) e = stored<T>(normal(random));
    return x;
  };
  const std::vector<T> q = filled(H, K), k = filled(H, K), b = filled(HV, K), beta = filled(HV, 1);
  std::vector<float> g(static_cast<std::size_t>(B * tokens * HV * K));
  for (float& e : g) {
    e = -0.05f * static_cast<float>(std::abs(normal(random)));
    if (random() % 512 == 0) e = -std::numeric_limits<float>::infinity();
  }
  const std::int64_t slots = B * ((tokens + 63) / 64);
  const OnDevice<T> on_q(q), on_k(k), on_b(b), on_beta(beta);
  const OnDevice<float> on_g(g), decay(std::vector<float>(static_cast<std::size_t>(slots * HV * K), kUntouched));
  const std::vector<T> untouched(g.size(), stored<T>(kUntouched));
  const OnDevice<T> query(untouched), erase(untouched), write(untouched), dg(std::vector<T>(2 * g.size()));

  Params p{};
  p.B = B, p.T = tokens, p.sequences = B, p.chunks = slots;
  p.H = static_cast<std::int32_t>(H), p.HV = static_cast<std::int32_t>(HV), p.K = static_cast<std::int32_t>(K);
  p.scale = kScale;
  p.strength_dtype = kHalf ? DType::kF16 : DType::kBF16;
  const auto padded = [&](T* data, std::int64_t heads, std::int64_t width) {
    return Rows{data, tokens * (heads * width + kPad), heads * width + kPad, width};
  };
  const auto plain = [&](void* data) { return Rows{data, tokens * HV * K, HV * K, K}; };
  p.q = padded(on_q.data(), H, K), p.k = padded(on_k.data(), H, K), p.b = padded(on_b.data(), HV, K);
  p.beta = padded(on_beta.data(), HV, 1);
  p.g = plain(on_g.data());
  p.decay = decay.data();
  p.query = plain(query.data()), p.erase = plain(erase.data()), p.write = plain(write.data());
  if (in_dg) {
    p.dg = plain(dg.data());
    lay_out_in_dg({.K = K}, p);
  }
  launch_operands(p, {op, p.strength_dtype}, nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  const std::vector<T> found_query = query.values(), found_dg = dg.values();
  const std::vector<T> found_erase = erase.values(), found_write = write.values();
  const std::vector<float> found_decay = decay.values();
  const double tolerance = kHalf ? 1.0 / 1024 : 1.0 / 128;
  const auto expect_near = [&](double found, double expected) {
    // FP32 products and exponentials of 64 decays, one rounding; FP16's smallest numbers are absolute.
    ASSERT_NEAR(found, expected, tolerance * std::abs(expected) + 1e-7);
  };
  for (std::int64_t batch = 0; batch < B; ++batch) {
    for (std::int64_t head = 0; head < HV; ++head) {
      for (std::int64_t f = 0; f < K; ++f) {
        for (std::int64_t first = 0; first < tokens; first += 64) {
          const std::int64_t end = std::min(tokens, first + 64);
          const auto a = [&](std::int64_t t) {
            return std::exp(
                static_cast<double>(g[static_cast<std::size_t>(((batch * tokens + t) * HV + head) * K + f)]));
          };
          const auto of = [&](const std::vector<T>& x, std::int64_t heads, std::int64_t width, std::int64_t t,
                              std::int64_t h, std::int64_t column) {
            const std::int64_t at = (batch * tokens + t) * (heads * width + kPad) + h * width + column;
            return static_cast<double>(static_cast<float>(x[static_cast<std::size_t>(at)]));
          };
          double gamma = 1.0;
          for (std::int64_t t = first; t < end; ++t) {
            gamma *= a(t);
            double after = 1.0;
            for (std::int64_t u = t + 1; u < end; ++u) after *= a(u);
            const double key = of(k, H, K, t, head / (HV / H), f);
            const double strength = op == Operator::kGdn2 ? of(b, HV, K, t, head, f) : of(beta, HV, 1, t, head, 0);
            const std::int64_t row = (batch * tokens + t) * HV + head;
            const auto at = static_cast<std::size_t>(row * K + f), in_row = static_cast<std::size_t>(row * 2 * K + f);
            expect_near(static_cast<float>(found_query[at]), gamma * of(q, H, K, t, head / (HV / H), f));
            expect_near(static_cast<float>(in_dg ? found_dg[in_row] : found_erase[at]), gamma * (strength * key));
            expect_near(static_cast<float>(in_dg ? found_dg[in_row + static_cast<std::size_t>(K)] : found_write[at]),
                        after * key);
          }
          const std::int64_t slot = batch * ((tokens + 63) / 64) + first / 64;
          ASSERT_NEAR(found_decay[static_cast<std::size_t>((slot * HV + head) * K + f)], gamma, 1e-5 * gamma);
        }
      }
    }
  }
}

template <class T>
void check_all() {
  for (Operator op : {Operator::kKda, Operator::kGdn2}) {
    for (std::int64_t K : {8, 64, 72, 128, 256}) {
      check_operands<T>({op, 1, 130, 1, 2, K, false});
      check_operands<T>({op, 2, 64, 2, 2, K, true});
    }
    for (std::int64_t tokens : {1, 3, 4, 5, 9, 63, 65}) check_operands<T>({op, 2, tokens, 1, 3, 16, tokens % 2 == 0});
  }
}

TEST(CudaOperands, AgainstPlainLoops) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
  check_all<__nv_bfloat16>();
  check_all<__half>();
}

}  // namespace
}  // namespace rewy::cuda
