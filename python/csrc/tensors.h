// Between PyTorch's tensors and the library's views. Only PyTorch's stable ABI (torch 2.10) is used, so that one build
// serves every later version.
#pragma once

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <span>
#include <string>

#include "rewy/rewy.h"

namespace rewy::torch_ops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// Device of a tensor. Throws Error for anything but a CPU or CUDA tensor.
Device device_of(const Tensor&, const std::string& operation, const char* argument);

/// Element type of a tensor. Throws Error for one that the library has no name for.
DType dtype_of(const Tensor&, const std::string& operation, const char* argument);

/// The tensor's memory with its own strides: nothing is copied. Throws Error for more than four axes, or none.
TensorView view(const Tensor&, const std::string& operation, const char* argument);
TensorView view(const OptionalTensor&, const std::string& operation, const char* argument);

/// A contiguous tensor without contents, from PyTorch's allocator of that device.
Tensor allocate(std::span<const std::int64_t> shape, DType, Device);
/// The same of bytes, for a call's workspace.
Tensor allocate_workspace(std::size_t bytes, Device);
/// Bytes that are a result although not all of them are written. PyTorch's deterministic mode fills them beforehand.
Tensor allocate_kept(std::size_t bytes, Device);

std::span<std::byte> bytes_of(const Tensor&);

/// Makes a CUDA device PyTorch's current one while it lives, and knows its current stream (null on the CPU).
class DeviceScope {
 public:
  explicit DeviceScope(Device);
  void* stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

}  // namespace rewy::torch_ops
