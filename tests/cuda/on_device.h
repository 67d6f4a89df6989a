// Device memory of the tests.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "cuda/check.h"

namespace rewy::cuda {

/// Elements on the device, copied there and back.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, std::max<std::size_t>(1, size_) * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> values() const {
    std::vector<T> back(size_);
    check(cudaMemcpy(back.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return back;
  }

 private:
  void* data_ = nullptr;
  std::size_t size_;
};

}  // namespace rewy::cuda
