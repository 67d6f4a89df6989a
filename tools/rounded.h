// What 16-bit storage alone costs an operator call: a plain chunked implementation in FP64 that rounds where a GPU has
// to (docs/numerics.md, "On a GPU"), and nowhere else.
#pragma once

#include "run_case.h"

namespace rewy::tool {

/// Outputs and gradients of the call, chunk by chunk as docs/math.md has them, sections 2 to 4. Rounded once to the
/// type of q are A, Cq, the operands of the products with a state (E, F, Qg of vector gates; for scalar gates what the
/// decay multiplies), X = Z - E S, R, dR, P, the states that products read, and the outputs as they are stored. All
/// else is FP64. Slow; shares no code with a backend.
Run run_rounded(const Call&);

/// The comparison of a GPU's outputs, once more, where some are beyond the contract: each is allowed 1.5 times what
/// run_rounded() loses, if that is more than the contract. Errors of keys that repeat grow with the condition of I + L
/// in every method; this says how far, for the case at hand.
void allow_rounding(const Call&, const Run& actual, const Run& expected, std::vector<Comparison>&);

}  // namespace rewy::tool
