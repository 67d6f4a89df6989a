// rewy bench on a GPU: graph replays, and how far they are from what the bytes and products of a call allow.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device.h"
#include "floors.h"
#include "run_case.h"

namespace rewy::tool {

/// One kind of call of one problem.
struct DeviceTiming {
  std::string direction;  ///< fwd, bwd
  bool saved = false;     ///< fwd: keeps what its policy says for the backward; bwd: has been given that
  std::string backend, kernels;
  std::vector<double> seconds;  ///< of one call, sorted
  Floor floor;
  std::size_t workspace = 0, saved_bytes = 0, outputs = 0;

  /// What a call adds to the memory its inputs and the saved bytes take.
  std::size_t peak() const { return workspace + outputs; }
};

/// The forward without and with saved bytes, and the backward after one forward that is not timed; token by token the
/// first alone. `direction` is fwd, bwd or all; of the options device, backend and architecture count.
std::vector<DeviceTiming> time_on_device(const Case&, const RunOptions&, const std::string& direction,
                                         const TimingOptions&);

}  // namespace rewy::tool
