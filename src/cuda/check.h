// How CUDA's errors become rewy::Error. Nothing here synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "rewy/error.h"

namespace rewy::cuda {

/// "cudaErrorInvalidValue (invalid argument)"
inline std::string error_text(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

/// Throws Error where a call of the CUDA runtime failed; `what` names it: check(cudaMemcpyAsync(...), "copy of ...").
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // hands over what this thread recorded, so that the next check does not report it again
  throw Error("cuda", what, "success", error_text(status));
}

/// Directly after each launch of the kernel so named. An error of a kernel that already ran on the device cannot be
/// cleared and is reported here as well, by whichever call comes next.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

}  // namespace rewy::cuda
