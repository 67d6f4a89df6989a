#include "common/checker.h"

#include <algorithm>
#include <utility>

#include "common/arena.h"

namespace rewy {
namespace {

std::string text_of(Device d) {
  std::string text(name(d.kind));
  return d.kind == DeviceKind::kCpu ? text : text + ":" + std::to_string(d.index);
}

std::string strides_text(const TensorView& t) {
  return shape_text({t.strides.data(), static_cast<std::size_t>(t.rank)});
}

/// The axes that move, by growing distance of their steps.
std::vector<std::pair<std::uint64_t, std::int64_t>> moving_axes(const TensorView& t) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> axes;  // {|stride|, extent}
  for (int a = 0; a < t.rank; ++a) {
    const auto stride = static_cast<std::uint64_t>(t.strides[a]);
    if (t.shape[a] > 1) axes.emplace_back(t.strides[a] < 0 ? -stride : stride, t.shape[a]);
  }
  std::ranges::sort(axes);
  return axes;
}

}  // namespace

std::string one_of(std::span<const DType> types) {
  std::string text;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (i != 0) text += i + 1 == types.size() ? " or " : ", ";
    text += name(types[i]);
  }
  return text;
}

void Checker::refuse(const std::string& argument, const std::string& expected, const std::string& actual) const {
  throw Error(operation_, argument, expected, actual);
}

void Checker::expect(const TensorView& t, const char* argument, Need need, std::span<const DType> types,
                     std::initializer_list<std::int64_t> shape, bool output) {
  if (!t.given()) {
    if (need == Need::kRequired) {
      refuse(argument, "a tensor of shape " + shape_text({shape.begin(), shape.size()}), "none");
    }
    return;
  }
  if (t.rank < 0 || t.rank > TensorView::kMaxRank) {
    refuse(argument, std::to_string(shape.size()) + (shape.size() == 1 ? " axis" : " axes"), std::to_string(t.rank));
  }
  if (!std::ranges::equal(t.dims(), shape)) {
    refuse(argument, "shape " + shape_text({shape.begin(), shape.size()}), shape_text(t.dims()));
  }
  if (std::ranges::find(types, t.dtype) == types.end()) {
    refuse(argument, "dtype " + one_of(types), std::string(name(t.dtype)));
  }
  if (t.device != device_) refuse(argument, "a tensor on " + text_of(device_), "one on " + text_of(t.device));
  if (t.elements() == 0) return;
  if (t.data == nullptr) refuse(argument, "data", "a null pointer");
  const auto first = reinterpret_cast<std::uintptr_t>(t.data);
  if (first % size_of(t.dtype) != 0) {
    refuse(argument, "data aligned to the " + std::to_string(size_of(t.dtype)) + " bytes of an element",
           "an address " + std::to_string(first % size_of(t.dtype)) + " bytes past it");
  }
  add_range(t, argument, output);
}

void Checker::absent(const TensorView& t, const char* argument, const std::string& why) const {
  if (t.given()) refuse(argument, "no tensor, as " + why, "one of rank " + std::to_string(t.rank));
}

void Checker::memory(std::span<const std::byte> m, const char* argument, std::size_t bytes, bool output) {
  if (m.size() < bytes) refuse(argument, "at least " + std::to_string(bytes) + " bytes", std::to_string(m.size()));
  if (bytes == 0) return;
  const auto first = reinterpret_cast<std::uintptr_t>(m.data());
  if (first == 0) refuse(argument, "memory", "a null pointer");
  if (first % Arena::kAlign != 0) {
    refuse(argument, "memory aligned to " + std::to_string(Arena::kAlign) + " bytes",
           "an address " + std::to_string(first % Arena::kAlign) + " bytes past it");
  }
  add_range({argument, first, first, first + bytes, true, output});  // the rest is never touched
}

