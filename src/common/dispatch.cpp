#include "common/dispatch.h"

#include <algorithm>
#include <cmath>

#include "common/validate.h"

namespace rewy {
namespace {

// Fastest first; the reference, which serves everything on the CPU, last.
constexpr const BackendEntry* kTable[] = {
#ifdef REWY_CUDA
    &kCudaBackend,
#endif
    &kCpuBackend, &kReferenceBackend};

bool serves_device(Table table, DeviceKind kind) {
  return std::ranges::any_of(table, [&](const BackendEntry* entry) { return entry->device == kind; });
}

std::string no_backend_for(DeviceKind kind) {
  return "no backend of this build serves " + std::string(name(kind)) + " tensors";
}

std::string reason_against(const BackendEntry& entry, Table table, const Problem& p, Direction direction,
                           const Execution& execution) {
  const DeviceKind kind = execution.device.kind;
  if (entry.device == kind) return entry.declines(p, direction, execution);
  if (!serves_device(table, kind)) return no_backend_for(kind);
  return "serves " + std::string(name(entry.device)) + " tensors only";
}

struct Choice {
  const BackendEntry* entry = nullptr;  // null: none serves
  Explanation explanation;
};

Choice look_up(Table table, const Problem& p, Direction direction, const Execution& execution) {
  Choice choice;
  for (const BackendEntry* entry : table) {
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

std::string describe(const Problem& p, const Execution& execution) {
  return std::string(name(p.op)) + " of dtype " + std::string(name(p.dtype)) + ", K = " + std::to_string(p.K) +
         ", V = " + std::to_string(p.V) + " on " + std::string(name(execution.device.kind));
}

}  // namespace

const BackendEntry& choose(Table table, const Problem& p, Direction direction, const Execution& execution) {
  const Choice choice = look_up(table, p, direction, execution);
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

Explanation explain(Table table, const Problem& p, Direction direction, const Execution& execution) {
  validate(p, direction, execution);
  auto [entry, explanation] = look_up(table, p, direction, execution);
  if (entry != nullptr && entry->kernels != nullptr) {
    explanation.rows.back().kernels = entry->kernels(p, direction, execution);
  }
  return explanation;
}

Explanation explain(const Problem& p, Direction direction, const Execution& execution) {
  return explain(kTable, p, direction, execution);
}

std::string Explanation::Row::answer() const {
  if (!reason.empty()) return "declines: " + reason;
  return kernels.empty() ? "serves it" : "serves it, " + kernels;
}

std::string Explanation::text() const {
  std::string text;
  for (const Row& row : rows) {
    text += row.backend + " " + row.answer() + "\n";
  }
  if (backend.empty()) text += "no backend serves it\n";
  return text;
}

Bytes workspace_bytes(const Problem& p, Direction direction, const Execution& execution) {
  validate(p, direction, execution);
  return choose(kTable, p, direction, execution).bytes(p, direction, execution);
}

void forward(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  validate(p, Direction::kForward, execution);
  const BackendEntry& entry = choose(kTable, p, Direction::kForward, execution);
  validate(p, args, execution, entry.bytes(p, Direction::kForward, execution));
  if (execution.work != nullptr) *execution.work = {};
  entry.forward(p, args, execution);
}

void backward(const Problem& p, const BackwardArgs& args, const Execution& execution) {
  validate(p, Direction::kBackward, execution);
  const BackendEntry& entry = choose(kTable, p, Direction::kBackward, execution);
  validate(p, args, execution, entry.bytes(p, Direction::kBackward, execution));
  if (execution.work != nullptr) *execution.work = {};
  entry.backward(p, args, execution);
}

double Problem::query_scale() const {
  return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(K));
}

Work::Stage Work::total() const {
  Stage sum;
  for (const Stage& s : {prepare, scan, local, interact}) {
    sum.products += s.products;
    sum.dense += s.dense;
    sum.executed += s.executed;
  }
  return sum;
}

Work& Work::operator+=(const Work& other) {
  const auto add = [](Stage& a, const Stage& b) {
    a.products += b.products;
    a.dense += b.dense;
    a.executed += b.executed;
  };
  add(prepare, other.prepare);
  add(scan, other.scan);
  add(local, other.local);
  add(interact, other.interact);
  pairwise += other.pairwise;
  chunks += other.chunks;
  return *this;
}

}  // namespace rewy
