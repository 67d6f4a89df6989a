#include "tensor.h"

#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

namespace rewy::tool {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kGuard = 256;

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25));
}

std::uint16_t to_f16(double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return sign | 0x7E00;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520.0) return sign | 0x7C00;
  if (magnitude == 0) return sign;
  // Units of the last place at this magnitude; subnormals share that of the smallest normal. A carry into the next
  // power of two moves into the exponent field by itself.
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<std::uint16_t>(sign | (units + ((exponent + 14) << 10)));
}

template <class T>
T read(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
void write(void* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace

double load_element(const void* at, DType dtype) {
  switch (dtype) {
    case DType::kF64: return read<double>(at);
    case DType::kF32: return read<float>(at);
    case DType::kBF16: return from_bf16(read<std::uint16_t>(at));
    case DType::kF16: return from_f16(read<std::uint16_t>(at));
    case DType::kI32: return read<std::int32_t>(at);
    case DType::kI64: return static_cast<double>(read<std::int64_t>(at));
  }
  return 0;
}

void store_element(void* at, DType dtype, double value) {
  switch (dtype) {
    case DType::kF64: return write(at, value);
    case DType::kF32: return write(at, static_cast<float>(value));
    case DType::kBF16: return write(at, to_bf16(static_cast<float>(value)));
    case DType::kF16: return write(at, to_f16(value));
    case DType::kI32: return write(at, static_cast<std::int32_t>(value));
    case DType::kI64: return write(at, static_cast<std::int64_t>(value));
  }
}

double round_to(DType dtype, double value) {
  std::byte bytes[8];
  store_element(bytes, dtype, value);
  return load_element(bytes, dtype);
}

void Buffer::Free::operator()(std::byte* p) const {
  ::operator delete[](p, std::align_val_t{kAlign});
}

namespace {

/// Memory for `bytes`. More than the machine has is refused here: the system would find out page by page, too late.
std::byte* allocate(std::size_t bytes, std::size_t alignment) {
  static const auto physical =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (bytes > physical) throw std::bad_alloc();
  return static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{alignment}));
}

}  // namespace

Buffer::Buffer(std::size_t bytes, unsigned char fill) : data_(allocate(bytes + kGuard, kAlign)), bytes_(bytes) {
  std::memset(data_.get(), fill, bytes);
  std::memset(data_.get() + bytes, kPoison, kGuard);
}

bool Buffer::guard_intact() const {
  for (std::size_t i = 0; i < kGuard && data_; ++i) {
    if (data_[bytes_ + i] != std::byte{kPoison}) return false;
  }
  return true;
}

Tensor::Tensor(DType dtype, const Shape& shape, Placement placement) {
  const auto rank = static_cast<int>(shape.size());
  Shape strides(shape.size());
  std::int64_t count = 1;   // elements of memory
  std::int64_t origin = 0;  // of the first logical element
  const auto lay = [&](int axis, std::int64_t step) {
    strides[static_cast<std::size_t>(axis)] = count * step;
    count *= shape[static_cast<std::size_t>(axis)] * step;
  };
  if (placement == Placement::kDense || rank < 3) {
    for (int axis = rank - 1; axis >= 0; --axis) lay(axis, 1);
  } else if (placement == Placement::kPacked || placement == Placement::kAligned) {
    // [B, T, HV]: every second value belongs to another tensor. [B, T, H, D]: heads side by side, 3 + 5 neighbours, or
    // 8 before them.
    const int first_inner = 2;
    for (int axis = rank - 1; axis >= first_inner; --axis) lay(axis, rank == 3 ? 2 : 1);
    count += 8;
    origin = placement == Placement::kPacked ? 3 : 8;
    lay(1, 1);
    lay(0, 1);
    count += origin;
  } else {
    if (rank == 4) lay(3, 2);
    lay(1, 1);
    lay(2, 1);
    lay(0, 1);
    if (shape[1] > 0) origin = (shape[1] - 1) * strides[1];
    strides[1] = -strides[1];
    for (int axis = 0; axis < rank; ++axis) {
      if (shape[static_cast<std::size_t>(axis)] == 1) strides[static_cast<std::size_t>(axis)] = 7919;
    }
  }
  buffer = Buffer(static_cast<std::size_t>(count) * size_of(dtype));
  view = TensorView(buffer.data() + static_cast<std::size_t>(origin) * size_of(dtype), dtype, shape, strides);
}

std::vector<double> values(const TensorView& view) {
  std::vector<double> out(static_cast<std::size_t>(view.given() ? view.elements() : 0));
  for_each(view, [&](const std::byte* at, const Index&, std::int64_t i) {
    out[static_cast<std::size_t>(i)] = load_element(at, view.dtype);
  });
  return out;
}

Tensor converted(const TensorView& view, DType dtype) {
  if (!view.given()) return {};
  Tensor out(dtype, Shape(view.dims().begin(), view.dims().end()));
  const std::size_t width = size_of(dtype);
  for_each(view, [&](const std::byte* at, const Index&, std::int64_t i) {
    store_element(out.buffer.data() + static_cast<std::size_t>(i) * width, dtype, load_element(at, view.dtype));
  });
  return out;
}

void fill(const TensorView& view, double value) {
  for_each(view, [&](std::byte* at, const Index&, std::int64_t) { store_element(at, view.dtype, value); });
}

TensorView slice(TensorView view, int axis, std::int64_t begin, std::int64_t count) {
  if (!view.given()) return view;
  const auto a = static_cast<std::size_t>(axis);
  view.data =
      static_cast<std::byte*>(view.data) + begin * view.strides[a] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[a] = count;
  return view;
}

std::string index_text(const Index& index, int rank) {
  return shape_text({index.data(), static_cast<std::size_t>(rank)});
}

std::optional<std::string> first_difference(const TensorView& a, const TensorView& b) {
  if (!a.given() && !b.given()) return std::nullopt;
  if (a.dtype != b.dtype || !std::equal(a.dims().begin(), a.dims().end(), b.dims().begin(), b.dims().end())) {
    return "shapes " + shape_text(a.dims()) + " and " + shape_text(b.dims());
  }
  const std::vector<double> other = values(b);
  std::optional<std::string> found;
  for_each(a, [&](const std::byte* at, const Index& index, std::int64_t i) {
    const double x = load_element(at, a.dtype);
    const double y = other[static_cast<std::size_t>(i)];
    if (found || x == y || (std::isnan(x) && std::isnan(y))) return;
    char text[128];
    std::snprintf(text, sizeof text, "%.9g against %.9g at ", x, y);
    found = text + index_text(index, a.rank);
  });
  return found;
}

}  // namespace rewy::tool
