// The scans with Hopper's warpgroup products (docs/kernels/scan.md). The same results as sm80/scan.cu up to the order
// of sums; K up to 128.
#pragma once

#include "cuda/kernels.h"

namespace rewy::cuda::sm90a {

bool scans_serve(const Params&, const DeviceLimits&);
bool launch_scan_output(const Params&, const Kind&, const DeviceLimits&, cudaStream_t);
bool launch_scan_both(const Params&, const Kind&, const DeviceLimits&, bool states_saved, cudaStream_t);

}  // namespace rewy::cuda::sm90a
