// Descriptions of tensors for Hopper's bulk copies, made on the host at each launch.
#pragma once

#include <cuda.h>

#include "cuda/params.h"

namespace rewy::cuda::sm90a {

/// [B, T, heads, width] of 16-bit elements in tiles of 64 tokens and 64 columns of one head, swizzled as tile.cuh lays
/// them; what lies outside is zero. False where the copy engine cannot step through it (strides that are negative, zero
/// or too long), or the driver has none.
bool describe_rows(CUtensorMap&, const Rows&, std::int64_t B, std::int64_t T, std::int64_t heads, std::int64_t width);

/// [blocks][rows, columns] contiguous 16-bit matrices, in the same tiles.
bool describe_matrices(CUtensorMap&, const void* data, std::int64_t blocks, std::int64_t rows, std::int64_t columns);

}  // namespace rewy::cuda::sm90a
