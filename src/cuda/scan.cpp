// Which form of the scans serves a call: Hopper's where it can, else the one that every GPU has.
#include "cuda/sm80/scan.h"
#include "cuda/sm90a/scan.h"

namespace rewy::cuda {

void launch_scan_output(const Params& p, const Kind& kind, const DeviceLimits& device, cudaStream_t stream) {
  if (sm90a::scans_serve(p, device) && sm90a::launch_scan_output(p, kind, device, stream)) return;
  sm80::launch_scan_output(p, kind, device, stream);
}

void launch_scan_both(const Params& p, const Kind& kind, const DeviceLimits& device, bool states_saved,
                      cudaStream_t stream) {
  if (sm90a::scans_serve(p, device) && sm90a::launch_scan_both(p, kind, device, states_saved, stream)) return;
  sm80::launch_scan_both(p, kind, device, states_saved, stream);
}

}  // namespace rewy::cuda
