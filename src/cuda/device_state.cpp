#include "cuda/device_state.h"

#include <map>
#include <mutex>

namespace rewy::cuda {
namespace {

DeviceAnswer ask_device(int index) {
  DeviceAnswer answer{.limits = {.index = index}, .problem = {}};
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count == 0) status = cudaErrorNoDevice;
  if (status == cudaSuccess && (index < 0 || index >= count)) {
    answer.problem = "no CUDA device " + std::to_string(index) + ", there are " + std::to_string(count);
    return answer;
  }
  int major = 0, minor = 0;
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, index);
  };
  ask(major, cudaDevAttrComputeCapabilityMajor);
  ask(minor, cudaDevAttrComputeCapabilityMinor);
  ask(answer.limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(answer.limits.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  answer.limits.compute_capability = 10 * major + minor;
  if (status != cudaSuccess) {
    cudaGetLastError();  // reported here, not by the next launch's check
    int driver = 0;
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    answer.problem = std::string("no usable CUDA device (") + (none ? "no driver" : cudaGetErrorString(status)) + ")";
  }
  return answer;
}

}  // namespace

DeviceAnswer device_limits(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceLimits> known;
  const std::lock_guard lock(mutex);
  if (const auto at = known.find(index); at != known.end()) return {.limits = at->second, .problem = {}};
  DeviceAnswer answer = ask_device(index);
  if (answer.problem.empty()) known.emplace(index, answer.limits);
  return answer;
}

std::string device_declines(int index) {
  constexpr int kLeastCapability = 80;
  const auto [limits, problem] = device_limits(index);
  if (!problem.empty()) return problem;
  if (limits.compute_capability >= kLeastCapability) return {};
  return "device " + std::to_string(limits.index) + " has compute capability " +
         std::to_string(limits.compute_capability / 10) + "." + std::to_string(limits.compute_capability % 10) +
         ", below 8.0";
}

}  // namespace rewy::cuda
