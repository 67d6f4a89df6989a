// Runs a call on a backend in poisoned memory, and judges its outputs by the FP64 reference.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "case.h"
#include "device.h"
#include "rewy/rewy.h"

namespace rewy::tool {

struct RunOptions {
  Device device{};  ///< a GPU: the call runs on copies, its outputs are copied back, and calls of threads take turns
  Backend backend = Backend::kAutomatic;
  int architecture = 0;                   ///< Execution::architecture
  Schedule schedule = Schedule::kChunks;  ///< kTokens: the forward alone, whatever `backward` says
  int threads = 0;
  bool forward = true;  ///< false: only the backward, from nothing saved
  bool backward = true;
  bool saved = true;  ///< hand what the forward saved to the backward
  /// What outputs, saved bytes and workspace hold before. Not set, on a GPU: what the driver leaves there.
  std::optional<unsigned char> poison = Buffer::kPoison;

  bool runs_backward() const { return backward && schedule == Schedule::kChunks; }
};

/// What a backend's matrix products multiply, which bounds every output however wide it is stored.
enum class Products : std::uint8_t {
  kWide,  ///< FP32 or wider
  k16Bit  ///< BF16 or FP16
};
Products products_of(const Device&, Schedule);

/// One output, or the gradient of one input, under its name.
struct Output {
  std::string name;
  Tensor tensor;
};

struct Run {
  std::string backend;  ///< the one that ran
  std::string kernels;  ///< which of its kernels, where it chooses among some
  Products products = Products::kWide;
  std::vector<Output> outputs;
  Work forward_work, backward_work;
  Bytes forward_bytes, backward_bytes;
  double forward_seconds = 0, backward_seconds = 0;

  /// Throws std::out_of_range for an output the run does not have.
  const TensorView& operator[](const std::string& name) const;
  bool has(const std::string& name) const;
};

/// Throws rewy::Error as the library does, and std::runtime_error if a backend wrote past the memory it was given, or
/// into an input on a GPU.
Run run(const Call&, const RunOptions& = {});

/// A call with its memory: where its inputs are on the CPU, copies on a GPU. It can be issued any number of times.
class PlacedCall {
 public:
  /// Options as for run(); the call's tensors must outlive this.
  PlacedCall(const Call&, const RunOptions&);
  ~PlacedCall();
  PlacedCall(PlacedCall&&) noexcept;

  void forward();
  void backward();
  void finish() const;  ///< waits for the device
  /// A GPU's copies take the contents of another call's tensors, which must lie in memory as the placed ones do.
  void refresh(const Call&);
  /// What is known of the run; its outputs are poison until they are collected.
  const Run& described() const { return run_; }
  /// The outputs as they are now. Throws as run() does for writes where none were allowed.
  Run collect() const&;
  Run collect() &&;

  const DeviceStream* stream() const;  ///< null on the CPU
  std::size_t forward_workspace() const;
  std::size_t backward_workspace() const;

 private:
  class Site;

  Problem problem_;
  Execution execution_;
  Run run_;
  ForwardArgs forward_;
  BackwardArgs backward_;
  std::span<std::byte> forward_workspace_, backward_workspace_;
  std::unique_ptr<Site> site_;
};

/// Calls of several threads on one GPU take turns: hold it while one runs. Nothing on the CPU.
std::unique_lock<std::mutex> turn_on(const Device&);

/// On a GPU: forward and backward captured in one graph, replayed once for each call with its contents in the memory of
/// the first.
std::vector<Run> run_captured(const std::vector<Call>&, const RunOptions&);
/// On a GPU: all calls at once, each on a stream of its own.
std::vector<Run> run_together(const std::vector<Call>&, const RunOptions&);

/// What Execution::workspace must hold when the saved bytes are given, or not.
std::size_t workspace_needed(const Bytes&, bool saved);

/// The FP64 reference on FP64 copies of the same inputs.
Run run_reference(const Call&, int threads = 0);

/// Largest relative L2 error an output may have, and the absolute error that is taken as nothing.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};
Tolerance tolerance(const std::string& output, DType stored, Keys keys = Keys::kNormal,
                    Products products = Products::kWide);

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

Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Keys keys,
                   Products products = Products::kWide);
Comparison compare(const std::string& output, const TensorView& actual, const TensorView& expected, Tolerance allowed);
/// Every output of `actual`, in its order.
std::vector<Comparison> compare(const Run& actual, const Run& expected, Keys keys = Keys::kNormal);

/// One row of `rewy check`.
struct CheckResult {
  std::string text;  ///< what repeats it: the arguments of `rewy check`
  bool passed = false;
  bool beyond_contract = false;  ///< judged by what 16-bit storage alone loses on it (rounded.h)
  bool declined = false;         ///< refused, as is documented for this device: neither passed nor failed
  std::string backend, kernels;
  std::string worst_output;
  double worst_error = 0;  ///< relative, of the output nearest to its tolerance
  double worst_allowed = 0;
  std::string detail;  ///< worst element, or why it failed
  double seconds = 0;
  std::vector<Comparison> comparisons;
};

/// Parses, runs by the case's schedule and judges; an exception of the library is a failed row, not an exception. On a
/// GPU the case is the one that for_device() makes of it. `repeats` runs must give the same bits.
CheckResult check_case(const std::string& text, const RunOptions& = {}, int repeats = 1);

}  // namespace rewy::tool
