// What device.h offers in a build without the CUDA backend: the reason why it offers nothing.
#include "device.h"

namespace rewy::tool {
namespace {

[[noreturn]] void refuse() {
  throw DeviceError("--device cuda: this build has no CUDA backend; configure it with -DREWY_CUDA=ON, or use the CPU");
}

}  // namespace

bool built_for_devices() {
  return false;
}

void use_device(const Device&) {
  refuse();
}

DeviceInfo device_info(const Device&) {
  refuse();
}

std::string cuda_version_text(int) {
  refuse();
}

double copy_bandwidth(const Device&) {
  refuse();
}

DeviceMemory::DeviceMemory(const Device&, std::size_t, std::optional<unsigned char>) {
  refuse();
}

DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

bool DeviceMemory::guards_intact() const {
  refuse();
}

void copy_to_device(std::byte*, const std::byte*, std::size_t) {
  refuse();
}

void copy_to_host(std::byte*, const std::byte*, std::size_t) {
  refuse();
}

void copy_on_device(std::byte*, const std::byte*, std::size_t) {
  refuse();
}

DeviceCopy::DeviceCopy(const TensorView&, const Device&) {
  refuse();
}

void DeviceCopy::refresh(const TensorView&) {
  refuse();
}

bool DeviceCopy::unchanged() const {
  refuse();
}

DeviceStream::DeviceStream(const Device&) {
  refuse();
}

DeviceStream::~DeviceStream() = default;

void DeviceStream::synchronize() const {
  refuse();
}

DeviceGraph::DeviceGraph(const DeviceStream&, const std::function<void()>&) {
  refuse();
}

DeviceGraph::~DeviceGraph() = default;

void DeviceGraph::replay() const {
  refuse();
}

std::vector<double> time_replays(const Device&, const DeviceStream&, const std::function<void()>&,
                                 const TimingOptions&) {
  refuse();
}

}  // namespace rewy::tool
