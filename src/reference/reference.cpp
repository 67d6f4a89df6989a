// The FP64 reference as a backend: converts strided tensors of any element type to contiguous doubles, one (sequence,
// query head) at a time, runs the token recurrence of every value head of the group, and rounds the results once.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "common/arena.h"
#include "common/backend.h"
#include "reference/recurrence.h"
#include "reference/storage.h"

namespace rewy {
namespace {

using reference::backward_head;
using reference::forward_head;
using reference::HeadGradients;
using reference::HeadInputs;
using reference::HeadScratch;
using reference::narrow;
using reference::widen;
using reference::with_data;

// ---- strided tensors -----------------------------------------------------------------------------------------------

/// Consecutive tokens of one batch entry.
struct Span {
  std::int64_t batch, begin, tokens;
};

/// Rows of head `head`, [B, T, heads, width] or [B, T, heads] -> to [tokens, width], a scalar repeated over the width.
void load_rows(const TensorView& view, const Span& span, std::int64_t head, std::int64_t width, double* to) {
  const std::int64_t first = span.batch * view.strides[0] + span.begin * view.strides[1] + head * view.strides[2];
  const std::int64_t step = view.rank == 4 ? view.strides[3] : 0;
  with_data(view, [&](const auto* data) {
    for (std::int64_t t = 0; t < span.tokens; ++t) {
      for (std::int64_t i = 0; i < width; ++i) {
        to[t * width + i] = widen(data[first + t * view.strides[1] + i * step]);
      }
    }
  });
}

/// from [tokens, width] -> rows of head `head`; width is 1 for a view [B, T, heads]. Nothing for a view that is not
/// given.
void store_rows(const TensorView& view, const Span& span, std::int64_t head, std::int64_t width, const double* from) {
  if (!view.given()) return;
  const std::int64_t first = span.batch * view.strides[0] + span.begin * view.strides[1] + head * view.strides[2];
  const std::int64_t step = view.rank == 4 ? view.strides[3] : 0;
  with_data(view, [&](auto* data) {
    for (std::int64_t t = 0; t < span.tokens; ++t) {
      for (std::int64_t i = 0; i < width; ++i) {
        narrow(from[t * width + i], data[first + t * view.strides[1] + i * step]);
      }
    }
  });
}

/// Sums each row's features, in place: from [tokens, width] -> [tokens]. The gradient of a repeated scalar.
void sum_features(std::int64_t tokens, std::int64_t width, double* rows) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (std::int64_t i = 0; i < width; ++i) sum += rows[t * width + i];
    rows[t] = sum;
  }
}

/// Where a state [N, HV, K, V] or [N, HV, V, K] has its key and value axes.
struct StateStrides {
  std::int64_t first, key, value;
  StateStrides(const Problem& p, const TensorView& view, std::int64_t sequence, std::int64_t head)
      : first(sequence * view.strides[0] + head * view.strides[1]),
        key(view.strides[p.state_layout == StateLayout::kKV ? 2 : 3]),
        value(view.strides[p.state_layout == StateLayout::kKV ? 3 : 2]) {}
};

/// to [K, V]; zero where the view is not given.
void load_state(const Problem& p, const TensorView& view, std::int64_t sequence, std::int64_t head, double* to) {
  if (!view.given()) {
    std::fill_n(to, p.K * p.V, 0.0);
    return;
  }
  const StateStrides at(p, view, sequence, head);
  with_data(view, [&](const auto* data) {
    for (std::int64_t i = 0; i < p.K; ++i) {
      for (std::int64_t j = 0; j < p.V; ++j) to[i * p.V + j] = widen(data[at.first + i * at.key + j * at.value]);
    }
  });
}

/// from [K, V]; nothing where the view is not given.
void store_state(const Problem& p, const TensorView& view, std::int64_t sequence, std::int64_t head,
                 const double* from) {
  if (!view.given()) return;
  const StateStrides at(p, view, sequence, head);
  with_data(view, [&](auto* data) {
    for (std::int64_t i = 0; i < p.K; ++i) {
      for (std::int64_t j = 0; j < p.V; ++j) narrow(from[i * p.V + j], data[at.first + i * at.key + j * at.value]);
    }
  });
}

std::int64_t read_offset(const TensorView& view, std::int64_t i) {
  const std::int64_t at = i * view.strides[0];
  return view.dtype == DType::kI32 ? static_cast<const std::int32_t*>(view.data)[at]
                                   : static_cast<const std::int64_t*>(view.data)[at];
}

