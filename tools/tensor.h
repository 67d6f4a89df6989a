// Owned tensors of the tool: storage, conversions to and from double, slices and bitwise comparison of views.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rewy/tensor_view.h"

namespace rewy::tool {

using Shape = std::vector<std::int64_t>;
using Index = std::array<std::int64_t, TensorView::kMaxRank>;

/// One element of any type as a double (exact, but for int64 above 2^53).
double load_element(const void* at, DType);
/// Rounds to nearest even.
void store_element(void* at, DType, double value);
/// What `value` becomes when it is stored as `dtype`.
double round_to(DType dtype, double value);

/// 64-byte aligned memory, filled with one byte value, with a guard behind it that tells whether anyone wrote past it.
class Buffer {
 public:
  static constexpr unsigned char kPoison = 0xFF;  ///< NaN in every float type

  Buffer() = default;
  explicit Buffer(std::size_t bytes, unsigned char fill = kPoison);
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return bytes_; }
  bool guard_intact() const;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t bytes_ = 0;
};

/// How a tensor lies in its buffer. Memory between the elements is poisoned, so a misread shows.
enum class Placement : std::uint8_t {
  kDense,   ///< row-major
  kPacked,  ///< cut out of a wider projection: every token's row has neighbours; scalars interleaved with others
  kOdd,     ///< heads before tokens, tokens backwards, last stride 2, stride 7919 on axes of one element
  kAligned  ///< as kPacked, with every row of a multiple of 8 elements at a multiple of 16 bytes
};

struct Tensor {
  Buffer buffer;
  TensorView view;  ///< not given: there is no tensor

  Tensor() = default;
  Tensor(DType, const Shape&, Placement = Placement::kDense);
  bool given() const { return view.given(); }
};

/// Calls fn(element address, index, position in row-major order) for the elements at positions [begin, end).
template <class Fn>
void for_each(const TensorView& view, std::int64_t begin, std::int64_t end, Fn&& fn) {
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  Index index{};
  for (std::int64_t rest = begin, axis = view.rank - 1; axis >= 0 && begin < end; --axis) {
    const auto a = static_cast<std::size_t>(axis);
    index[a] = rest % view.shape[a];
    rest /= view.shape[a];
  }
  for (std::int64_t i = begin; i < end; ++i) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < view.rank; ++axis) {
      offset += index[static_cast<std::size_t>(axis)] * view.strides[static_cast<std::size_t>(axis)];
    }
    fn(static_cast<std::byte*>(view.data) + offset * width, index, i);
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      if (++index[a] < view.shape[a]) break;
      index[a] = 0;
    }
  }
}

/// The same for every element.
template <class Fn>
void for_each(const TensorView& view, Fn&& fn) {
  for_each(view, 0, view.given() ? view.elements() : 0, fn);
}

std::vector<double> values(const TensorView&);  ///< row-major
Tensor converted(const TensorView&, DType);     ///< a dense copy
void fill(const TensorView&, double value);     ///< every element
TensorView slice(TensorView, int axis, std::int64_t begin, std::int64_t count);
std::string index_text(const Index&, int rank);  ///< "[0, 3, 1, 17]"

/// Where two views of equal shape and type first differ in bits; nothing if they do not. Zeros of either sign are the
/// same value and compare equal: adding a masked product to an empty sum may give either.
std::optional<std::string> first_difference(const TensorView&, const TensorView&);

}  // namespace rewy::tool
