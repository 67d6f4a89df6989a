// The CPU backend: lays out the workspace, cuts sequences into chunks and runs the stages over threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/arena.h"
#include "common/backend.h"
#include "cpu/float_state.h"
#include "cpu/stages.h"
#include "cpu/storage.h"

namespace rewy {
namespace {

using namespace cpu;

int thread_count(const Execution& execution) {
  return execution.threads > 0 ? execution.threads : omp_get_max_threads();
}

/// What the forward keeps for the backward, by policy.
void lay_out_saved(const Problem& p, Arena& arena, Intermediates& keep) {
  const Sizes size(p);
  const std::int64_t count = most_chunks(p) * p.HV;
  keep.a = arena.take<float>(count * size.matrix());
  if (p.policy == Policy::kSave) {
    keep.cq = arena.take<float>(count * size.matrix());
    keep.state_t = arena.take<float>(count * size.state_t());
    keep.r = arena.take<float>(count * size.values());
  }
}

/// Whether the heads alone keep all threads busy, so that each thread takes whole heads (Plan::fused): they must fill
/// the threads evenly or be many. Grouped heads share dq and dk and are pulled back together.
bool takes_whole_heads(const Problem& p, int threads) {
  const std::int64_t scans = p.sequences() * p.HV;
  constexpr int kMany = 8;  // at most an eighth of the time is then spent waiting for the last head
  return p.HV == p.H && (scans % threads == 0 || scans >= kMany * threads);
}

struct Workspace {
  Sequence* sequences;
  Chunk* chunks;
  Intermediates keep;
  std::byte* scratch;          ///< of each thread, one after the other
  std::size_t scratch_stride;  ///< bytes
  Work* works;                 ///< of each thread
};

/// What only calls in chunks have.
void lay_out_chunks(const Problem& p, Direction direction, int threads, Arena& arena, bool saved, Workspace& w) {
  const Sizes size(p);
  const std::int64_t count = most_chunks(p) * p.HV;
  w.chunks = arena.take<Chunk>(most_chunks(p));
  if (!saved) w.keep.a = arena.take<float>(count * size.matrix());
  const bool more_saved = saved && p.policy == Policy::kSave;
  const std::int64_t slots = takes_whole_heads(p, threads) ? threads : count;
  if (!more_saved) w.keep.cq = arena.take<float>(slots * size.matrix());
  if (direction == Direction::kBackward) {
    if (!more_saved) {
      w.keep.state_t = arena.take<float>(count * size.state_t());
      w.keep.r = arena.take<float>(count * size.values());
    }
    w.keep.dstate_t = arena.take<float>(slots * size.state_t());
    w.keep.p = arena.take<float>(slots * size.values());
  }
  if (p.variant.graph == Graph::kExpanded) {
    w.keep.w = arena.take<float>(count * size.keys());
    w.keep.u = arena.take<float>(count * size.values());
  }
}

/// The layout of a call's workspace. With `saved` given, what it holds is not laid out again.
Workspace lay_out(const Problem& p, Direction direction, const Execution& execution, Arena& arena, bool saved) {
  const int threads = thread_count(execution);
  Workspace w{};
  w.sequences = arena.take<Sequence>(p.sequences());
  if (execution.schedule == Schedule::kChunks) lay_out_chunks(p, direction, threads, arena, saved, w);
  w.works = arena.take<Work>(threads);
  const auto scratch = static_cast<std::int64_t>(scratch_bytes(p, direction, execution.schedule));
  w.scratch_stride = static_cast<std::size_t>(round_up(scratch, 4096));
  w.scratch = arena.take<std::byte>(static_cast<std::int64_t>(w.scratch_stride) * threads);
  return w;
}

std::int64_t offset_at(const TensorView& view, std::int64_t i) {
  const std::int64_t at = i * view.strides[0];
  return view.dtype == DType::kI32 ? static_cast<const std::int32_t*>(view.data)[at]
                                   : static_cast<const std::int64_t*>(view.data)[at];
}

/// Fills both tables, that of the chunks where there is one; returns the number of chunks.
std::int64_t cut_into_chunks(const Problem& p, const TensorView& offsets, Sequence* sequences, Chunk* chunks) {
  std::int64_t count = 0;
  for (std::int64_t s = 0; s < p.sequences(); ++s) {
    Sequence seq{p.segments ? 0 : s, 0, p.T, count};
    if (p.segments) {
      seq.begin = offset_at(offsets, s);
      seq.tokens = offset_at(offsets, s + 1) - seq.begin;
    }
    sequences[s] = seq;
    for (std::int64_t t = 0; chunks != nullptr && t < seq.tokens; t += kChunk) {
      chunks[count++] = {seq.batch, seq.begin + t, std::min(kChunk, seq.tokens - t)};
    }
  }
  return count;
}

/// Rows from the last offset of a packed call on are nobody's: zero.
void zero_unused_rows(const Problem& p, const TensorView& offsets, std::initializer_list<const TensorView*> outputs) {
  if (!p.segments) return;
  const std::int64_t first = *p.segments == 0 ? 0 : offset_at(offsets, *p.segments);
  for (const TensorView* view : outputs) {
    if (!view->given()) continue;
    with_storage(view->dtype, [&]<class Storage>(Storage*) {
      auto* base = static_cast<Storage*>(view->data);
      const std::int64_t width = view->rank == 4 ? view->shape[3] : 1;
      for (std::int64_t t = first; t < p.T; ++t) {
        for (std::int64_t h = 0; h < view->shape[2]; ++h) {
          for (std::int64_t k = 0; k < width; ++k) {
            base[t * view->strides[1] + h * view->strides[2] + (view->rank == 4 ? k * view->strides[3] : 0)] =
                from_float<Storage>(0.0f);
          }
        }
      }
    });
  }
}

/// Runs task(i, scratch, work) for i in [0, tasks), each once, on any thread. Threads wait for one another once, where
/// the parallel region ends.
template <class Task>
void run(std::int64_t tasks, int threads, const Workspace& w, Task&& task) {
  if (tasks == 0) return;
#pragma omp parallel num_threads(threads)
  {
    const FloatState state(Subnormals::kFlush);
    const auto me = static_cast<std::size_t>(omp_get_thread_num());
    const std::span<std::byte> scratch(w.scratch + me * w.scratch_stride, w.scratch_stride);
#pragma omp for schedule(dynamic) nowait
    for (std::int64_t i = 0; i < tasks; ++i) task(i, Arena(scratch), w.works[me]);
  }
}

/// How many value-column slices a scan is cut into: one where the heads keep all threads busy.
struct Slices {
  std::int64_t count, width, columns;
  Slices(const Sizes& size, std::int64_t scans, int threads) : columns(size.Vp) {
    constexpr std::int64_t kNarrowest = 32;  // of the register tile; narrower slices only repeat the key side
    const std::int64_t wanted = scans == 0 ? 1 : (threads + scans - 1) / scans;
    const std::int64_t most = std::max<std::int64_t>(1, columns / kNarrowest);
    width = round_up((columns + std::min(wanted, most) - 1) / std::min(wanted, most), kPad);
    count = (columns + width - 1) / width;
  }
  Slice operator[](std::int64_t i) const { return {i * width, std::min((i + 1) * width, columns)}; }
};

void collect(const Execution& execution, const Plan& plan, const Workspace& w, int threads) {
  if (execution.work == nullptr) return;
  Work total{};
  for (int i = 0; i < threads; ++i) total += w.works[i];
  total.chunks = plan.chunk_count * plan.p.HV;
  *execution.work = total;
}

void prepare(const Plan& plan, const Stages& stages, const Workspace& w, int threads) {
  const std::int64_t HV = plan.p.HV;
  run(plan.chunk_count * HV, threads, w,
      [&](std::int64_t i, Arena scratch, Work& work) { stages.prepare_chunk(plan, i / HV, i % HV, scratch, work); });
}

/// The plan of a thread that takes whole heads: its own slots for what lives one step.
Plan whole_heads(const Plan& plan) {
  Plan mine = plan;
  const auto me = static_cast<std::int64_t>(omp_get_thread_num());
  mine.fused = true;
  if (plan.make_cq && plan.keep.cq != nullptr) mine.keep.cq += me * plan.size.matrix();
  if (plan.keep.dstate_t != nullptr) mine.keep.dstate_t += me * plan.size.state_t();
  if (plan.keep.p != nullptr) mine.keep.p += me * plan.size.values();
  return mine;
}

/// What the plans of both directions have in common; clears the counters and cuts the sequences into chunks.
Plan start_plan(const Problem& p, Direction direction, const Inputs& in, const Workspace& w, int threads) {
  std::fill_n(w.works, threads, Work{});
  Plan plan(p);
  plan.direction = direction;
  plan.in = &in;
  plan.keep = w.keep;
  plan.make_w = plan.expanded();
  plan.chunk_count = cut_into_chunks(p, in.cu_seqlens, w.sequences, w.chunks);
  plan.sequences = w.sequences;
  plan.chunks = w.chunks;
  return plan;
}

void forward_tokens(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  const int threads = thread_count(execution);
  const Stages stages = stages_for_this_cpu();
  Arena arena(execution.workspace);
  const Workspace w = lay_out(p, Direction::kForward, execution, arena, true);
  Plan plan = start_plan(p, Direction::kForward, args.in, w, threads);
  plan.fwd = &args;
  const std::int64_t slices = (plan.size.Vp + kTokenColumns - 1) / kTokenColumns;
  run(p.sequences() * p.HV * slices, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
    const std::int64_t scan = i / slices, first = i % slices * kTokenColumns;
    const Slice slice{first, std::min(first + kTokenColumns, plan.size.Vp)};
    stages.scan_tokens(plan, scan / p.HV, scan % p.HV, slice, scratch, work);
  });
  zero_unused_rows(p, args.in.cu_seqlens, {&args.o});
  collect(execution, plan, w, threads);
}

void forward_cpu(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  if (execution.schedule == Schedule::kTokens) return forward_tokens(p, args, execution);
  const int threads = thread_count(execution);
  const Stages stages = stages_for_this_cpu();
  Arena arena(execution.workspace);
  Workspace w = lay_out(p, Direction::kForward, execution, arena, !args.saved.empty());
  if (!args.saved.empty()) {
    Arena saved(args.saved);
    lay_out_saved(p, saved, w.keep);
  }
  Plan plan = start_plan(p, Direction::kForward, args.in, w, threads);
  plan.fwd = &args;

  // A saved Cq has its place in `saved`, a passing one a slot of the thread.
  const bool cq_is_kept = !args.saved.empty() && p.policy == Policy::kSave;
  const std::int64_t scans = p.sequences() * p.HV;
  if (takes_whole_heads(p, threads) && !cq_is_kept) {
    run(scans, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
      stages.scan_forward(whole_heads(plan), i / p.HV, i % p.HV, {0, plan.size.Vp}, scratch, work);
    });
  } else {
    prepare(plan, stages, w, threads);
    const Slices slices(plan.size, scans, threads);
    run(scans * slices.count, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
      const std::int64_t scan = i / slices.count;
      stages.scan_forward(plan, scan / p.HV, scan % p.HV, slices[i % slices.count], scratch, work);
    });
  }
  zero_unused_rows(p, args.in.cu_seqlens, {&args.o});
  collect(execution, plan, w, threads);
}