Span span_of(const Problem& p, const TensorView& offsets, std::int64_t sequence) {
  if (!p.segments) return {sequence, 0, p.T};
  const std::int64_t begin = read_offset(offsets, sequence);
  return {0, begin, read_offset(offsets, sequence + 1) - begin};
}

/// Rows after the last offset of a packed call belong to no sequence.
void zero_rest(const Problem& p, const TensorView& offsets, std::initializer_list<const TensorView*> outputs) {
  if (!p.segments) return;
  const std::int64_t last = read_offset(offsets, *p.segments);
  for (const TensorView* view : outputs) {
    if (!view->given()) continue;
    const std::int64_t width = view->rank == 4 ? view->shape[3] : 1;
    const std::int64_t step = view->rank == 4 ? view->strides[3] : 0;
    with_data(*view, [&](auto* data) {
      for (std::int64_t t = last; t < p.T; ++t) {
        for (std::int64_t head = 0; head < view->shape[2]; ++head) {
          for (std::int64_t i = 0; i < width; ++i) {
            narrow(0.0, data[t * view->strides[1] + head * view->strides[2] + i * step]);
          }
        }
      }
    });
  }
}

// ---- one task: a sequence and a query head --------------------------------------------------------------------------

/// FP64 copies of one thread's task. The longest sequence of a packed call is not known ahead; T bounds it.
struct Buffers {
  double *q, *k, *v, *g, *b, *w;  ///< [T, K], v and w [T, V]
  double* state;                  ///< [K, V]
  double* r;                      ///< [V], [kSegment, V] in the backward
  double* o;                      ///< [T, V] o, or its gradient

  // Backward only.
  double* d_state;  ///< [K, V]
  HeadGradients gradients;
  HeadScratch scratch;

  Buffers(const Problem& p, Direction direction, Arena& arena) {
    const std::int64_t keys = p.T * p.K, values = p.T * p.V, states = p.K * p.V;
    q = arena.take<double>(keys);
    k = arena.take<double>(keys);
    v = arena.take<double>(values);
    g = arena.take<double>(keys);
    b = arena.take<double>(keys);
    w = arena.take<double>(values);
    state = arena.take<double>(states);
    r = arena.take<double>((direction == Direction::kBackward ? reference::kSegment : 1) * p.V);
    o = arena.take<double>(values);
    if (direction == Direction::kForward) return;
    d_state = arena.take<double>(states);
    gradients.dq = arena.take<double>(keys);
    gradients.dk = arena.take<double>(keys);
    gradients.dv = arena.take<double>(values);
    gradients.dg = arena.take<double>(keys);
    gradients.db = arena.take<double>(keys);
    gradients.dw = arena.take<double>(values);
    scratch.checkpoints = arena.take<double>(reference::segments_of(p.T) * states);
    scratch.states = arena.take<double>(std::min(reference::kSegment, p.T) * states);
    scratch.r = r;
    scratch.dr = arena.take<double>(p.V);
  }

  HeadInputs<double> inputs(const Problem& p, std::int64_t tokens) const {
    return {tokens, p.K, p.V, p.query_scale(), q, k, v, g, b, w};
  }
};

/// q and k, shared by the value heads of a group.
void load_query_head(const Problem& p, const Inputs& in, const Span& span, std::int64_t head, const Buffers& to) {
  load_rows(in.q, span, head, p.K, to.q);
  load_rows(in.k, span, head, p.K, to.k);
}

/// The rest of one value head's inputs, gate and strengths as vectors whatever the operator.
void load_value_head(const Problem& p, const Inputs& in, const Span& span, std::int64_t sequence, std::int64_t head,
                     const Buffers& to) {
  const bool shared = strength_of(p.op) == Strength::kShared;
  load_rows(in.v, span, head, p.V, to.v);
  load_rows(shared ? in.beta : in.b, span, head, p.K, to.b);
  load_rows(shared ? in.beta : in.w, span, head, p.V, to.w);
  if (gate_of(p.op) == Gate::kNone) {
    std::fill_n(to.g, span.tokens * p.K, 0.0);
  } else {
    load_rows(in.g, span, head, p.K, to.g);
  }
  load_state(p, in.initial_state, sequence, head, to.state);
}

/// Threads that can have work; never more slices of the workspace than tasks.
int thread_count(const Problem& p, const Execution& execution) {
  const std::int64_t threads = execution.threads > 0 ? execution.threads : omp_get_max_threads();
  return static_cast<int>(std::clamp<std::int64_t>(p.sequences() * p.H, 1, threads));
}

