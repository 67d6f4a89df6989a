// Packed calls: where the chunks lie, and the rows that belong to no sequence. Offsets stay on the device and are read
// by launches only, so a captured call follows their contents from replay to replay. Whatever they hold, the table
// stays inside [0, T): each offset is clamped and never below the one before it.
//
// chunk_table: 1. one block scans the sequences in tiles: a running maximum of the offsets, then a running sum of
// ceil(length / 64). Each sequence's thread writes first_chunk and the table entries of its first and last chunk.
// 2. The whole grid fills the slots between: a binary search in first_chunk finds the sequence, its first entry the
// token. All of them are whole chunks. Slots behind the last chunk get tokens = 0.
#include <cub/block/block_scan.cuh>

#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels.h"

namespace rewy::cuda {
namespace {

constexpr int kTokens = static_cast<int>(kChunk);

// ---- chunk table ---------------------------------------------------------------------------------------------------

constexpr int kScanThreads = 1024;
constexpr int kItems = 4;  // sequences a thread and tile: 4096 a tile, two barriers' worth of latency each

/// Chunks of `length` tokens; the sum length + 63 could overflow.
__device__ __forceinline__ int chunks_of(int length) {
  return length / kTokens + (length % kTokens != 0 ? 1 : 0);
}

/// Entry i of cu_seqlens, clamped to [0, T].
__device__ __forceinline__ int offset_at(const Params& p, std::int64_t i) {
  const std::int64_t at = i * p.offset_stride;
  const std::int64_t offset = p.offsets_are_i64 ? static_cast<const std::int64_t*>(p.cu_seqlens)[at]
                                                : static_cast<const std::int32_t*>(p.cu_seqlens)[at];
  return static_cast<int>(offset < 0 ? 0 : offset > p.T ? p.T : offset);
}

struct Larger {
  __device__ int operator()(int a, int b) const { return a < b ? b : a; }
};

__global__ void __launch_bounds__(kScanThreads) scan_sequences(const __grid_constant__ Params p) {
  using Scan = cub::BlockScan<int, kScanThreads>;
  __shared__ typename Scan::TempStorage ends, sums;
  int tile_begin = offset_at(p, 0);  // where the tile's first sequence begins
  int tile_slot = 0;                 // and its first slot
  for (std::int64_t tile = 0; tile < p.sequences; tile += kScanThreads * kItems) {
    const std::int64_t first = tile + static_cast<std::int64_t>(threadIdx.x) * kItems;
    int offset[kItems], begin[kItems], count[kItems], slot[kItems];
    for (int i = 0; i < kItems; ++i) offset[i] = first + i < p.sequences ? offset_at(p, first + i + 1) : 0;
    int tile_end = 0, tile_count = 0;
    Scan(ends).ExclusiveScan(offset, begin, tile_begin, Larger{}, tile_end);
    for (int i = 0; i < kItems; ++i) count[i] = chunks_of(max(begin[i], offset[i]) - begin[i]);
    Scan(sums).ExclusiveSum(count, slot, tile_count);
    for (int i = 0; i < kItems; ++i) {
      if (first + i >= p.sequences) break;
      const std::int64_t at = tile_slot + slot[i];
      p.first_chunk[first + i] = static_cast<std::int32_t>(at);
      if (count[i] == 0) continue;
      const int length = offset[i] - begin[i];
      const auto sequence = static_cast<std::int32_t>(first + i);
      const int before_last = (count[i] - 1) * kTokens;  // tokens
      if (count[i] > 1) p.chunk_table[at] = {begin[i], 0, sequence, kTokens, 0};
      p.chunk_table[at + count[i] - 1] = {std::int64_t{begin[i]} + before_last, 0, sequence, length - before_last, 1};
    }
    tile_begin = max(tile_begin, tile_end);
    tile_slot += tile_count;
    __syncthreads();  // the scans' storage is written again
  }
  if (threadIdx.x == 0) p.first_chunk[p.sequences] = tile_slot;
}

constexpr int kFillThreads = 256;

__global__ void __launch_bounds__(kFillThreads) fill_chunks(const __grid_constant__ Params p) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (slot >= p.chunks) return;
  if (slot >= p.first_chunk[p.sequences]) {
    p.chunk_table[slot] = {0, 0, 0, 0, 0};
    return;
  }
  // The last sequence whose first chunk is not behind the slot; empty ones before it share its number.
  std::int64_t low = 0, high = p.sequences;  // first_chunk[low] <= slot < first_chunk[high]
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (p.first_chunk[middle] <= slot ? low : high) = middle;
  }
  const std::int64_t first = p.first_chunk[low];
  if (slot == first || slot + 1 == p.first_chunk[low + 1]) return;  // written by scan_sequences
  const std::int64_t token = p.chunk_table[first].token + (slot - first) * kTokens;
  p.chunk_table[slot] = {token, 0, static_cast<std::int32_t>(low), kTokens, 0};
}

