// What a backend is to the dispatch table (dispatch.cpp). Arguments reach a backend validated.
#pragma once

#include <algorithm>
#include <string>

#include "rewy/rewy.h"

namespace rewy {

struct BackendEntry {
  Backend id;
  DeviceKind device;  ///< of the tensors it serves; the functions below are called for no others
  /// Empty if the backend serves the problem, else the reason why not, as one clause ("dtype f64 is not ...").
  std::string (*declines)(const Problem&, Direction, const Execution&);
  Bytes (*bytes)(const Problem&, Direction, const Execution&);
  void (*forward)(const Problem&, const ForwardArgs&, const Execution&);
  void (*backward)(const Problem&, const BackwardArgs&, const Execution&);
  /// Which kernels compute a problem that it serves, where a device has a choice; null: there is none.
  std::string (*kernels)(const Problem&, Direction, const Execution&) = nullptr;
  /// Throws for input tensors that the backend serves but for how they lie in memory; null: it takes any.
  void (*check_inputs)(const Problem&, Direction, const Inputs&, const Execution&) = nullptr;
};

extern const BackendEntry kCudaBackend;       // src/cuda/, in builds with REWY_CUDA only
extern const BackendEntry kCpuBackend;        // src/cpu/
extern const BackendEntry kReferenceBackend;  // src/reference/

/// Throws what a call with these inputs, valid ones, would throw for how they lie in memory. Nothing is computed: for
/// callers that compute something else before the call.
void check_inputs(const Problem&, Direction, const Inputs&, const Execution&);

/// Why a call token by token is none that any backend has; empty for all others.
inline std::string tokens_decline(const Problem& p, Direction direction, const Execution& execution) {
  if (execution.schedule != Schedule::kTokens) return {};
  if (direction == Direction::kBackward) return "token by token there is no backward (schedule tokens is for decoding)";
  if (p.policy == Policy::kSave) return "token by token nothing is saved for a backward, as policy save asks for";
  if (p.variant != Variant{}) return "the choice of a derivative graph is the schedule chunks'";
  return {};
}

/// Chunks of the longest chunk table a problem can have: every segment may end in a short chunk.
inline std::int64_t most_chunks(const Problem& p) {
  if (p.segments) return p.T / kChunk + std::min(*p.segments, p.T);
  return p.B * ((p.T + kChunk - 1) / kChunk);
}

}  // namespace rewy
