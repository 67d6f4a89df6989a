// Tiles: dense FP32 matrices in a thread's scratch or in the workspace. Plain data, the same for every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rewy/types.h"

namespace rewy::cpu {

/// Columns are padded with zeros to a multiple of kPad, so that vector loops have no remainder on any instruction set.
inline constexpr std::int64_t kPad = 16;
/// Tokens in a sub-block of the vector-gated interactions (docs/math.md, section 4).
inline constexpr std::int64_t kBlock = 16;

constexpr std::int64_t round_up(std::int64_t x, std::int64_t to) {
  return (x + to - 1) / to * to;
}

/// Row stride of a tile: an odd multiple of 16 floats. With an even multiple, such as 128, the rows of one column strip
/// fall on a quarter of the cache's sets and a strip of 128 rows no longer fits the first level.
constexpr std::int64_t tile_stride(std::int64_t columns) {
  const std::int64_t padded = round_up(std::max<std::int64_t>(columns, 1), kPad);
  return padded / kPad % 2 == 0 ? padded + kPad : padded;
}

/// A matrix of `columns` used columns; its rows start `ld` floats apart.
struct Tile {
  float* data = nullptr;
  std::int64_t ld = 0;

  float* row(std::int64_t i) const { return data + i * ld; }
  float& at(std::int64_t i, std::int64_t j) const { return data[i * ld + j]; }
  Tile from(std::int64_t i, std::int64_t j = 0) const { return {data + i * ld + j, ld}; }
};

}  // namespace rewy::cpu
