// Scratch of each stage. Constructed on an empty Arena it measures.
#pragma once

#include "cpu/stages.h"

namespace rewy::cpu {

class TileTaker {
 public:
  TileTaker(Arena& arena, const Sizes& size) : arena_(arena), size_(size) {}
  Tile keys() { return {arena_.take<float>(size_.keys()), size_.ldk}; }
  Tile values() { return {arena_.take<float>(size_.values()), size_.ldv}; }
  Tile values_t() { return {arena_.take<float>(size_.Vp * size_.ldc), size_.ldc}; }
  Tile keys_t() { return {arena_.take<float>(size_.Kp * size_.ldc), size_.ldc}; }
  Tile block_keys() { return {arena_.take<float>(kBlock * size_.ldk), size_.ldk}; }
  Tile matrix() { return {arena_.take<float>(size_.matrix()), size_.ldc}; }
  Tile state() { return {arena_.take<float>(size_.Kp * size_.ldv), size_.ldv}; }
  float* key_row() { return arena_.take<float>(size_.Kp); }
  float* value_row() { return arena_.take<float>(size_.Vp); }
  float* tokens() { return arena_.take<float>(kChunk + kPad); }
  /// Raw gates: [n, K], of which a scalar gate uses the first 64 floats.
  Tile gates() { return keys(); }

 private:
  Arena& arena_;
  const Sizes& size_;
};

}  // namespace rewy::cpu
