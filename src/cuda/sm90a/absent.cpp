// In place of scan.cu in builds that compile nothing for 90a: the portable scans serve Hopper too.
#include "cuda/sm90a/scan.h"
#include "rewy/error.h"

namespace rewy::cuda::sm90a {
namespace {

[[noreturn]] void refuse() {
  throw Error("cuda", "scan", "a build for sm_90a", "one without");
}

}  // namespace

bool scans_serve(const Params&, const DeviceLimits&) {
  return false;
}

bool launch_scan_output(const Params&, const Kind&, const DeviceLimits&, cudaStream_t) {
  refuse();
}

bool launch_scan_both(const Params&, const Kind&, const DeviceLimits&, bool, cudaStream_t) {
  refuse();
}

}  // namespace rewy::cuda::sm90a
