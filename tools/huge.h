// One call whose tensors have more than 2^31 elements, checked where its batch rows must agree with a row alone.
#pragma once

#include "run_case.h"

namespace rewy::tool {

/// Repeats one batch row on the device until its queries pass 2^31 elements, computes forward and backward (token by
/// token the forward alone), and holds the first row, the last, and those on both sides of 2^31 elements against the
/// row alone, in bits. A row's size divides no power of two, so that an offset cut to 32 bits lands inside another
/// token. Throws std::runtime_error where they differ, DeviceError where the device has not the memory: up to 110 GB.
void check_huge(Operator, const RunOptions&);

/// The same of the activations a layer of the operator has: up to 65 GB. Sums over the tokens must be as many times the
/// row's as there are rows, within FP32's rounding.
void check_huge_activation(Operator, const Device&);

}  // namespace rewy::tool
