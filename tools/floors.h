// What a call must move and multiply at least, from the sizes of its pieces: what `rewy bench` holds a GPU's times
// against.
#pragma once

#include "rewy/rewy.h"

namespace rewy::tool {

/// Both measured on an H200 (141 GB): a large copy, read and written bytes together, and 8192^3 products in BF16.
inline constexpr double kH200BytesPerSecond = 4.30e12;
inline constexpr double kH200OperationsPerSecond = 793e12;

struct Floor {
  double bytes = 0;
  double operations = 0;

  /// The time of the slower of the two, each at its ceiling.
  double seconds() const;
};

/// Of one chunk of 64 tokens and one value head. `saved`: the forward hands over what its policy keeps, the backward
/// uses it.
Floor chunk_floor(const Problem&, Direction, bool saved);
/// Of a forward token by token: inputs, outputs and states once, and three products of a row with a state a token.
/// These are no work for the tensor cores, so that with many tokens a state the time cannot come near.
Floor token_floor(const Problem&, bool initial_state, bool final_state);
/// Of the call; a sequence's last, shorter chunk counts by its tokens.
Floor call_floor(const Problem&, Direction, bool saved);

}  // namespace rewy::tool
