// What a backend is to the dispatch table (dispatch.cpp). Arguments reach a backend validated.
#pragma once

#include <string>

#include "rewy/rewy.h"

namespace rewy {

struct BackendEntry {
  Backend id;
  /// Empty if the backend serves the problem, else the reason why not, as one clause ("dtype f64 is not ...").
  std::string (*declines)(const Problem&, Direction, const Execution&);
  Bytes (*bytes)(const Problem&, Direction, const Execution&);
  void (*forward)(const Problem&, const ForwardArgs&, const Execution&);
  void (*backward)(const Problem&, const BackwardArgs&, const Execution&);
};

extern const BackendEntry kCpuBackend;        // src/cpu/
extern const BackendEntry kReferenceBackend;  // src/reference/

}  // namespace rewy
