// The current device, and what the backend asks of one.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/check.h"
#include "cuda/kernels.h"

namespace rewy::cuda {

/// The device is current while it lives, the caller's again afterwards.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != index;
    if (changed_) check(cudaSetDevice(index), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

struct DeviceAnswer {
  DeviceLimits limits{};
  std::string problem;  ///< empty: limits are valid
};

/// Asked once a device. Failures are asked again: devices may become visible later.
DeviceAnswer device_limits(int index);

/// Why no kernel of this build runs on the device; empty if they do.
std::string device_declines(int index);

}  // namespace rewy::cuda
