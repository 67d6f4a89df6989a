// What a backend is to the activation's dispatch (activation.cpp), and the sizes all of them share.
#pragma once

#include <cmath>
#include <string>

#include "rewy/activation.h"

namespace rewy {

struct ActivationEntry {
  Backend id;
  DeviceKind device;  ///< of the tensors it serves; the functions below are called for no others
  /// Empty if the backend serves the activation, else the reason why not, as one clause.
  std::string (*declines)(const Activation&, Direction, const Execution&);
  std::size_t (*bytes)(const Activation&, Direction, const Execution&);
  void (*forward)(const Activation&, const ActivateArgs&, const Execution&);
  void (*backward)(const Activation&, const ActivateBackwardArgs&, const Execution&);
};

extern const ActivationEntry kCudaActivation;       // src/cuda/, in builds with REWY_CUDA only
extern const ActivationEntry kCpuActivation;        // src/cpu/
extern const ActivationEntry kReferenceActivation;  // src/reference/

/// "activation backward", the first words of every message.
std::string operation(const Activation&, Direction);
/// "an activation of dtype bf16, gate_dtype bf16, strength_dtype bf16, K = 128 on cuda", of the parts there are
std::string describe(const Activation&, const Execution&);

/// All throw rewy::Error. The first checks what the size function needs, the others the input tensors, or all tensors
/// and the memory, of a call whose activation is valid; `bytes` is what the chosen backend asks for.
void validate(const Activation&, Direction, const Execution& = {});
void validate(const Activation&, Direction, const ActivationInputs&, const Execution&);
void validate(const Activation&, const ActivateArgs&, const Execution&, std::size_t bytes);
void validate(const Activation&, const ActivateBackwardArgs&, const Execution&, std::size_t bytes);

/// Whether FP32 has the lower bound, if there is one: times a sigmoid that has vanished, infinity would be NaN.
inline bool bound_fits_fp32(const Activation& a) {
  return std::isfinite(static_cast<float>(a.lower_bound.value_or(0)));
}

/// Numbers of a token's raw gate, and of dt_bias.
inline std::int64_t gate_width(const Activation& a) {
  return a.gate == Gate::kVector ? a.HV * a.K : a.HV;
}

/// Gradients of A_log and dt_bias are summed over kTokenTile tokens, then over the tiles.
inline constexpr std::int64_t kTokenTile = 64;
inline std::int64_t token_tiles(const Activation& a) {
  return (a.T + kTokenTile - 1) / kTokenTile;
}

}  // namespace rewy