void backward_cpu(const Problem& p, const BackwardArgs& args, const Execution& execution) {
  const int threads = thread_count(execution);
  const Stages stages = stages_for_this_cpu();
  const bool saved = !args.saved.empty();
  Arena arena(execution.workspace);
  Workspace w = lay_out(p, Direction::kBackward, execution, arena, saved);
  if (saved) {
    // Read only: prepare_chunk and scan_forward skip what the forward has left.
    Arena from(std::span(const_cast<std::byte*>(args.saved.data()), args.saved.size()));
    lay_out_saved(p, from, w.keep);
  }
  Plan plan = start_plan(p, Direction::kBackward, args.in, w, threads);
  plan.bwd = &args;
  plan.make_a = !saved;
  plan.make_cq = !(saved && p.policy == Policy::kSave);
  const bool recompute = plan.make_cq;  // R and the states

  const std::int64_t scans = p.sequences() * p.HV;
  if (takes_whole_heads(p, threads)) {
    Plan forwards = plan;  // prepares A (W, U), the reverse pass Cq
    Plan backwards = plan;
    if (recompute) {
      forwards.make_cq = false;
      backwards.make_a = backwards.make_w = false;
    }
    run(scans, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
      const Slice all{0, plan.size.Vp};
      if (recompute) stages.scan_forward(whole_heads(forwards), i / p.HV, i % p.HV, all, scratch, work);
      stages.scan_reverse(whole_heads(backwards), i / p.HV, i % p.HV, all, scratch, work);
    });
  } else {
    prepare(plan, stages, w, threads);
    // Forward recomputation and reverse scan side by side.
    const std::int64_t directions = recompute ? 2 : 1;
    const Slices slices(plan.size, scans * directions, threads);
    run(scans * slices.count * directions, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
      const std::int64_t scan = i / directions / slices.count;
      const Slice slice = slices[i / directions % slices.count];
      const auto stage = i % directions == 0 ? stages.scan_reverse : stages.scan_forward;
      stage(plan, scan / p.HV, scan % p.HV, slice, scratch, work);
    });
    run(plan.chunk_count * p.H, threads, w, [&](std::int64_t i, Arena scratch, Work& work) {
      stages.pullback_chunk(plan, i / p.H, i % p.H, scratch, work);
    });
  }
  zero_unused_rows(p, args.in.cu_seqlens, {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.db, &args.dw});
  collect(execution, plan, w, threads);
}

Bytes bytes_cpu(const Problem& p, Direction direction, const Execution& execution) {
  Bytes bytes;
  // A call without `saved` needs the most; one size serves both.
  Arena arena;
  lay_out(p, direction, execution, arena, false);
  bytes.workspace = arena.used();
  if (execution.schedule == Schedule::kTokens) return bytes;
  Arena saved;
  Intermediates keep;
  lay_out_saved(p, saved, keep);
  bytes.saved = saved.used();
  return bytes;
}

std::string declines_cpu(const Problem& p, Direction direction, const Execution& execution) {
  if (std::string reason = tokens_decline(p, direction, execution); !reason.empty()) return reason;
  if (p.dtype == DType::kF64 || p.strength_dtype == DType::kF64)
    return "dtype f64 is the reference's (this one computes in FP32)";
  if (!std::isfinite(static_cast<float>(p.query_scale()))) return "scale is beyond the range of FP32";
  return {};
}

}  // namespace

const BackendEntry kCpuBackend{Backend::kCpu, DeviceKind::kCpu, declines_cpu, bytes_cpu, forward_cpu, backward_cpu};

}  // namespace rewy
