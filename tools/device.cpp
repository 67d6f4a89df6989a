#include "device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "tensor.h"

namespace rewy::tool {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw DeviceError(std::string(what) + ": " + cudaGetErrorString(status));
}

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

/// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...": the first word that looks like a version.
std::string kernel_driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return {};
}

/// The bytes from the first to the last element in memory, and where the view's first element lies among them.
struct Extent {
  std::int64_t before = 0;  ///< bytes from the lowest element to the first one
  std::size_t bytes = 0;
};

Extent extent_of(const TensorView& view) {
  if (view.elements() == 0) return {};
  std::int64_t low = 0, high = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t reach = (view.shape[a] - 1) * view.strides[a];
    (reach < 0 ? low : high) += reach;
  }
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  return {-low * width, static_cast<std::size_t>((high - low + 1) * width)};
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void synchronize() const { check(cudaEventSynchronize(event_), "a timed call"); }
  double seconds_since(const Event& start) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

bool built_for_devices() {
  return true;
}

void use_device(const Device& device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    const char* reason = status != cudaSuccess ? cudaGetErrorString(status) : "the driver knows none";
    throw DeviceError(std::string("--device cuda: no usable GPU: ") + reason + "; the CPU serves every problem");
  }
  if (device.index >= count) {
    throw DeviceError("--device cuda:" + std::to_string(device.index) + ": this machine has " + std::to_string(count) +
                      (count == 1 ? " GPU" : " GPUs") + ", numbered from 0");
  }
  check(cudaSetDevice(device.index), "--device cuda: no usable GPU");
}

DeviceInfo device_info(const Device& device) {
  use_device(device);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  DeviceInfo info{.name = properties.name,
                  .major = properties.major,
                  .minor = properties.minor,
                  .multiprocessors = properties.multiProcessorCount,
                  .memory = properties.totalGlobalMem,
                  .l2_cache = static_cast<std::size_t>(properties.l2CacheSize),
                  .shared_per_block = properties.sharedMemPerBlockOptin,
                  .driver_version = kernel_driver_version()};
  check(cudaDriverGetVersion(&info.driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&info.runtime), "cudaRuntimeGetVersion");
  return info;
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

double copy_bandwidth(const Device& device) {
  use_device(device);
  constexpr std::size_t kBytes = std::size_t{1} << 30;  // far beyond any L2 cache
  constexpr int kCopies = 10;
  const DeviceMemory from(device, kBytes, 0), to(device, kBytes, 0);
  const DeviceStream stream(device);
  const auto copies = [&] {
    for (int i = 0; i < kCopies; ++i) {
      check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream_of(stream.get())),
            "a copy on the device");
    }
  };
  copies();
  const Event start, end;
  start.record(stream_of(stream.get()));
  copies();
  end.record(stream_of(stream.get()));
  end.synchronize();
  return 2.0 * kCopies * static_cast<double>(kBytes) / end.seconds_since(start);
}

DeviceMemory::DeviceMemory(const Device& device, std::size_t bytes, std::optional<unsigned char> fill) : bytes_(bytes) {
  use_device(device);
  void* base = nullptr;
  check(cudaMalloc(&base, bytes + 2 * kGuard), "memory on the device");
  base_ = static_cast<std::byte*>(base);
  // The legacy default stream's order reaches no stream that does not block on it: done before anyone else starts.
  check(cudaMemset(base_, Buffer::kPoison, kGuard), "cudaMemset");
  check(cudaMemset(base_ + kGuard + bytes, Buffer::kPoison, kGuard), "cudaMemset");
  if (fill && bytes > 0) check(cudaMemset(base_ + kGuard, *fill, bytes), "cudaMemset");
  check(cudaStreamSynchronize(cudaStreamLegacy), "cudaMemset");
}

