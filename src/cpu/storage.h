// Element types as the CPU stores them, and their scalar conversions (round to nearest even).
#pragma once

#include <bit>
#include <cstdint>

#include "rewy/types.h"

namespace rewy::cpu {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float to_float(float x) {
  return x;
}
inline float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
inline float to_float(F16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t wide = exponent == 31 ? 0x7f800000u : (exponent + 112) << 23;
  return std::bit_cast<float>(sign | wide | mantissa << 13);
}

template <class Storage>
Storage from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline Bf16 from_float<Bf16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits | 0x400000u) >> 16)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline F16 from_float<F16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and above round to inf
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 leaves the rounded multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

/// Calls `use` with a null pointer of the storage type. The backend serves no other element types.
template <class Use>
void with_storage(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::kBF16: use(static_cast<Bf16*>(nullptr)); break;
    case DType::kF16: use(static_cast<F16*>(nullptr)); break;
    default: use(static_cast<float*>(nullptr)); break;
  }
}

}  // namespace rewy::cpu
