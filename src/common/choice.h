// The choice of a backend from a table of entries: what the dispatch of every kind of call shares. An Entry has id,
// device and declines(problem, direction, execution), as BackendEntry; of its Problem, operation(problem, direction)
// and describe(problem, execution) give the words.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "rewy/rewy.h"

namespace rewy {

template <class Entry>
using Entries = std::span<const Entry* const>;

template <class Entry>
bool serves_device(Entries<Entry> table, DeviceKind kind) {
  return std::ranges::any_of(table, [&](const Entry* entry) { return entry->device == kind; });
}

inline std::string no_backend_for(DeviceKind kind) {
  return "no backend of this build serves " + std::string(name(kind)) + " tensors";
}

template <class Entry, class Problem>
std::string reason_against(const Entry& entry, Entries<Entry> table, const Problem& p, Direction direction,
                           const Execution& execution) {
  const DeviceKind kind = execution.device.kind;
  if (entry.device == kind) return entry.declines(p, direction, execution);
  if (!serves_device(table, kind)) return no_backend_for(kind);
  return "serves " + std::string(name(entry.device)) + " tensors only";
}

template <class Entry>
struct Choice {
  const Entry* entry = nullptr;  ///< null: none serves
  Explanation explanation{};
};

/// The first row that serves the problem, or the one that execution.backend forces, and why those before it do not.
template <class Entry, class Problem>
Choice<Entry> look_up(Entries<Entry> table, const Problem& p, Direction direction, const Execution& execution) {
  Choice<Entry> choice;
  for (const Entry* entry : table) {
    if (execution.backend != Backend::kAutomatic && execution.backend != entry->id) continue;
    const std::string reason = reason_against(*entry, table, p, direction, execution);
    choice.explanation.rows.push_back({std::string(name(entry->id)), reason, {}});
    if (reason.empty()) {
      choice.entry = entry;
      choice.explanation.backend = name(entry->id);
      break;
    }
  }
  return choice;
}

/// The row that look_up() finds. Throws Error if there is none.
template <class Entry, class Problem>
const Entry& choose_entry(Entries<Entry> table, const Problem& p, Direction direction, const Execution& execution) {
  const Choice<Entry> choice = look_up(table, p, direction, execution);
  if (choice.entry != nullptr) return *choice.entry;
  if (const DeviceKind kind = execution.device.kind; kind != DeviceKind::kCpu && !serves_device(table, kind)) {
    throw Error(operation(p, direction), "device", "cpu", std::string(name(kind)) + ": " + no_backend_for(kind));
  }
  std::string reasons;
  for (const Explanation::Row& row : choice.explanation.rows) {
    reasons += (reasons.empty() ? "" : "; ") + row.backend + ": " + row.reason;
  }
  if (reasons.empty()) reasons = std::string(name(execution.backend)) + ", which is not in this build";
  throw Error(operation(p, direction), "backend", "a backend that serves " + describe(p, execution), reasons);
}

}  // namespace rewy
