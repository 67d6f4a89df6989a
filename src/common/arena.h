// Carves a caller's workspace. One function lays a workspace out; run on an empty span it measures, on the caller's
// span it hands out memory, so size and layout cannot differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace rewy {

class Arena {
 public:
  static constexpr std::size_t kAlign = 64;

  Arena() = default;  ///< measures only
  explicit Arena(std::span<std::byte> memory) : base_(memory.data()) {}

  template <class T>
  T* take(std::int64_t count) {
    std::byte* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return reinterpret_cast<T*>(at);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace rewy