DeviceMemory::~DeviceMemory() {
  if (base_ != nullptr) cudaFree(base_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool DeviceMemory::guards_intact() const {
  std::vector<std::byte> guards(2 * kGuard);
  copy_to_host(guards.data(), base_, kGuard);
  copy_to_host(guards.data() + kGuard, base_ + kGuard + bytes_, kGuard);
  return std::all_of(guards.begin(), guards.end(), [](std::byte b) { return b == std::byte{Buffer::kPoison}; });
}

void copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "a copy to the device");
  // From pageable memory the call may return before the last bytes have arrived.
  check(cudaStreamSynchronize(cudaStreamLegacy), "a copy to the device");
}

void copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "a copy from the device");
}

void copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice), "a copy on the device");
  check(cudaStreamSynchronize(cudaStreamLegacy), "a copy on the device");
}

DeviceCopy::DeviceCopy(const TensorView& host, const Device& device) : view_(host) {
  const Extent extent = extent_of(host);
  host_ = static_cast<const std::byte*>(host.data) - extent.before;
  bytes_ = extent.bytes;
  offset_ = host.data == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(host_) % DeviceMemory::kAlign;
  memory_ = DeviceMemory(device, offset_ + bytes_, Buffer::kPoison);
  copy_to_device(memory_.data() + offset_, host_, bytes_);
  view_.data = memory_.data() + offset_ + extent.before;
  view_.device = device;
}

void DeviceCopy::refresh(const TensorView& host) {
  const Extent extent = extent_of(host);
  if (extent.bytes != bytes_) throw DeviceError("a tensor of another extent cannot replace a device copy");
  host_ = static_cast<const std::byte*>(host.data) - extent.before;
  copy_to_device(memory_.data() + offset_, host_, bytes_);
}

bool DeviceCopy::unchanged() const {
  std::vector<std::byte> now(memory_.size());
  copy_to_host(now.data(), memory_.data(), now.size());
  const auto poison = [](std::byte b) { return b == std::byte{Buffer::kPoison}; };
  return memory_.guards_intact() &&
         std::all_of(now.begin(), now.begin() + static_cast<std::ptrdiff_t>(offset_), poison) &&
         (bytes_ == 0 || std::memcmp(now.data() + offset_, host_, bytes_) == 0);
}

DeviceStream::DeviceStream(const Device& device) {
  use_device(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_ = stream;
}

DeviceStream::~DeviceStream() {
  cudaStreamDestroy(stream_of(stream_));
}

void DeviceStream::synchronize() const {
  check(cudaStreamSynchronize(stream_of(stream_)), "the call on the device");
}

DeviceGraph::DeviceGraph(const DeviceStream& stream, const std::function<void()>& calls) : stream_(stream.get()) {
  check(cudaStreamBeginCapture(stream_of(stream_), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    calls();
  } catch (...) {
    cudaStreamEndCapture(stream_of(stream_), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream_of(stream_), &graph), "capturing the call in a graph");
  graph_ = graph;
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  executable_ = executable;
}

DeviceGraph::~DeviceGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  if (graph_ != nullptr) cudaGraphDestroy(static_cast<cudaGraph_t>(graph_));
}

void DeviceGraph::replay() const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream_of(stream_)), "cudaGraphLaunch");
}

std::vector<double> time_replays(const Device& device, const DeviceStream& stream, const std::function<void()>& call,
                                 const TimingOptions& options) {
  call();  // loads the kernels, which a capture may not
  stream.synchronize();
  const DeviceGraph graph(stream, [&] {
    for (int i = 0; i < options.calls; ++i) call();
  });
  const DeviceMemory flush = options.flush_bytes > 0 ? DeviceMemory(device, options.flush_bytes, 0) : DeviceMemory();
  const auto replay = [&](const Event& start, const Event& end) {
    if (flush.size() > 0) {
      check(cudaMemsetAsync(flush.data(), 0, flush.size(), stream_of(stream.get())), "cudaMemsetAsync");
    }
    start.record(stream_of(stream.get()));
    graph.replay();
    end.record(stream_of(stream.get()));
    end.synchronize();
  };
  const Event start, end;
  for (int i = 0; i < options.warmups; ++i) replay(start, end);
  std::vector<double> seconds;
  for (int i = 0; i < options.observations; ++i) {
    replay(start, end);
    seconds.push_back(end.seconds_since(start) / options.calls);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

}  // namespace rewy::tool
