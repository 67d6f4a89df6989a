// What the token-by-token kernel of one call is given, and its launch. recurrent.cpp fills it, sm80/recurrent.cu reads
// it. Letters as in docs/math.md; strides are in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/elements.h"
#include "cuda/kernels.h"

namespace rewy::cuda {

/// Key features that a warp's lanes can hold.
inline constexpr std::int64_t kMostTokenFeatures = 256;

/// Along which axis a state is made of aligned pieces of four neighbouring elements.
enum class StateAccess : std::uint8_t { kElements, kKeys, kValues };

struct RecurrentParams {
  std::int64_t T = 0;
  std::int32_t sequences = 0;  ///< N
  std::int32_t H = 0, HV = 0, K = 0, V = 0;
  float scale = 0;
  DType strength_dtype = DType::kF32;  ///< of beta, b and w
  bool whole = false;                  ///< rows of all tensors are made of aligned pieces of four elements

  // Packed sequences; cu_seqlens null otherwise.
  const void* cu_seqlens = nullptr;  ///< [N + 1], int32 or int64, on the device
  bool offsets_are_i64 = false;
  std::int64_t offset_stride = 0;

  Elements q, k;  ///< [B, T, H, K]
  Elements v, o;  ///< [B, T, HV, V]
  Elements g;     ///< [B, T, HV] or [B, T, HV, K] FP32; not given: no decay
  Elements beta;  ///< [B, T, HV]
  Elements b, w;  ///< [B, T, HV, K], [B, T, HV, V]
  States initial_state, final_state;
  StateAccess initial_access = StateAccess::kElements, final_access = StateAccess::kElements;
};

/// o and final_state, in one launch (docs/kernels/recurrent.md).
void launch_recurrent(const RecurrentParams&, const Kind&, const DeviceLimits&, cudaStream_t);

/// A forward token by token: why it is not served, which never depends on the device, and the call.
std::string recurrent_declines(const Problem&);
void forward_recurrent(const Problem&, const ForwardArgs&, const Execution&);

}  // namespace rewy::cuda
