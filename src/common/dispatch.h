// The choice of a backend, over any table so that it can be tested apart from the backends there are.
#pragma once

#include <span>

#include "common/backend.h"

namespace rewy {

using Table = std::span<const BackendEntry* const>;

/// The first row that serves the problem, or the one that execution.backend forces. Throws Error if there is none.
const BackendEntry& choose(Table, const Problem&, Direction, const Execution&);
Explanation explain(Table, const Problem&, Direction, const Execution&);

}  // namespace rewy
