#include "tensors.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>

namespace rewy::torch_ops {
namespace {

int torch_device_type(Device device) {
  return device.kind == DeviceKind::kCuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
}

int torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF64: return aoti_torch_dtype_float64();
    case DType::kF32: return aoti_torch_dtype_float32();
    case DType::kBF16: return aoti_torch_dtype_bfloat16();
    case DType::kF16: return aoti_torch_dtype_float16();
    case DType::kI32: return aoti_torch_dtype_int32();
    case DType::kI64: return aoti_torch_dtype_int64();
  }
  throw std::logic_error("rewy: an element type without a counterpart in PyTorch");
}

/// An allocation failed. The exception that PyTorch's stable interface made a code of can be asked for from 2.13 on;
/// _ops.py tells by the text what it was.
[[noreturn]] void throw_no_memory(std::span<const std::int64_t> shape, Device device) {
  using What = const char* (*)();
  static const auto what = reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  if (const char* text = what == nullptr ? nullptr : what()) throw std::runtime_error(text);
  const std::string where = device.kind == DeviceKind::kCuda ? "cuda:" + std::to_string(device.index) : "cpu";
  throw std::runtime_error("rewy: PyTorch has no memory on " + where + " for a tensor of shape " + shape_text(shape));
}

Tensor allocate(std::span<const std::int64_t> shape, int dtype, Device device) {
  std::array<std::int64_t, TensorView::kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<std::int64_t>(shape[axis], 1);  // as PyTorch strides tensors without elements
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                               torch_device_type(device), device.index, &handle) != AOTI_TORCH_SUCCESS) {
    throw_no_memory(shape, device);
  }
  return Tensor(handle);
}

/// The stream lies in PyTorch's CUDA library, which a build of PyTorch for the CPU does not have: it is looked up where
/// it has been loaded, and not linked.
void* current_cuda_stream(int device_index) {
  using GetStream = AOTITorchError (*)(std::int32_t, void**);
  static const auto get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  if (get_stream == nullptr) throw std::runtime_error("rewy: this PyTorch has no CUDA streams");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get_stream(device_index, &stream));
  return stream;
}

}  // namespace

Device device_of(const Tensor& t, const std::string& operation, const char* argument) {
  if (t.is_cpu()) return {DeviceKind::kCpu, 0};
  if (t.is_cuda()) return {DeviceKind::kCuda, t.get_device_index()};
  throw Error(operation, argument, "a tensor on cpu or cuda", "one on another device");
}

DType dtype_of(const Tensor& t, const std::string& operation, const char* argument) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16, DType::kF64, DType::kI32, DType::kI64}) {
    if (code == torch_dtype(dtype)) return dtype;
  }
  const bool offsets = std::string_view(argument) == "cu_seqlens";
  throw Error(operation, argument, offsets ? "dtype i32 or i64" : "dtype f64, f32, bf16 or f16",
              torch::headeronly::toString(t.scalar_type()));
}

TensorView view(const Tensor& t, const std::string& operation, const char* argument) {
  const auto shape = t.sizes(), strides = t.strides();
  if (shape.empty() || shape.size() > TensorView::kMaxRank) {
    throw Error(operation, argument, "1 to 4 axes", std::to_string(shape.size()));
  }
  return TensorView(t.data_ptr(), dtype_of(t, operation, argument), std::span(shape.data(), shape.size()),
                    std::span(strides.data(), strides.size()), device_of(t, operation, argument));
}

TensorView view(const OptionalTensor& t, const std::string& operation, const char* argument) {
  return t ? view(*t, operation, argument) : TensorView{};
}

Tensor allocate(std::span<const std::int64_t> shape, DType dtype, Device device) {
  return allocate(shape, torch_dtype(dtype), device);
}

Tensor allocate_workspace(std::size_t bytes, Device device) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(bytes)};
  return allocate(shape, aoti_torch_dtype_uint8(), device);
}

Tensor allocate_kept(std::size_t bytes, Device device) {
  if (bytes == 0) return allocate_workspace(bytes, device);  // the quicker way
  namespace ho = torch::headeronly;
  const std::int64_t shape[] = {static_cast<std::int64_t>(bytes)};
  const bool cuda = device.kind == DeviceKind::kCuda;
  try {
    return torch::stable::empty(
        ho::IntHeaderOnlyArrayRef(shape, 1), ho::ScalarType::Byte, std::nullopt,
        torch::stable::Device(cuda ? ho::DeviceType::CUDA : ho::DeviceType::CPU, cuda ? device.index : -1));
  } catch (const std::runtime_error&) {
    throw_no_memory(shape, device);
  }
}

std::span<std::byte> bytes_of(const Tensor& t) {
  return {static_cast<std::byte*>(t.data_ptr()), static_cast<std::size_t>(t.numel())};
}

DeviceScope::DeviceScope(Device device) {
  if (device.kind != DeviceKind::kCuda) return;
  guard_.emplace(device.index);
  stream_ = current_cuda_stream(device.index);
}

}  // namespace rewy::torch_ops
