// A CUDA device as the tool uses it: guarded memory, copies of host tensors, and the time of a captured call.
// device.cpp is built where REWY_CUDA is on, device_none.cpp elsewhere; there everything throws DeviceError. Streams
// are cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "rewy/tensor_view.h"
#include "rewy/types.h"

namespace rewy::tool {

/// No usable device, or one that failed. what() is one line.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Whether this build has the CUDA backend.
bool built_for_devices();

/// Makes the device the calling thread's. Throws DeviceError unless this build, the driver and the index serve.
void use_device(const Device&);

/// What a device says of itself.
struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;
  std::size_t l2_cache = 0;
  std::size_t shared_per_block = 0;  ///< the most a block can be given
  int driver = 0, runtime = 0;       ///< 13000 for 13.0
  std::string driver_version;        ///< of the kernel driver, "580.65.06"; empty where the system does not tell
};
DeviceInfo device_info(const Device&);
std::string cuda_version_text(int version);  ///< "13.0"

/// Bytes a second that a large device-to-device copy reads and writes, together.
double copy_bandwidth(const Device&);

/// Device memory, 256-byte aligned, with a guard before and behind it that tells whether anyone wrote there.
class DeviceMemory {
 public:
  static constexpr std::size_t kAlign = 256;
  static constexpr std::size_t kGuard = 1024;

  DeviceMemory() = default;
  /// Fills the bytes with `fill`; not set: they stay as the driver gave them, so that a memory checker can tell.
  DeviceMemory(const Device&, std::size_t bytes, std::optional<unsigned char> fill);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&&) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) noexcept;

  std::byte* data() const { return base_ == nullptr ? nullptr : base_ + kGuard; }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data(), bytes_}; }
  bool guards_intact() const;

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

void copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes);
void copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes);
void copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes);

/// A host view's elements on the device with everything that lies between them, at the same alignment.
class DeviceCopy {
 public:
  DeviceCopy(const TensorView& host, const Device&);
  const TensorView& view() const { return view_; }
  /// The bytes of another host view of the same extent, at the same addresses.
  void refresh(const TensorView& host);
  /// True unless a byte, also between elements and around them, is no longer the host's.
  bool unchanged() const;

 private:
  const std::byte* host_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t offset_ = 0;  ///< of the first byte in memory_
  DeviceMemory memory_;
  TensorView view_;
};

class DeviceStream {
 public:
  explicit DeviceStream(const Device&);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  void* get() const { return stream_; }
  void synchronize() const;

 private:
  void* stream_ = nullptr;
};

/// Calls captured once, replayed at will.
class DeviceGraph {
 public:
  DeviceGraph(const DeviceStream&, const std::function<void()>& calls);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  void replay() const;

 private:
  void* graph_ = nullptr;
  void* executable_ = nullptr;
  void* stream_ = nullptr;
};

struct TimingOptions {
  int calls = 2;  ///< in one graph
  int warmups = 5;
  int observations = 60;
  std::size_t flush_bytes = 0;  ///< written before every replay, to push its data out of the L2 cache; 0: nothing is
};

/// Seconds of one call, from events around every replay of a graph, sorted.
std::vector<double> time_replays(const Device&, const DeviceStream&, const std::function<void()>& call,
                                 const TimingOptions&);

}  // namespace rewy::tool
