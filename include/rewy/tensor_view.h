// Non-owning strided tensors. rewy/dlpack.h converts them to and from DLPack's DLTensor.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "rewy/types.h"

namespace rewy {

/// At most four axes; strides count elements and may be anything, 0 and negative included, for inputs.
/// A default-constructed view means "not given".
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  TensorView() = default;

  /// A contiguous (row-major) view. `const void*` because inputs are views too; inputs are never written.
  TensorView(const void* data, DType dtype, std::span<const std::int64_t> shape, Device device = {});
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {})
      : TensorView(data, dtype, std::span(shape.begin(), shape.size()), device) {}
  TensorView(const void* data, DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
             Device device = {});

  /// True for a tensor that was passed, also one without elements (whose data pointer may be null).
  bool given() const { return rank != 0; }
  std::int64_t elements() const;
  std::span<const std::int64_t> dims() const { return {shape.data(), static_cast<std::size_t>(rank)}; }
};

/// "[1, 64, 2, 128]"
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace rewy
