// The CPU backend's primitives against plain loops, on every instruction set this machine has.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_test.cpp"
// This order is Highway's: the choice of targets, then foreach_target, then the rest.
// clang-format off
#include "cpu/targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/highway.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/decay-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/tile-inl.h"
#include "gtest/gtest.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Matrix {
  std::vector<float> floats;
  Tile tile;
  Matrix(int64_t rows, int64_t columns, float value = 0.0f)
      : floats(static_cast<size_t>(round_up(rows, 16) * tile_stride(columns)), value),
        tile{floats.data(), tile_stride(columns)} {}
};

void fill_random(Tile t, int64_t rows, int64_t columns, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) t.at(i, j) = normal(bits);
  }
}

/// Every sum is one chain of FMAs over increasing k: the plain loop below gives the same bits where FMA exists.
void test_gemm() {
  const bool fused = HWY_TARGET != HWY_SSSE3;
  for (const GemmShape s : {GemmShape{64, 128, 128}, {64, 64, 128}, {8, 16, 1}, {16, 48, 17}, {24, 80, 64}}) {
    for (const Store store : {Store::kSet, Store::kAdd, Store::kSubtract}) {
      for (const bool flip : {false, true}) {
        Matrix a(std::max(s.rows, s.inner), std::max(s.rows, s.inner)), b(s.inner, s.columns), c(s.rows, s.columns);
        fill_random(a.tile, flip ? s.inner : s.rows, flip ? s.rows : s.inner, 1);
        fill_random(b.tile, s.inner, s.columns, 2);
        fill_random(c.tile, s.rows, s.columns, 3);
        const Matrix before = c;
        Work::Stage counted;
        gemm({a.tile, flip}, Triangle::kFull, b.tile, c.tile, s, store, {&counted});
        EXPECT_EQ(counted.products, 1);
        EXPECT_EQ(counted.dense, 2 * s.rows * s.columns * s.inner);
        EXPECT_EQ(counted.executed, counted.dense);
        for (int64_t i = 0; i < s.rows; ++i) {
          for (int64_t j = 0; j < s.columns; ++j) {
            float sum = 0;
            for (int64_t k = 0; k < s.inner; ++k) {
              sum = std::fma(flip ? a.tile.at(k, i) : a.tile.at(i, k), b.tile.at(k, j), sum);
            }
            const float old = before.floats[static_cast<size_t>(i * c.tile.ld + j)];
            const float want = store == Store::kSet ? sum : store == Store::kAdd ? old + sum : old - sum;
            if (fused) {
              ASSERT_EQ(c.tile.at(i, j), want) << i << ' ' << j << ' ' << s.inner;
            } else {
              ASSERT_NEAR(c.tile.at(i, j), want, 1e-4) << i << ' ' << j;
            }
          }
        }
      }
    }
  }
}

/// What a triangular A masks is never read: NaN on the other side of its diagonal, or in the rows of B it masks, stays
/// out.
void test_triangles() {
  const int64_t n = 64, columns = 48;
  for (const bool flip : {false, true}) {
    for (const Triangle triangle : {Triangle::kLower, Triangle::kUpper}) {
      Matrix a(n, n, kNan), b(n, columns), c(n, columns);
      fill_random(b.tile, n, columns, 5);
      const auto inside = [&](int64_t i, int64_t k) { return triangle == Triangle::kLower ? k <= i : k >= i; };
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t k = 0; k < n; ++k) {
          if (inside(i, k)) (flip ? a.tile.at(k, i) : a.tile.at(i, k)) = static_cast<float>(i + 2 * k + 1) / 64;
        }
      }
      const int64_t poisoned = triangle == Triangle::kLower ? n - 1 : 0;
      for (int64_t j = 0; j < columns; ++j) b.tile.at(poisoned, j) = kNan;
      Work::Stage counted;
      gemm({a.tile, flip}, triangle, b.tile, c.tile, {n, columns, n}, Store::kSet, {&counted});
      EXPECT_LT(counted.executed, counted.dense * 6 / 10);
      for (int64_t i = 0; i < n; ++i) {
        double want = 0;
        for (int64_t k = 0; k < n; ++k) {
          if (inside(i, k)) want += static_cast<double>(i + 2 * k + 1) / 64 * b.tile.at(k, 7);
        }
        if (i == poisoned) {
          ASSERT_TRUE(std::isnan(c.tile.at(i, 7)));
        } else {
          ASSERT_NEAR(c.tile.at(i, 7), want, 1e-4) << i;
        }
      }
    }
  }
}

void test_transpose() {
  for (const int64_t rows : {1, 16, 64}) {
    for (const int64_t columns : {16, 96, 128}) {
      Matrix from(round_up(rows, 4), columns), to(columns, std::max<int64_t>(rows, 64));
      fill_random(from.tile, round_up(rows, 4), columns, 7);
      transpose(from.tile, rows, columns, to.tile);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) ASSERT_EQ(to.tile.at(j, i), from.tile.at(i, j));
      }
    }
  }
}

void test_exp() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_of(0.0f), 1.0f);
  EXPECT_EQ(exp_of(-kInfinity), 0.0f);
  EXPECT_EQ(exp_of(-1e30f), 0.0f);
  EXPECT_EQ(exp_of(-200.0f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_of(kNan)));
  for (float x = -80.0f; x < 80.0f; x += 0.0371f) {
    const double want = std::exp(static_cast<double>(x));
    ASSERT_NEAR(exp_of(x) / want, 1.0, 4e-7) << x;  // 3 ulp: Highway's own bound is 1 ulp up to its range reduction
  }
}

