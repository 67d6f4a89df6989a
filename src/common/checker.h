// The checks of single arguments that the validations of all calls are made of (validate.cpp, activation.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rewy/rewy.h"

namespace rewy {

enum class Need { kRequired, kOptional };

/// "f32, bf16 or f16"
std::string one_of(std::span<const DType> types);

class Checker {
 public:
  /// `operation` is the first words of every message.
  Checker(std::string operation, Device device) : operation_(std::move(operation)), device_(device) {}

  [[noreturn]] void refuse(const std::string& argument, const std::string& expected, const std::string& actual) const;

  /// The one check of a tensor, in the order of its parameters.
  void expect(const TensorView& t, const char* argument, Need need, std::span<const DType> types,
              std::initializer_list<std::int64_t> shape, bool output = false);

  /// An argument that this operator or call does not have.
  void absent(const TensorView& t, const char* argument, const std::string& why) const;

  void memory(std::span<const std::byte> m, const char* argument, std::size_t bytes, bool output);

  /// No output may share memory with another argument. Slices of one packed buffer interleave without sharing, and
  /// telling them from strided views that do share is an integer program; so overlapping extents are refused only where
  /// both sides are dense, and a common first element always. Other overlaps of strided views are the caller's duty.
  void disjoint() const;

  void at_least(const char* argument, std::int64_t value, std::int64_t least) const;

  /// `word` is the name of an enum's value.
  void known(const char* argument, std::string_view word) const;

  /// An element type of data, not of offsets.
  void floating(const char* argument, DType type) const;

  /// The product of the factors, at most 2^52: far below 2^63, so that sums of their bytes, which backends form, do not
  /// overflow either.
  std::int64_t product(const char* argument, std::initializer_list<std::int64_t> factors) const;

  /// Device, stream, threads and architecture.
  void execution(const Execution&) const;

 private:
  /// Memory of one argument, to find outputs that share memory with something else.
  struct Range {
    const char* argument = "";
    std::uintptr_t first = 0;  // address of the element at index 0
    std::uintptr_t low = 0;    // [low, high) holds every element
    std::uintptr_t high = 0;
    bool dense = true;  // every byte of [low, high) belongs to an element
    bool output = false;
  };

  void add_range(const TensorView& t, const char* argument, bool output);
  void add_range(const Range&);

  std::string operation_;
  Device device_;
  std::vector<Range> ranges_;
};

}  // namespace rewy