// ---- zero tail -----------------------------------------------------------------------------------------------------

constexpr int kZeroThreads = 256;
constexpr int kZeroBlocks = 128;  // an output, where the tail is long; none has work where there is no tail
constexpr int kOutputs = 7;

/// An output's rows in units of `bytes`, which are 2, 4 or 16: strides and width count units.
struct Zeroed {
  void* data;
  std::int64_t token, head;
  int heads, width, bytes;
};

struct Outputs {
  Zeroed list[kOutputs];
  int count;
};

/// Block (x, i): output i. Zeros the tokens before the first chunk and behind the last one.
__global__ void __launch_bounds__(kZeroThreads)
    zero_unused_rows(const __grid_constant__ Params p, const __grid_constant__ Outputs outputs) {
  std::int64_t begin = p.T, end = p.T;  // the used rows, none without chunks
  if (const std::int64_t used = p.first_chunk[p.sequences]; used > 0) {
    const ChunkAt last = p.chunk_table[used - 1];
    begin = p.chunk_table[0].token;
    end = last.token + last.tokens;
  }
  const Zeroed out = outputs.list[blockIdx.y];
  const std::int64_t row = std::int64_t{out.heads} * out.width;
  const std::int64_t units = (begin + p.T - end) * row;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kZeroThreads + threadIdx.x; i < units;
       i += std::int64_t{kZeroThreads} * kZeroBlocks) {
    const std::int64_t t = i / row;
    const std::int64_t rest = i - t * row;
    const std::int64_t token = t < begin ? t : t - begin + end;
    const std::int64_t at = token * out.token + rest / out.width * out.head + rest % out.width;
    switch (out.bytes) {
      case 2: static_cast<std::uint16_t*>(out.data)[at] = 0; break;
      case 4: static_cast<std::uint32_t*>(out.data)[at] = 0; break;
      default: static_cast<uint4*>(out.data)[at] = {};
    }
  }
}

}  // namespace

void launch_chunk_table(const Params& p, cudaStream_t stream) {
  scan_sequences<<<1, kScanThreads, 0, stream>>>(p);
  check_launch("scan_sequences");
  if (p.chunks == 0) return;
  fill_chunks<<<static_cast<unsigned>((p.chunks + kFillThreads - 1) / kFillThreads), kFillThreads, 0, stream>>>(p);
  check_launch("fill_chunks");
}

void launch_zero_tail(const Params& p, const Kind& kind, cudaStream_t stream) {
  Outputs outputs{};
  const auto scalars = [&](const Rows& rows, DType dtype) {
    if (rows.data == nullptr) return;
    outputs.list[outputs.count++] = {rows.data, rows.token, rows.head, p.HV, 1, static_cast<int>(size_of(dtype))};
  };
  // Rows are 16-byte aligned (backend.cpp sees to it), so 16 bytes are stored at a time.
  const auto rows = [&](const Rows& rows, int heads, int width, DType dtype) {
    if (rows.data == nullptr) return;
    const int elements = 16 / static_cast<int>(size_of(dtype));
    outputs.list[outputs.count++] = {rows.data, rows.token / elements, rows.head / elements,
                                     heads,     width / elements,      16};
  };
  rows(p.o, p.HV, p.V, kind.dtype);
  rows(p.dq, p.H, p.K, kind.dtype);
  rows(p.dk, p.H, p.K, kind.dtype);
  rows(p.dv, p.HV, p.V, kind.dtype);
  if (gate_of(kind.op) == Gate::kVector) {
    rows(p.dg, p.HV, p.K, DType::kF32);
  } else {
    scalars(p.dg, DType::kF32);
  }
  scalars(p.dbeta, p.strength_dtype);
  rows(p.db, p.HV, p.K, p.strength_dtype);
  rows(p.dw, p.HV, p.V, p.strength_dtype);
  if (outputs.count == 0) return;
  zero_unused_rows<<<dim3(kZeroBlocks, static_cast<unsigned>(outputs.count)), kZeroThreads, 0, stream>>>(p, outputs);
  check_launch("zero_unused_rows");
}

}  // namespace rewy::cuda
