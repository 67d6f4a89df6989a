// TensorView to and from DLPack's DLTensor. Apart from rewy.h, so that only its users need <dlpack/dlpack.h>.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "rewy/error.h"
#include "rewy/tensor_view.h"

namespace rewy {

/// A DLTensor borrowing the view's data, shape and strides: the view must be given and outlive it.
inline DLTensor to_dlpack(TensorView& view) {
  const auto code = [&]() -> DLDataTypeCode {
    switch (view.dtype) {
      case DType::kI32:
      case DType::kI64: return kDLInt;
      case DType::kBF16: return kDLBfloat;
      default: return kDLFloat;
    }
  }();
  DLTensor t{};
  t.data = view.data;
  t.device = {view.device.kind == DeviceKind::kCuda ? kDLCUDA : kDLCPU, view.device.index};
  t.ndim = view.rank;
  t.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_of(view.dtype)), 1};
  t.shape = view.shape.data();
  t.strides = view.strides.data();
  t.byte_offset = 0;
  return t;
}

/// A view of the same memory. Throws Error for more than four axes, a vector type (lanes != 1), an element type outside
/// DType, or a device that is neither the CPU nor CUDA. A null `strides` means contiguous, as DLPack defines it.
inline TensorView from_dlpack(const DLTensor& t, const std::string& argument = "tensor") {
  const auto refuse = [&](const std::string& expected, const std::string& actual) {
    throw Error("from_dlpack", argument, expected, actual);
  };
  if (t.ndim < 1 || t.ndim > TensorView::kMaxRank) refuse("1 to 4 axes", std::to_string(t.ndim));
  if (t.dtype.lanes != 1) refuse("scalar elements (lanes = 1)", std::to_string(t.dtype.lanes) + " lanes");
  DType dtype{};
  const int code = t.dtype.code;
  const int bits = t.dtype.bits;
  if (code == kDLFloat && bits == 64) {
    dtype = DType::kF64;
  } else if (code == kDLFloat && bits == 32) {
    dtype = DType::kF32;
  } else if (code == kDLFloat && bits == 16) {
    dtype = DType::kF16;
  } else if (code == kDLBfloat && bits == 16) {
    dtype = DType::kBF16;
  } else if (code == kDLInt && bits == 32) {
    dtype = DType::kI32;
  } else if (code == kDLInt && bits == 64) {
    dtype = DType::kI64;
  } else {
    refuse("f64, f32, bf16, f16, i32 or i64",
           "type code " + std::to_string(code) + " of " + std::to_string(bits) + " bits");
  }
  Device device{};
  if (t.device.device_type == kDLCUDA) {
    device = {DeviceKind::kCuda, t.device.device_id};
  } else if (t.device.device_type != kDLCPU && t.device.device_type != kDLCUDAHost) {
    refuse("a CPU or CUDA tensor", "DLPack device type " + std::to_string(static_cast<int>(t.device.device_type)));
  }
  const void* data = t.data == nullptr ? nullptr : static_cast<const char*>(t.data) + t.byte_offset;
  const auto rank = static_cast<std::size_t>(t.ndim);
  if (t.strides == nullptr) return TensorView(data, dtype, std::span<const std::int64_t>(t.shape, rank), device);
  return TensorView(data, dtype, std::span<const std::int64_t>(t.shape, rank),
                    std::span<const std::int64_t>(t.strides, rank), device);
}

}  // namespace rewy