void Checker::disjoint() const {
  for (const Range& a : ranges_) {
    if (!a.output) continue;
    for (const Range& b : ranges_) {
      if (&a == &b) continue;
      const bool overlap = a.low < b.high && b.low < a.high;
      // The first element of one inside the other's unbroken memory is shared for certain.
      const auto holds = [](const Range& whole, const Range& other) {
        return whole.dense && whole.low <= other.first && other.first < whole.high;
      };
      if (overlap && ((a.dense && b.dense) || a.first == b.first || holds(a, b) || holds(b, a))) {
        refuse(a.argument, "memory of its own", "memory shared with '" + std::string(b.argument) + "'");
      }
    }
  }
}

void Checker::add_range(const TensorView& t, const char* argument, bool output) {
  std::int64_t low = 0, last = 0;  // offsets in elements
  bool fits = true;
  for (int a = 0; a < t.rank; ++a) {
    std::int64_t span = 0;
    fits = fits && !__builtin_mul_overflow(t.strides[a], t.shape[a] - 1, &span) &&
           !__builtin_add_overflow(span < 0 ? low : last, span, span < 0 ? &low : &last);
  }
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  constexpr std::int64_t kReach = std::int64_t{1} << 60;  // elements; times 8 bytes still a difference of addresses
  if (!fits || low <= -kReach || last >= kReach) {
    refuse(argument, "strides that stay inside an address space", strides_text(t));
  }
  // `reach` is the extent of the axes seen so far, smallest steps first. A step below it lands inside them again; a
  // step above it leaves a hole.
  std::uint64_t reach = 1;
  bool dense = true;
  for (auto [stride, extent] : moving_axes(t)) {
    if (output && stride < reach) {
      refuse(argument, "an output that does not overlap itself",
             "strides " + strides_text(t) + " for shape " + shape_text(t.dims()));
    }
    dense = dense && stride <= reach;
    reach += stride * static_cast<std::uint64_t>(extent - 1);
  }
  const auto first = reinterpret_cast<std::uintptr_t>(t.data);
  add_range({argument, first, first + static_cast<std::uintptr_t>(low * size),
             first + static_cast<std::uintptr_t>((last + 1) * size), dense, output});
}

void Checker::add_range(const Range& range) {
  if (ranges_.empty()) ranges_.reserve(24);  // more than a call has
  ranges_.push_back(range);
}

void Checker::at_least(const char* argument, std::int64_t value, std::int64_t least) const {
  if (value < least) refuse(argument, "at least " + std::to_string(least), std::to_string(value));
}

void Checker::known(const char* argument, std::string_view word) const {
  if (word == "unknown") refuse(argument, "a value of its enum", "another one");
}

void Checker::floating(const char* argument, DType type) const {
  static constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  if (std::ranges::find(kFloats, type) == std::end(kFloats)) {
    refuse(argument, one_of(kFloats), std::string(name(type)));
  }
}

std::int64_t Checker::product(const char* argument, std::initializer_list<std::int64_t> factors) const {
  constexpr std::int64_t kMost = std::int64_t{1} << 52;
  std::int64_t n = 1;
  for (std::int64_t factor : factors) {
    if (__builtin_mul_overflow(n, factor, &n) || n > kMost) {
      refuse(argument, "a product of at most 2^52", shape_text({factors.begin(), factors.size()}));
    }
  }
  return n;
}

void Checker::execution(const Execution& e) const {
  if (e.device.kind == DeviceKind::kCpu && e.stream != nullptr) {
    refuse("stream", "none on the cpu", "one");
  }
  constexpr int kLeastArchitecture = 80;
  if (e.architecture != 0 && e.device.kind == DeviceKind::kCpu) {
    refuse("architecture", "0 on the cpu", std::to_string(e.architecture));
  }
  if (e.architecture != 0 && e.architecture < kLeastArchitecture) {
    refuse("architecture", "0 or at least " + std::to_string(kLeastArchitecture), std::to_string(e.architecture));
  }
  // Each thread has scratch of its own in the workspace: a bound keeps the sum of bytes from overflowing.
  constexpr int kMostThreads = 4096;
  if (e.threads < 0 || e.threads > kMostThreads) {
    refuse("threads", "0 to " + std::to_string(kMostThreads), std::to_string(e.threads));
  }
}

}  // namespace rewy
