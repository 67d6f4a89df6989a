// Where a block's chunk lies, and its decays.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/params.h"

namespace rewy::cuda {

/// The chunk of a slot. Unpacked slots follow from arithmetic, packed ones stand in the table.
__device__ __forceinline__ ChunkAt locate(const Params& p, std::int64_t slot) {
  if (p.cu_seqlens != nullptr) return p.chunk_table[slot];
  const std::int64_t per_sequence = (p.T + kTile - 1) / kTile;
  const std::int64_t batch = slot / per_sequence;
  const std::int64_t token = (slot - batch * per_sequence) * kTile;
  const std::int64_t left = p.T - token;
  return {token, static_cast<std::int32_t>(batch), static_cast<std::int32_t>(batch),
          static_cast<std::int32_t>(left < kTile ? left : kTile), left <= kTile ? 1 : 0};
}

/// The rows of one head from one token on.
template <class T>
__device__ __forceinline__ T* row_pointer(const Rows& rows, std::int64_t batch, std::int64_t token, int head) {
  return static_cast<T*>(rows.data) + batch * rows.batch + token * rows.token + head * rows.head;
}

/// exp(g) of one token: what remains of the state after it. Every decay in the kernels is a product of these between
/// two positions: never a quotient, so nothing overflows, -inf is a plain 0 and no later row takes part.
__device__ __forceinline__ float decay_of(float g) {
  constexpr float kLog2E = 1.4426950408889634f;
  return ptx::exp2_fast(g * kLog2E);
}

/// Decays of a scalar gate over one chunk, two tokens a lane: 2 * lane and 2 * lane + 1.
struct ScalarDecays {
  float from_start[2];  ///< product over the chunk's tokens up to and including this one: gamma
  float to_end[2];      ///< product over the tokens after this one
  float total;          ///< over the chunk: lambda
};

/// The whole warp calls it with the decays of its tokens, 1 past the tail. The grouping of every product is fixed by
/// position, so no bit of a token's decay depends on a later token.
__device__ __forceinline__ ScalarDecays scalar_decays(const float (&decay)[2]) {
  const int lane = threadIdx.x & 31;
  float before = decay[0] * decay[1], after = before;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float lower = __shfl_up_sync(~0u, before, step);
    const float upper = __shfl_down_sync(~0u, after, step);
    if (lane >= step) before *= lower;
    if (lane + step < 32) after *= upper;
  }
  const float lower = __shfl_up_sync(~0u, before, 1);
  const float upper = __shfl_down_sync(~0u, after, 1);
  const float start = lane == 0 ? 1.0f : lower;
  const float end = lane == 31 ? 1.0f : upper;
  return {{start * decay[0], start * decay[0] * decay[1]}, {decay[1] * end, end}, __shfl_sync(~0u, before, 31)};
}

/// The strength and decay of one token of a scalar gate, by token index of the chunk; neutral past the tail.
__device__ __forceinline__ float scalar_decay(const Params& p, const ChunkAt& at, int head, int token) {
  if (token >= at.tokens || p.g.data == nullptr) return 1.0f;
  return decay_of(*row_pointer<const float>(p.g, at.batch, at.token + token, head));
}
__device__ __forceinline__ float shared_strength(const Params& p, const ChunkAt& at, int head, int token) {
  if (token >= at.tokens) return 0.0f;
  const std::int64_t place = at.batch * p.beta.batch + (at.token + token) * p.beta.token + head * p.beta.head;
  return load_scalar(p.beta.data, place, p.strength_dtype);
}

}  // namespace rewy::cuda
