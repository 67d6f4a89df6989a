// The FP64 reference of the activations as a backend: converts element by element and rounds the results once.
#include "reference/activation.h"

#include <omp.h>

#include <array>
#include <vector>

#include "common/activation.h"
#include "reference/storage.h"

namespace rewy {
namespace {

using reference::narrow;
using reference::widen;
using reference::with_data;

using Place = std::array<std::int64_t, TensorView::kMaxRank>;

std::int64_t offset(const TensorView& view, const Place& at) {
  std::int64_t sum = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    sum += at[i] * view.strides[i];
  }
  return sum;
}

/// `otherwise` where the view is not given.
double load(const TensorView& view, const Place& at, double otherwise = 0) {
  double x = otherwise;
  if (view.given()) with_data(view, [&](const auto* data) { x = widen(data[offset(view, at)]); });
  return x;
}

/// Nothing for a view that is not given.
void store(const TensorView& view, const Place& at, double x) {
  if (view.given()) with_data(view, [&](auto* data) { narrow(x, data[offset(view, at)]); });
}

int thread_count(const Execution& execution) {
  return execution.threads > 0 ? execution.threads : omp_get_max_threads();
}

/// Runs task(batch, token) for all tokens. None reads what another writes.
template <class Task>
void for_each_token(const Activation& a, const Execution& execution, Task&& task) {
#pragma omp parallel for num_threads(thread_count(execution)) collapse(2)
  for (std::int64_t batch = 0; batch < a.B; ++batch) {
    for (std::int64_t token = 0; token < a.T; ++token) task(batch, token);
  }
}

std::vector<double> load_row(const TensorView& view, std::int64_t K, Place at) {
  std::vector<double> row(static_cast<std::size_t>(K));
  for (std::int64_t i = 0; i < K; ++i) {
    at[3] = i;
    row[static_cast<std::size_t>(i)] = load(view, at);
  }
  return row;
}

void store_row(const TensorView& view, const std::vector<double>& row, Place at) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    at[3] = static_cast<std::int64_t>(i);
    store(view, at, row[i]);
  }
}

void normalise_row(std::int64_t K, const TensorView& raw, const TensorView& result, const TensorView& rstd,
                   const Place& at) {
  const std::vector<double> x = load_row(raw, K, at);
  std::vector<double> y(x.size());
  store(rstd, at, reference::normalise(K, x.data(), kNormEpsilon, y.data()));
  store_row(result, y, at);
}

void normalise_row_backward(std::int64_t K, const TensorView& raw, const TensorView& rstd, const TensorView& d_result,
                            const TensorView& d_raw, const Place& at) {
  if (!d_raw.given()) return;
  const std::vector<double> x = load_row(raw, K, at), dy = load_row(d_result, K, at);
  std::vector<double> dx(x.size());
  reference::normalise_gradient(K, x.data(), load(rstd, at), dy.data(), dx.data());
  store_row(d_raw, dx, at);
}

double rate_of(const ActivationInputs& in, std::int64_t head) {
  return std::exp(load(in.A_log, {head}));
}

std::int64_t features_of(const Activation& a) {
  return a.gate == Gate::kVector ? a.K : 1;
}

double factor_of(const Activation& a) {
  return a.allow_negative_eigenvalues ? 2 : 1;
}

std::string declines(const Activation&, Direction, const Execution&) {
  return {};
}

std::size_t bytes(const Activation&, Direction, const Execution&) {
  return 0;
}

void forward_reference(const Activation& a, const ActivateArgs& args, const Execution& execution) {
  const ActivationInputs& in = args.in;
  for_each_token(a, execution, [&](std::int64_t batch, std::int64_t token) {
    for (std::int64_t head = 0; a.normalise && head < a.H; ++head) {
      normalise_row(a.K, in.raw_q, args.q, args.q_rstd, {batch, token, head});
      normalise_row(a.K, in.raw_k, args.k, args.k_rstd, {batch, token, head});
    }
    for (std::int64_t head = 0; a.gate != Gate::kNone && head < a.HV; ++head) {
      const double rate = rate_of(in, head);
      for (std::int64_t i = 0; i < features_of(a); ++i) {
        const Place at{batch, token, head, i};
        const double bias = load(in.dt_bias, {head * features_of(a) + i});
        store(args.g, at, reference::log_decay(load(in.raw_g, at), bias, rate, a.lower_bound));
      }
    }
    for (std::int64_t head = 0; a.strength && head < a.HV; ++head) {
      const Place at{batch, token, head};
      store(args.beta, at, reference::strength(load(in.raw_beta, at), factor_of(a)));
    }
  });
}

/// One head's gate: d raw of every token, and the sums over the tokens.
void gate_backward(const Activation& a, const ActivateBackwardArgs& args, std::int64_t head) {
  const double rate = rate_of(args.in, head);
  double d_A_log = 0;
  for (std::int64_t i = 0; i < features_of(a); ++i) {
    const double bias = load(args.in.dt_bias, {head * features_of(a) + i});
    double d_bias = 0;
    for (std::int64_t batch = 0; batch < a.B; ++batch) {
      for (std::int64_t token = 0; token < a.T; ++token) {
        const Place at{batch, token, head, i};
        const reference::GateGradient d =
            reference::log_decay_gradient(load(args.in.raw_g, at), bias, rate, a.lower_bound, load(args.dg, at));
        store(args.d_raw_g, at, d.raw);
        d_bias += d.raw;
        d_A_log += d.A_log;
      }
    }
    store(args.d_dt_bias, {head * features_of(a) + i}, d_bias);
  }
  store(args.d_A_log, {head}, d_A_log);
}

void backward_reference(const Activation& a, const ActivateBackwardArgs& args, const Execution& execution) {
  const ActivationInputs& in = args.in;
  for_each_token(a, execution, [&](std::int64_t batch, std::int64_t token) {
    for (std::int64_t head = 0; a.normalise && head < a.H; ++head) {
      normalise_row_backward(a.K, in.raw_q, args.q_rstd, args.dq, args.d_raw_q, {batch, token, head});
      normalise_row_backward(a.K, in.raw_k, args.k_rstd, args.dk, args.d_raw_k, {batch, token, head});
    }
    for (std::int64_t head = 0; args.d_raw_beta.given() && head < a.HV; ++head) {
      const Place at{batch, token, head};
      store(args.d_raw_beta, at,
            reference::strength_gradient(load(in.raw_beta, at), factor_of(a), load(args.dbeta, at)));
    }
  });
  if (!args.d_raw_g.given() && !args.d_A_log.given() && !args.d_dt_bias.given()) return;
#pragma omp parallel for num_threads(thread_count(execution))
  for (std::int64_t head = 0; head < a.HV; ++head) gate_backward(a, args, head);
}

}  // namespace

const ActivationEntry kReferenceActivation{Backend::kReference, DeviceKind::kCpu,  declines, bytes,
                                           forward_reference,   backward_reference};

}  // namespace rewy
