#include "rewy/tensor_view.h"

#include <algorithm>

#include "rewy/error.h"

namespace rewy {
namespace {

void check_shape(std::span<const std::int64_t> shape) {
  if (shape.empty() || shape.size() > TensorView::kMaxRank) {
    throw Error("tensor view", "shape", "1 to 4 axes", std::to_string(shape.size()));
  }
  if (std::ranges::any_of(shape, [](std::int64_t n) { return n < 0; })) {
    throw Error("tensor view", "shape", "no negative extent", shape_text(shape));
  }
}

}  // namespace

TensorView::TensorView(const void* data_, DType dtype_, std::span<const std::int64_t> shape_, Device device_)
    : data(const_cast<void*>(data_)), dtype(dtype_), device(device_) {
  check_shape(shape_);
  rank = static_cast<int>(shape_.size());
  std::ranges::copy(shape_, shape.begin());
  // Unsigned, because a shape too large for memory must reach validation without signed overflow.
  std::uint64_t stride = 1;
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    strides[axis] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(shape[axis]);
  }
}

TensorView::TensorView(const void* data_, DType dtype_, std::span<const std::int64_t> shape_,
                       std::span<const std::int64_t> strides_, Device device_)
    : data(const_cast<void*>(data_)), dtype(dtype_), device(device_) {
  check_shape(shape_);
  if (strides_.size() != shape_.size()) {
    throw Error("tensor view", "strides", std::to_string(shape_.size()) + " strides", std::to_string(strides_.size()));
  }
  rank = static_cast<int>(shape_.size());
  std::ranges::copy(shape_, shape.begin());
  std::ranges::copy(strides_, strides.begin());
}

std::int64_t TensorView::elements() const {
  if (!given()) return 0;
  std::int64_t n = 1;
  for (std::int64_t extent : dims()) n *= extent;
  return n;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace rewy
