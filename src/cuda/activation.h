// What the activation kernels of one call are given, and their launches. activation.cpp fills it, sm80/activation.cu
// reads it. Letters as in docs/math.md; strides are in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/elements.h"
#include "rewy/types.h"

namespace rewy::cuda {

/// Features that a block has at most, and tokens.
inline constexpr int kActivationWidth = 256;
inline constexpr int kActivationTokens = 64;

enum class PartKind : std::uint8_t { kNormalise, kGate, kStrength };

/// One result and what it is made of: a range of the grid's blocks, each with one group of 64 tokens.
struct ActivationPart {
  PartKind kind = PartKind::kNormalise;
  bool whole = false;  ///< all rows of all tensors are made of aligned 16-byte pieces
  DType raw_dtype = DType::kF32, result_dtype = DType::kF32;
  std::uint32_t end = 0;       ///< the block behind its last
  std::uint32_t groups = 1;    ///< heads, or runs of heads
  std::int32_t features = 0;   ///< of all groups of a token
  std::int32_t run = 0;        ///< of each group but the last of a [B, T, heads] tensor
  std::int32_t lane_bits = 0;  ///< 2^lane_bits threads have a group's row, 8 features each
  Elements raw, result;        ///< in a backward the result is its gradient
  Elements d_raw;              ///< backward
  Elements rstd;               ///< kNormalise: [B, T, H] FP32, feature unused
};

struct Vector1 {  ///< FP32; null: not given
  float* data = nullptr;
  std::int64_t step = 0;
};

inline constexpr int kMostParts = 4;  ///< queries, keys, gate, strength

struct ActivationParams {
  ActivationPart parts[kMostParts];
  std::int64_t T = 0;
  std::uint32_t tiles = 0;   ///< of 64 tokens, a batch row
  bool vector_gate = false;  ///< its groups are heads; of a scalar gate features are heads
  bool bounded = false;      ///< g = lower_bound sigmoid(exp(A_log) x)
  float lower_bound = 0;
  float strength_factor = 1;  ///< 1 or 2
  Vector1 A_log, dt_bias;     ///< [HV]; [HV * K] or [HV]

  // Backward, where a sum is asked for: of every tile, then of all.
  float* bias_sums = nullptr;  ///< [B * tiles, dt_bias' length]; null: no sum is asked for
  float* rate_sums = nullptr;  ///< [B * tiles, HV]
  std::int64_t slots = 0;      ///< B * tiles
  std::int32_t bias_width = 0, rate_width = 0;
  Vector1 d_A_log, d_dt_bias;
};

/// One launch of parts[...].end blocks; nothing for a call without tokens.
void launch_activation(const ActivationParams&, Direction, std::uint32_t blocks, cudaStream_t);

/// d_A_log and d_dt_bias from the sums of the tiles: zeros where there are none.
void launch_activation_sums(const ActivationParams&, cudaStream_t);

}  // namespace rewy::cuda
