#include "cuda/sm90a/tensor_map.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "cuda/device/tile.cuh"

namespace rewy::cuda::sm90a {
namespace {

/// The driver's function, kept once found: the library links to no driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static std::atomic<void*> known{nullptr};
  void* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
    known.store(found, std::memory_order_relaxed);
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

}  // namespace

bool describe_rows(CUtensorMap& map, const Rows& rows, std::int64_t B, std::int64_t T, std::int64_t heads,
                   std::int64_t width) {
  constexpr std::int64_t kElement = 2;
  // Innermost first. An axis of one element is never stepped along; any stride that the driver accepts will do.
  const std::int64_t extents[4] = {width, heads, T, B};
  const std::int64_t strides[3] = {rows.head, rows.token, rows.batch};
  cuuint64_t dims[4], bytes[3];
  for (int i = 0; i < 4; ++i) dims[i] = static_cast<cuuint64_t>(extents[i]);
  for (int i = 0; i < 3; ++i) {
    std::int64_t stride = strides[i] * kElement;
    if (extents[i + 1] == 1) stride = 16;
    if (stride <= 0 || stride % 16 != 0 || stride >= (std::int64_t{1} << 40)) return false;
    bytes[i] = static_cast<cuuint64_t>(stride);
  }
  const cuuint32_t box[4] = {kTile, 1, kTile, 1}, steps[4] = {1, 1, 1, 1};
  const auto encode = encoder();
  // Both 16-bit types are copied as they are.
  return encode != nullptr &&
         encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, rows.data, dims, bytes, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool describe_matrices(CUtensorMap& map, const void* data, std::int64_t blocks, std::int64_t rows,
                       std::int64_t columns) {
  // Blocks are batches, the rows of a matrix its tokens.
  const Rows tokens{const_cast<void*>(data), rows * columns, columns, columns};
  return describe_rows(map, tokens, blocks, rows, 1, columns);
}

}  // namespace rewy::cuda::sm90a
