// Runs a call on a backend in poisoned memory, and judges its outputs by the FP64 reference.
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "rewy/rewy.h"

namespace rewy::tool {

struct RunOptions {
  Backend backend = Backend::kAutomatic;
  int threads = 0;
  bool forward = true;  ///< false: only the backward, from nothing saved
  bool backward = true;
  bool saved = true;                       ///< hand what the forward saved to the backward
  unsigned char poison = Buffer::kPoison;  ///< what outputs, saved bytes and workspace hold before
};

/// One output, or the gradient of one input, under its name.
struct Output {
  std::string name;
  Tensor tensor;
};

struct Run {
  std::string backend;  ///< the one that ran
  std::vector<Output> outputs;
  Work forward_work, backward_work;
  Bytes forward_bytes, backward_bytes;
  double forward_seconds = 0, backward_seconds = 0;

  /// Throws std::out_of_range for an output the run does not have.
  const TensorView& operator[](const std::string& name) const;
  bool has(const std::string& name) const;
};

/// Throws rewy::Error as the library does, and std::runtime_error if a backend wrote past the memory it was given.
Run run(const Call&, const RunOptions& = {});

/// The FP64 reference on FP64 copies of the same inputs.
Run run_reference(const Call&);

/// Largest relative L2 error an output may have, and the absolute error that is taken as nothing.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};
Tolerance tolerance(const std::string& output, DType stored, Keys keys = Keys::kNormal);

struct Comparison {
  std::string output;
  double relative = 0;  ///< L2 norm of the error over that of the reference
  double largest = 0;   ///< absolute error of the worst element
  Tolerance allowed;
  bool passed = false;
  std::string worst;   ///< "1.25 against 1.5 at [0, 3, 1, 17]"; empty for a tensor without elements
  std::string reason;  ///< empty if passed

  /// Error over what is allowed.
  double used() const { return allowed.relative > 0 ? relative / allowed.relative : 0; }
};

Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Keys keys);
/// Every output of `actual`, in its order.
std::vector<Comparison> compare(const Run& actual, const Run& expected, Keys keys = Keys::kNormal);

/// One row of `rewy check`.
struct CheckResult {
  std::string text;  ///< what repeats it: the arguments of `rewy check`
  bool passed = false;
  std::string backend;
  std::string worst_output;
  double worst_error = 0;  ///< relative, of the output nearest to its tolerance
  double worst_allowed = 0;
  std::string detail;  ///< worst element, or why it failed
  double seconds = 0;
  std::vector<Comparison> comparisons;
};

/// Parses, runs and judges; an exception of the library is a failed row, not an exception.
CheckResult check_case(const std::string& text, const RunOptions& = {});

}  // namespace rewy::tool
