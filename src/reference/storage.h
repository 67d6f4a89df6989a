// Element types as the reference reads and writes them: to double exactly, from double with one rounding to nearest
// even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "rewy/tensor_view.h"

namespace rewy::reference {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline double widen(double x) {
  return x;
}
inline double widen(float x) {
  return x;
}
inline double widen(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
inline double widen(F16 x) {
  const int exponent = x.bits >> 10 & 31;
  const int mantissa = x.bits & 1023;
  double magnitude = 0;
  if (exponent == 31) {
    magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return x.bits >> 15 != 0 ? -magnitude : magnitude;
}

/// |x| (finite) to the nearest multiple of its last place, ties to even, in a format with `digits` significant bits
/// and least normal exponent `least`. Straight from double: a stop at FP32 would round twice.
inline double round_magnitude(double x, int digits, int least) {
  if (x == 0) return 0;
  const int last_place = std::max(std::ilogb(x), least) - digits + 1;
  return std::ldexp(std::nearbyint(std::ldexp(std::abs(x), -last_place)), last_place);
}

inline void narrow(double x, double& to) {
  to = x;
}
inline void narrow(double x, float& to) {
  to = static_cast<float>(x);
}
inline void narrow(double x, Bf16& to) {
  const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
  unsigned magnitude = 0x7fc0u;
  if (std::isinf(x)) {
    magnitude = 0x7f80u;
  } else if (!std::isnan(x)) {
    const double rounded = round_magnitude(x, 8, -126);
    // Exact in FP32, whose upper half this format is.
    magnitude = rounded >= 0x1p128 ? 0x7f80u : std::bit_cast<std::uint32_t>(static_cast<float>(rounded)) >> 16;
  }
  to.bits = static_cast<std::uint16_t>(sign | magnitude);
}
inline void narrow(double x, F16& to) {
  const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
  unsigned magnitude = 0x7e00u;
  if (std::isinf(x)) {
    magnitude = 0x7c00u;
  } else if (!std::isnan(x)) {
    const double rounded = round_magnitude(x, 11, -14);
    if (rounded >= 65536) {
      magnitude = 0x7c00u;
    } else if (rounded < 0x1p-14) {
      magnitude = static_cast<unsigned>(rounded * 0x1p24);
    } else {
      const int exponent = std::ilogb(rounded);
      const auto mantissa = static_cast<unsigned>(std::ldexp(rounded, 10 - exponent)) & 1023u;
      magnitude = static_cast<unsigned>(exponent + 15) << 10 | mantissa;
    }
  }
  to.bits = static_cast<std::uint16_t>(sign | magnitude);
}

/// Calls use(pointer) with the view's data in its element type.
template <class Use>
void with_data(const TensorView& view, Use&& use) {
  switch (view.dtype) {
    case DType::kF64: return use(static_cast<double*>(view.data));
    case DType::kF32: return use(static_cast<float*>(view.data));
    case DType::kBF16: return use(static_cast<Bf16*>(view.data));
    case DType::kF16: return use(static_cast<F16*>(view.data));
    case DType::kI32:
    case DType::kI64: return;  // offsets, which read_offset() serves
  }
}

}  // namespace rewy::reference
