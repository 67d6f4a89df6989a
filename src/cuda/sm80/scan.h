// The scans with warp products (docs/kernels/scan.md): compute capability 8.0 and up, K up to 256.
#pragma once

#include "cuda/kernels.h"

namespace rewy::cuda::sm80 {

void launch_scan_output(const Params&, const Kind&, const DeviceLimits&, cudaStream_t);
void launch_scan_both(const Params&, const Kind&, const DeviceLimits&, bool states_saved, cudaStream_t);

}  // namespace rewy::cuda::sm80