std::size_t slice_bytes(const Problem& p, Direction direction) {
  Arena arena;
  Buffers(p, direction, arena);
  return arena.used();
}

/// Runs task(sequence, query head, buffers) for all of them. No task reads what another writes, and each is computed
/// in one order, so that neither threads nor schedule can be seen in the results.
template <class Task>
void run(const Problem& p, Direction direction, const Execution& execution, Task&& task) {
  const std::size_t slice = slice_bytes(p, direction);
#pragma omp parallel num_threads(thread_count(p, execution))
  {
    Arena arena(execution.workspace.subspan(static_cast<std::size_t>(omp_get_thread_num()) * slice, slice));
    const Buffers buffers(p, direction, arena);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < p.sequences() * p.H; ++i) task(i / p.H, i % p.H, buffers);
  }
}

// ---- the backend ---------------------------------------------------------------------------------------------------

// The schedule changes nothing here: the reference goes token by token.
std::string declines(const Problem& p, Direction direction, const Execution& execution) {
  if (std::string reason = tokens_decline(p, direction, execution); !reason.empty()) return reason;
  if (p.variant != Variant{}) return "the choice of a derivative graph is the CPU backend's";
  return {};
}

Bytes bytes(const Problem& p, Direction direction, const Execution& execution) {
  return {.workspace = slice_bytes(p, direction) * static_cast<std::size_t>(thread_count(p, execution))};
}

void forward_reference(const Problem& p, const ForwardArgs& args, const Execution& execution) {
  const std::int64_t group = p.HV / p.H;
  run(p, Direction::kForward, execution, [&](std::int64_t sequence, std::int64_t head, const Buffers& use) {
    const Span span = span_of(p, args.in.cu_seqlens, sequence);
    load_query_head(p, args.in, span, head, use);
    for (std::int64_t hv = head * group; hv < (head + 1) * group; ++hv) {
      load_value_head(p, args.in, span, sequence, hv, use);
      forward_head(use.inputs(p, span.tokens), use.state, use.o, use.r);
      store_rows(args.o, span, hv, p.V, use.o);
      store_state(p, args.final_state, sequence, hv, use.state);
    }
  });
  zero_rest(p, args.in.cu_seqlens, {&args.o});
}

void backward_reference(const Problem& p, const BackwardArgs& args, const Execution& execution) {
  const std::int64_t group = p.HV / p.H;
  run(p, Direction::kBackward, execution, [&](std::int64_t sequence, std::int64_t head, const Buffers& use) {
    const Span span = span_of(p, args.in.cu_seqlens, sequence);
    const HeadGradients& d = use.gradients;
    load_query_head(p, args.in, span, head, use);
    std::fill_n(d.dq, span.tokens * p.K, 0.0);
    std::fill_n(d.dk, span.tokens * p.K, 0.0);
    for (std::int64_t hv = head * group; hv < (head + 1) * group; ++hv) {
      load_value_head(p, args.in, span, sequence, hv, use);
      load_rows(args.d_o, span, hv, p.V, use.o);
      load_state(p, args.d_final_state, sequence, hv, use.d_state);
      backward_head(use.inputs(p, span.tokens), use.o, use.state, use.d_state, d, use.scratch);

      store_rows(args.dv, span, hv, p.V, d.dv);
      if (gate_of(p.op) == Gate::kScalar) sum_features(span.tokens, p.K, d.dg);
      if (gate_of(p.op) != Gate::kNone) store_rows(args.dg, span, hv, gate_of(p.op) == Gate::kScalar ? 1 : p.K, d.dg);
      if (strength_of(p.op) == Strength::kShared) {
        // beta is both strengths, repeated: dbeta = sum_k db + sum_v dw
        sum_features(span.tokens, p.K, d.db);
        sum_features(span.tokens, p.V, d.dw);
        for (std::int64_t t = 0; t < span.tokens; ++t) d.db[t] += d.dw[t];
        store_rows(args.dbeta, span, hv, 1, d.db);
      } else {
        store_rows(args.db, span, hv, p.K, d.db);
        store_rows(args.dw, span, hv, p.V, d.dw);
      }
      store_state(p, args.d_initial_state, sequence, hv, use.d_state);
    }
    store_rows(args.dq, span, head, p.K, d.dq);
    store_rows(args.dk, span, head, p.K, d.dk);
  });
  zero_rest(p, args.in.cu_seqlens, {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.db, &args.dw});
}

}  // namespace

const BackendEntry kReferenceBackend{Backend::kReference, DeviceKind::kCpu,  declines, bytes,
                                     forward_reference,   backward_reference};

}  // namespace rewy
