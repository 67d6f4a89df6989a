// Small matrix products C (+|-)= A B with all operands in cache. Compiled once per instruction set.
//
// Every element of C is one chain of fused multiply-adds over the inner index in increasing order, whatever the sizes,
// the position in the tile and the split over threads; causality and determinism in bits rest on that. A triangular A
// is never read outside its triangle, so a NaN in a masked row of B stays where it belongs.

#if defined(REWY_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REWY_CPU_GEMM_INL_H_
#undef REWY_CPU_GEMM_INL_H_
#else
#define REWY_CPU_GEMM_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu/tile.h"
#include "rewy/rewy.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// Rows and vectors of the register tile. 16 accumulators hide the latency of two FMA ports; AVX-512 and NEON have 32
// registers, the others 16, of which 8 accumulators use half.
constexpr int kVectorLanes = HWY_MAX_BYTES / 4;
constexpr int kRows = kVectorLanes == 16 ? 8 : 4;
constexpr int kVectors = kVectorLanes >= 8 ? 2 : (HWY_TARGET == HWY_NEON ? 4 : 2);

enum class Triangle { kFull, kLower, kUpper };  ///< where A may be nonzero: k <= i, or k >= i
enum class Store { kSet, kAdd, kSubtract };     ///< C = AB, C += AB, C -= AB

/// A as stored, or its transpose: element (i, k) is at row i, column k, or at row k, column i.
struct Left {
  Tile tile;
  bool transposed = false;
};
inline Left plain(Tile t) {
  return {t, false};
}
inline Left transposed(Tile t) {
  return {t, true};
}

struct Count {
  Work::Stage* stage;
  /// False for a block of a product that has been counted with its first block.
  bool first = true;
};

template <bool kTransposed>
HWY_INLINE float left_at(const float* a, int64_t ld, int64_t i, int64_t k) {
  return kTransposed ? a[k * ld + i] : a[i * ld + k];
}

template <bool kTransposed, Triangle kTriangle, int kNV>
HWY_NOINLINE void micro_kernel(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t ldb,
                               float* HWY_RESTRICT c, int64_t ldc, int64_t i0, int64_t inner, Store store) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  FloatVec acc[kRows][kNV];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kNV; ++v) acc[r][v] = hn::Zero(d);
  }
  const auto square = [&](int64_t k0, int64_t k1) HWY_ATTR {
    for (int64_t k = k0; k < k1; ++k) {
      FloatVec bk[kNV];
#pragma GCC unroll 4
      for (int v = 0; v < kNV; ++v) bk[v] = hn::LoadU(d, b + k * ldb + v * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const FloatVec ark = hn::Set(d, left_at<kTransposed>(a, lda, i0 + r, k));
#pragma GCC unroll 4
        for (int v = 0; v < kNV; ++v) acc[r][v] = hn::MulAdd(ark, bk[v], acc[r][v]);
      }
    }
  };
  // The triangle on the diagonal of the register tile: row r takes kk <= r (lower) or kk >= r (upper).
  const auto corner = [&]() HWY_ATTR {
#pragma GCC unroll 8
    for (int kk = 0; kk < kRows; ++kk) {
      const int64_t k = i0 + kk;
      FloatVec bk[kNV];
#pragma GCC unroll 4
      for (int v = 0; v < kNV; ++v) bk[v] = hn::LoadU(d, b + k * ldb + v * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        if (kTriangle == Triangle::kLower ? kk > r : kk < r) continue;
        const FloatVec ark = hn::Set(d, left_at<kTransposed>(a, lda, i0 + r, k));
#pragma GCC unroll 4
        for (int v = 0; v < kNV; ++v) acc[r][v] = hn::MulAdd(ark, bk[v], acc[r][v]);
      }
    }
  };
  if constexpr (kTriangle == Triangle::kFull) {
    square(0, inner);
  } else if constexpr (kTriangle == Triangle::kLower) {
    square(0, i0);
    corner();
  } else {
    corner();
    square(i0 + kRows, inner);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kNV; ++v) {
      float* at = c + (i0 + r) * ldc + v * lanes;
      if (store == Store::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, at), acc[r][v]);
      if (store == Store::kSubtract) acc[r][v] = hn::Sub(hn::LoadU(d, at), acc[r][v]);
      hn::StoreU(acc[r][v], d, at);
    }
  }
}

template <bool kTransposed, Triangle kTriangle>
int64_t gemm_blocks(Tile a, Tile b, Tile c, int64_t rows, int64_t columns, int64_t inner, Store store, bool lower_out) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(FloatTag()));
  int64_t executed = 0;
  // Column strips outside: a strip of B stays in the first-level cache while A passes.
  for (int64_t j = 0; j < columns;) {
    const bool wide = j + kVectors * lanes <= columns;
    const int64_t strip = wide ? kVectors * lanes : lanes;
    int64_t i = lower_out ? j / kRows * kRows : 0;
    for (; i < rows; i += kRows) {
      if (wide) {
        micro_kernel<kTransposed, kTriangle, kVectors>(a.data, a.ld, b.data + j, b.ld, c.data + j, c.ld, i, inner,
                                                       store);
      } else {
        micro_kernel<kTransposed, kTriangle, 1>(a.data, a.ld, b.data + j, b.ld, c.data + j, c.ld, i, inner, store);
      }
      const int64_t fma = kTriangle == Triangle::kFull    ? kRows * inner
                          : kTriangle == Triangle::kLower ? kRows * i + kRows * (kRows + 1) / 2
                                                          : kRows * (inner - i - kRows) + kRows * (kRows + 1) / 2;
      executed += 2 * fma * strip;
    }
    j += strip;
  }
  return executed;
}

struct GemmShape {
  int64_t rows, columns, inner;
};

/// C (set|add|subtract) A B. Rows are rounded up to 8 and columns to 16, where tiles hold zeros or room.
/// A triangular A is square: `inner` is then rounded up like the rows. With `lower_out`, elements above the diagonal of
/// C may be left unwritten; the caller masks them.
inline void gemm(Left a, Triangle triangle, Tile b, Tile c, GemmShape s, Store store, Count count,
                 bool lower_out = false) {
  const int64_t rows = round_up(s.rows, 8);
  const int64_t columns = round_up(s.columns, kPad);
  const int64_t inner = triangle == Triangle::kFull ? s.inner : rows;
  int64_t executed = 0;
  const auto run = [&]<bool kT>() HWY_ATTR {
    switch (triangle) {
      case Triangle::kFull:
        executed = gemm_blocks<kT, Triangle::kFull>(a.tile, b, c, rows, columns, inner, store, lower_out);
        break;
      case Triangle::kLower:
        executed = gemm_blocks<kT, Triangle::kLower>(a.tile, b, c, rows, columns, inner, store, lower_out);
        break;
      case Triangle::kUpper:
        executed = gemm_blocks<kT, Triangle::kUpper>(a.tile, b, c, rows, columns, inner, store, lower_out);
        break;
    }
  };
  if (a.transposed) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
  count.stage->products += count.first ? 1 : 0;
  count.stage->dense += 2 * s.rows * s.columns * s.inner;
  count.stage->executed += executed;
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REWY_CPU_GEMM_INL_H_
