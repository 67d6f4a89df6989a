// Every check of the arguments of a call, so that no backend has one. All throw rewy::Error, before anything is
// written. Values of floating-point inputs are not read: inf and NaN are the caller's.
#pragma once

#include <string>

#include "rewy/rewy.h"

namespace rewy {

/// "kda backward", the first words of every message.
std::string operation(const Problem&, Direction);
/// "kda of dtype bf16, K = 128, V = 128 on cuda"
std::string describe(const Problem&, const Execution&);

/// What the size functions need: the problem itself, and device, stream, schedule, threads and architecture of the
/// execution.
void validate(const Problem&, Direction, const Execution& = {});

/// The input tensors of a call whose problem is valid.
void validate(const Problem&, Direction, const Inputs&, const Execution&);

/// The tensors and memory of a call whose problem is valid; `bytes` is what the chosen backend asks for.
void validate(const Problem&, const ForwardArgs&, const Execution&, const Bytes& bytes);
void validate(const Problem&, const BackwardArgs&, const Execution&, const Bytes& bytes);

}  // namespace rewy
