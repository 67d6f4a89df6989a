// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace rewy {

/// A refused call. Thrown before anything is computed or written.
/// what() reads "kda backward: argument 'k': expected shape [1, 64, 2, 128], got [1, 64, 2, 96]".
class Error : public std::invalid_argument {
 public:
  Error(std::string operation, std::string argument, std::string expected, std::string actual)
      : std::invalid_argument(operation + ": argument '" + argument + "': expected " + expected + ", got " + actual),
        operation_(std::move(operation)),
        argument_(std::move(argument)),
        expected_(std::move(expected)),
        actual_(std::move(actual)) {}

  const std::string& operation() const noexcept { return operation_; }
  const std::string& argument() const noexcept { return argument_; }
  const std::string& expected() const noexcept { return expected_; }
  const std::string& actual() const noexcept { return actual_; }

 private:
  std::string operation_, argument_, expected_, actual_;
};

}  // namespace rewy
