// Moving data: strided storage of any type to FP32 tiles and back, transposition, and the exponential.
// Compiled once per instruction set.

#if defined(REWY_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REWY_CPU_TILE_INL_H_
#undef REWY_CPU_TILE_INL_H_
#else
#define REWY_CPU_TILE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstring>

#include "cpu/storage.h"
#include "cpu/tile.h"
#include "rewy/tensor_view.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// Whether half precision converts in hardware. Highway's emulation elsewhere (1.0.3) turns infinity into 65536, so that
// our own scalar conversions serve there.
constexpr bool kNativeHalf = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON;

inline int64_t lane_count() {
  return static_cast<int64_t>(hn::Lanes(FloatTag()));
}

/// exp(x); exp(-inf) = 0 and exp(NaN) = NaN. Results below the normal range are flushed to 0.
HWY_INLINE FloatVec exp_of(FloatVec x) {
  const FloatTag d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

HWY_INLINE float exp_of(float x) {
  return hn::GetLane(exp_of(hn::Set(FloatTag(), x)));
}

inline void fill_row(float* row, int64_t columns, float value) {
  const FloatTag d;
  const FloatVec v = hn::Set(d, value);
  for (int64_t k = 0; k < columns; k += lane_count()) hn::StoreU(v, d, row + k);
}

/// Expands `count` contiguous elements of storage type to FP32.
template <class Storage>
HWY_INLINE void load_run(const Storage* from, int64_t count, float* to) {
  const FloatTag d;
  int64_t i = 0;
  if constexpr (std::is_same_v<Storage, float>) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    i = count;
  } else if constexpr (std::is_same_v<Storage, Bf16>) {
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::Rebind<uint16_t, FloatTag> dh;
    for (; i + lane_count() <= count; i += lane_count()) {
      const auto half = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from + i));
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, half))), d, to + i);
    }
  } else if constexpr (kNativeHalf) {
    const hn::Rebind<hwy::float16_t, FloatTag> dh;
    for (; i + lane_count() <= count; i += lane_count()) {
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from + i))), d, to + i);
    }
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

/// Rounds `count` FP32 values to storage type, to nearest even.
template <class Storage>
HWY_INLINE void store_run(const float* from, int64_t count, Storage* to) {
  [[maybe_unused]] const FloatTag d;
  int64_t i = 0;
  if constexpr (std::is_same_v<Storage, float>) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    i = count;
  } else if constexpr (std::is_same_v<Storage, Bf16>) {
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::Rebind<uint16_t, FloatTag> dh;
    for (; i + lane_count() <= count; i += lane_count()) {
      const FloatVec x = hn::LoadU(d, from + i);
      const auto bits = hn::BitCast(du, x);
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
      const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
      const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
      const auto chosen = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
      hn::StoreU(hn::TruncateTo(dh, hn::ShiftRight<16>(chosen)), dh, reinterpret_cast<uint16_t*>(to + i));
    }
  }
  if constexpr (std::is_same_v<Storage, F16> && kNativeHalf) {
    const hn::Rebind<hwy::float16_t, FloatTag> dh;
    for (; i + lane_count() <= count; i += lane_count()) {
      hn::StoreU(hn::DemoteTo(dh, hn::LoadU(d, from + i)), dh, reinterpret_cast<hwy::float16_t*>(to + i));
    }
  }
  for (; i < count; ++i) to[i] = from_float<Storage>(from[i]);
}

/// Rows [token, token + n) of one head of a [B, T, heads, width] or [B, T, heads] view, columns [first, first + width).
struct Rows {
  const TensorView* view;
  int64_t batch, token, head, first;

  int64_t offset(int64_t i) const {
    return batch * view->strides[0] + (token + i) * view->strides[1] + head * view->strides[2] +
           (view->rank == 4 ? first * view->strides[3] : 0);
  }
  int64_t step() const { return view->rank == 4 ? view->strides[3] : 1; }
};

/// Fills a tile, columns padded with zeros to a multiple of 16, rows to one of kBlock.
inline void load_rows(Rows from, int64_t n, int64_t width, Tile to) {
  const int64_t columns = round_up(width, kPad);
  with_storage(from.view->dtype, [&]<class Storage>(Storage*) {
    const auto* base = static_cast<const Storage*>(from.view->data);
    for (int64_t i = 0; i < n; ++i) {
      const Storage* row = base + from.offset(i);
      float* out = to.row(i);
      if (from.step() == 1) {
        load_run(row, width, out);
      } else {
        for (int64_t k = 0; k < width; ++k) out[k] = to_float(row[k * from.step()]);
      }
      std::fill(out + width, out + columns, 0.0f);
    }
  });
  for (int64_t i = n; i < round_up(n, kBlock); ++i) std::fill_n(to.row(i), columns, 0.0f);
}

