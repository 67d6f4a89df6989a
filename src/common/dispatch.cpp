#include "common/dispatch.h"

#include <cmath>

#include "common/choice.h"
#include "common/validate.h"

namespace rewy {
namespace {

// Fastest first; the reference, which serves everything on the CPU, last.
constexpr const BackendEntry* kTable[] = {
#ifdef REWY_CUDA
    &kCudaBackend,
#endif
    &kCpuBackend, &kReferenceBackend};

}  // namespace

std::string describe(const Problem& p, const Execution& execution) {
  return std::string(name(p.op)) + " of dtype " + std::string(name(p.dtype)) + ", K = " + std::to_string(p.K) +
         ", V = " + std::to_string(p.V) + " on " + std::string(name(execution.device.kind));
}

const BackendEntry& choose(Table table, const Problem& p, Direction direction, const Execution& execution) {
  return choose_entry(table, p, direction, execution);
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

void check_inputs(const Problem& p, Direction direction, const Inputs& in, const Execution& execution) {
  const BackendEntry& entry = choose(kTable, p, direction, execution);
  if (entry.check_inputs != nullptr) entry.check_inputs(p, direction, in, execution);
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