/// Loading widens exactly and storing rounds to nearest even: every 16-bit pattern, and the midpoints between them.
template <class Storage>
void test_storage() {
  std::vector<Storage> patterns;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) patterns.push_back({static_cast<uint16_t>(bits)});
  const auto count = static_cast<int64_t>(patterns.size());
  std::vector<float> wide(patterns.size());
  load_run(patterns.data(), count, wide.data());
  std::vector<Storage> back(patterns.size());
  store_run(wide.data(), count, back.data());
  for (size_t i = 0; i < patterns.size(); ++i) {
    if (std::isnan(wide[i])) {
      ASSERT_TRUE(std::isnan(to_float(back[i]))) << i;
    } else {
      ASSERT_EQ(wide[i], to_float(patterns[i])) << i;
      ASSERT_EQ(back[i].bits, patterns[i].bits) << i;
    }
  }
  std::vector<float> midpoints;
  for (size_t i = 0; i + 1 < 0x7c00; ++i) midpoints.push_back(0.5f * (wide[i] + wide[i + 1]));
  std::vector<Storage> rounded(midpoints.size());
  store_run(midpoints.data(), static_cast<int64_t>(midpoints.size()), rounded.data());
  for (size_t i = 0; i < midpoints.size(); ++i) {
    if (midpoints[i] < std::numeric_limits<float>::min()) continue;  // may be flushed
    ASSERT_EQ(rounded[i].bits, patterns[i].bits + (patterns[i].bits & 1u)) << i;
    ASSERT_EQ(from_float<Storage>(midpoints[i]).bits, rounded[i].bits) << i;
  }
}

void test_inverse() {
  const int64_t n = 61;
  Matrix l(64, 64), a(64, 64, kNan);
  fill_random(l.tile, n, n, 9);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) l.tile.at(i, j) *= j < i ? 0.2f : 0.0f;
  }
  invert_unit_lower(l.tile, n, a.tile);
  for (int64_t i = 0; i < 64; ++i) {
    for (int64_t j = 0; j < 64; ++j) {
      if (i >= n || j > i) {
        ASSERT_EQ(a.tile.at(i, j), 0.0f);
        continue;
      }
      double product = a.tile.at(i, j);
      for (int64_t k = 0; k < i; ++k) product += static_cast<double>(l.tile.at(i, k)) * a.tile.at(k, j);
      ASSERT_NEAR(product, i == j ? 1.0 : 0.0, 1e-4);
    }
  }
}

/// The split ratios and the pairs past the limit together give exp(G_i - G_j) for every j < i, in every gate regime.
void test_split() {
  const int64_t n = 50, K = 32;
  for (const float strength : {0.05f, 3.0f, 30.0f, std::numeric_limits<float>::infinity()}) {
    Matrix g(64, K), sums(64, K), send(64, K), receive(16, K), past(16, K);
    std::mt19937 bits(11);
    std::uniform_real_distribution<float> uniform;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < K; ++k) {
        const bool some = uniform(bits) < 0.2f;
        g.tile.at(i, k) = std::isinf(strength) ? (some ? -strength : -0.1f) : -strength * uniform(bits);
      }
    }
    const Gates gates{Gate::kVector, n, K, g.tile};
    for (const Intra intra : {Intra::kMatrix, Intra::kPairwise}) {
      AnchoredSplit split(gates, intra, sums.tile, send.tile, receive.tile, past.tile);
      for (int64_t block = 0; block * kBlock < n; ++block) {
        split.begin_block(block);
        std::vector<double> ratio(static_cast<size_t>(n * n * K));
        for (int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
          for (int64_t j = 0; j < i; ++j) {
            for (int64_t k = 0; k < K; ++k) {
              const float factor = receive.tile.at(i - block * kBlock, k) * send.tile.at(j, k);
              ASSERT_TRUE(std::isfinite(factor));
              ratio[static_cast<size_t>((i * n + j) * K + k)] = factor;
            }
          }
        }
        split.for_each_pair(block, [&](int64_t i, int64_t j, int64_t k, FloatVec value) {
          std::vector<float> lanes(hn::Lanes(FloatTag()));
          hn::StoreU(value, FloatTag(), lanes.data());
          for (size_t lane = 0; lane < lanes.size(); ++lane) {
            ratio[static_cast<size_t>((i * n + j) * K + k) + lane] += lanes[lane];
          }
        });
        for (int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
          for (int64_t j = 0; j < i; ++j) {
            for (int64_t k = 0; k < K; ++k) {
              double exponent = 0;
              for (int64_t t = j + 1; t <= i; ++t) exponent += g.tile.at(t, k);
              const double want = std::exp(exponent);
              // An exponent under 64 in size is a sum of up to 16 terms, each addition rounding by 64 * 2^-25 at most.
              ASSERT_NEAR(ratio[static_cast<size_t>((i * n + j) * K + k)], want, want * 3.1e-5 + 1e-24)
                  << i << ' ' << j << ' ' << k << ' ' << strength;
            }
          }
        }
      }
    }
  }
}

void run_all() {
  SCOPED_TRACE(hwy::TargetName(HWY_TARGET));
  test_gemm();
  test_triangles();
  test_transpose();
  test_exp();
  test_storage<Bf16>();
  test_storage<F16>();
  test_inverse();
  test_split();
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rewy::cpu {
namespace {

HWY_EXPORT(run_all);

TEST(CpuKernels, PrimitivesOnEveryInstructionSet) {
  const auto usable = static_cast<uint64_t>(HWY_TARGETS) & static_cast<uint64_t>(hwy::SupportedTargets());
  ASSERT_NE(usable, 0u);
  for (uint64_t rest = usable; rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(static_cast<int64_t>(rest & ~(rest - 1)));
    HWY_DYNAMIC_DISPATCH(run_all)();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace rewy::cpu
#endif  // HWY_ONCE