/// A column: one number a token.
inline void load_column(Rows from, int64_t n, float* to) {
  with_storage(from.view->dtype, [&]<class Storage>(Storage*) {
    const auto* base = static_cast<const Storage*>(from.view->data);
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(base[from.offset(i)]);
  });
}

inline void store_rows(Tile from, int64_t n, int64_t width, Rows to) {
  with_storage(to.view->dtype, [&]<class Storage>(Storage*) {
    auto* base = static_cast<Storage*>(to.view->data);
    for (int64_t i = 0; i < n; ++i) {
      Storage* row = base + to.offset(i);
      if (to.step() == 1) {
        store_run(from.row(i), width, row);
      } else {
        for (int64_t k = 0; k < width; ++k) row[k * to.step()] = from_float<Storage>(from.at(i, k));
      }
    }
  });
}

inline void store_column(const float* from, int64_t n, Rows to) {
  with_storage(to.view->dtype, [&]<class Storage>(Storage*) {
    auto* base = static_cast<Storage*>(to.view->data);
    for (int64_t i = 0; i < n; ++i) base[to.offset(i)] = from_float<Storage>(from[i]);
  });
}

/// to[j][i] = from[i][j] for i < rows, j < columns, both rounded up to multiples of 4 (tiles have the room).
inline void transpose(Tile from, int64_t rows, int64_t columns, Tile to) {
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dd;
  for (int64_t i = 0; i < rows; i += 4) {
    for (int64_t j = 0; j < columns; j += 4) {
      const auto r0 = hn::LoadU(d, from.row(i) + j);
      const auto r1 = hn::LoadU(d, from.row(i + 1) + j);
      const auto r2 = hn::LoadU(d, from.row(i + 2) + j);
      const auto r3 = hn::LoadU(d, from.row(i + 3) + j);
      const auto a = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));  // 00 10 01 11
      const auto b = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));  // 02 12 03 13
      const auto e = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));  // 20 30 21 31
      const auto f = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));  // 22 32 23 33
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, a, e)), d, to.row(j) + i);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, a, e)), d, to.row(j + 1) + i);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, b, f)), d, to.row(j + 2) + i);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, b, f)), d, to.row(j + 3) + i);
    }
  }
}

/// Zeroes what is above the diagonal, and the diagonal itself if `strict`, up to n columns rounded up, and rows n on.
inline void mask_lower(Tile m, int64_t n, bool strict) {
  const int64_t end = round_up(n, kPad);
  for (int64_t i = 0; i < end; ++i) {
    const int64_t keep = i < n ? i + (strict ? 0 : 1) : 0;
    std::fill(m.row(i) + keep, m.row(i) + end, 0.0f);
  }
}

/// out = a * b, elementwise, over n rows.
inline void multiply(Tile a, Tile b, int64_t n, int64_t columns, Tile out) {
  const FloatTag d;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < columns; k += lane_count()) {
      hn::StoreU(hn::Mul(hn::LoadU(d, a.row(i) + k), hn::LoadU(d, b.row(i) + k)), d, out.row(i) + k);
    }
  }
}

/// Row i of the tile times factor[i].
inline void scale_rows(Tile tile, const float* factor, int64_t rows, int64_t columns) {
  const FloatTag d;
  for (int64_t i = 0; i < rows; ++i) {
    const FloatVec f = hn::Set(d, factor[i]);
    for (int64_t k = 0; k < columns; k += lane_count()) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, tile.row(i) + k)), d, tile.row(i) + k);
    }
  }
}

inline void scale_all(Tile tile, float factor, int64_t rows, int64_t columns) {
  const FloatTag d;
  const FloatVec f = hn::Set(d, factor);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < columns; k += lane_count()) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, tile.row(i) + k)), d, tile.row(i) + k);
    }
  }
}

/// Sum over the columns of a row.
inline float sum_row(const float* row, int64_t columns) {
  const FloatTag d;
  FloatVec sum = hn::Zero(d);
  for (int64_t k = 0; k < columns; k += lane_count()) sum = hn::Add(sum, hn::LoadU(d, row + k));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

inline float dot_row(const float* a, const float* b, int64_t columns) {
  const FloatTag d;
  FloatVec sum = hn::Zero(d);
  for (int64_t k = 0; k < columns; k += lane_count()) {
    sum = hn::MulAdd(hn::LoadU(d, a + k), hn::LoadU(d, b + k), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REWY_CPU_TILE_INL_H_
