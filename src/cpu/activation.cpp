// The CPU backend's activations (docs/math.md, section 7): tiles of 64 tokens over threads, each with all its heads,
// then the sums of the tiles. The tile is compiled once per instruction set.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/activation.cpp"
// This order is Highway's: the choice of targets, then foreach_target, then the rest.
// clang-format off
#include "cpu/targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/highway.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/activation.h"
#include "common/arena.h"
#include "cpu/float_state.h"
#include "cpu/tile-inl.h"

// Plain data, the same for every instruction set.
#ifndef REWY_CPU_ACTIVATION_ONCE
#define REWY_CPU_ACTIVATION_ONCE
namespace rewy::cpu {

/// Numbers that are loaded, computed and stored at a time.
inline constexpr int64_t kRun = 256;

/// One call. Exactly one of `forward` and `backward` is set.
struct ActivationPlan {
  const Activation& a;
  const ActivateArgs* forward = nullptr;
  const ActivateBackwardArgs* backward = nullptr;
  float* bias_sums = nullptr;  ///< [B * tiles, gate_width]; null where no sum is asked for
  float* rate_sums = nullptr;  ///< [B * tiles, HV]
};

/// Up to kRun numbers of one token: features of a head, or of [B, T, heads] heads.
struct Run {
  int64_t offset, step, count;
};

inline Run run_of(const TensorView& view, int64_t batch, int64_t token, int64_t head, int64_t first, int64_t count) {
  const int64_t row = batch * view.strides[0] + token * view.strides[1];
  if (view.rank == 3) return {row + first * view.strides[2], view.strides[2], count};
  return {row + head * view.strides[2] + first * view.strides[3], view.strides[3], count};
}

}  // namespace rewy::cpu
#endif  // REWY_CPU_ACTIVATION_ONCE

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Scratch of one run; what lies behind its count is zero.
struct alignas(64) Numbers {
  float x[kRun];
};

void load(const TensorView& view, Run run, Numbers& to) {
  with_storage(view.dtype, [&]<class Storage>(Storage*) {
    const Storage* from = static_cast<const Storage*>(view.data) + run.offset;
    if (run.step == 1) {
      load_run(from, run.count, to.x);
    } else {
      for (int64_t i = 0; i < run.count; ++i) to.x[i] = to_float(from[i * run.step]);
    }
  });
  std::fill(to.x + run.count, to.x + round_up(run.count, kPad), 0.0f);
}

void store(const Numbers& from, const TensorView& view, Run run) {
  with_storage(view.dtype, [&]<class Storage>(Storage*) {
    Storage* to = static_cast<Storage*>(view.data) + run.offset;
    if (run.step == 1) {
      store_run(from.x, run.count, to);
    } else {
      for (int64_t i = 0; i < run.count; ++i) to[i * run.step] = from_float<Storage>(from.x[i]);
    }
  });
}

/// e = exp(-|x|), which never overflows: all that follows is made of it.
HWY_INLINE FloatVec exp_of_distance(FloatVec x) {
  return exp_of(hn::Neg(hn::Abs(x)));
}

/// 1 / (1 + exp(-x)), with e as above.
HWY_INLINE FloatVec sigmoid(FloatVec x, FloatVec e) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
}

/// log(1 + exp(x)) = max(x, 0) + log(1 + e), and log(1 + e) = 2 atanh(s) with s = e / (2 + e), at most 1/3: as a series
/// in s^2 it keeps its last digits however small e is. The first term left out is below 2^-25.
HWY_INLINE FloatVec softplus(FloatVec x, FloatVec e) {
  const FloatTag d;
  const FloatVec s = hn::Div(e, hn::Add(hn::Set(d, 2.0f), e));
  const FloatVec s2 = hn::Mul(s, s);
  FloatVec series = hn::Set(d, 2.0f / 13);
  for (const float c : {2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3}) {
    series = hn::MulAdd(series, s2, hn::Set(d, c));
  }
  const FloatVec log = hn::MulAdd(hn::Mul(series, s2), s, hn::Add(s, s));
  // Max takes a number before NaN on some targets.
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Add(hn::Max(x, hn::Zero(d)), log));
}

/// d * value, and 0 where d is 0 whatever the value is: a decay of -inf has the gradient 0, and so has what lies in
/// rows that nothing reads.
HWY_INLINE FloatVec times_unless_zero(FloatVec d, FloatVec value) {
  const FloatTag tag;
  return hn::IfThenZeroElse(hn::Eq(d, hn::Zero(tag)), hn::Mul(d, value));
}

// ---- Queries and keys -----------------------------------------------------------------------------------------------

void normalise(int64_t K, const TensorView& raw, const TensorView& result, const TensorView& rstd_view, int64_t batch,
               int64_t token, int64_t head) {
  const FloatTag d;
  Numbers x;
  float sum = 0;
  for (int64_t first = 0; first < K; first += kRun) {
    const int64_t count = std::min(kRun, K - first);
    load(raw, run_of(raw, batch, token, head, first, count), x);
    sum += dot_row(x.x, x.x, round_up(count, kPad));
  }
  const float rstd = 1.0f / std::sqrt(sum + static_cast<float>(kNormEpsilon));
  if (rstd_view.given()) static_cast<float*>(rstd_view.data)[run_of(rstd_view, batch, token, 0, head, 1).offset] = rstd;
  for (int64_t first = 0; first < K; first += kRun) {
    const int64_t count = std::min(kRun, K - first);
    if (K > kRun) load(raw, run_of(raw, batch, token, head, first, count), x);
    for (int64_t i = 0; i < count; i += lane_count()) {
      hn::Store(hn::Mul(hn::Load(d, x.x + i), hn::Set(d, rstd)), d, x.x + i);
    }
    store(x, result, run_of(result, batch, token, head, first, count));
  }
}

void normalise_backward(int64_t K, const TensorView& raw, const TensorView& rstd_view, const TensorView& d_result,
                        const TensorView& d_raw, int64_t batch, int64_t token, int64_t head) {
  const FloatTag d;
  Numbers x, dy;
  const float rstd = static_cast<const float*>(rstd_view.data)[run_of(rstd_view, batch, token, 0, head, 1).offset];
  const FloatVec scale = hn::Set(d, rstd);
  const auto load_both = [&](int64_t first, int64_t count) HWY_ATTR {
    load(raw, run_of(raw, batch, token, head, first, count), x);
    load(d_result, run_of(d_result, batch, token, head, first, count), dy);
    for (int64_t i = 0; i < count; i += lane_count()) {  // y
      hn::Store(hn::Mul(hn::Load(d, x.x + i), scale), d, x.x + i);
    }
  };
  float along = 0;   // <dy, y>
  bool zero = true;  // all of dy: then so is d_raw, whatever x is
  for (int64_t first = 0; first < K; first += kRun) {
    const int64_t count = std::min(kRun, K - first);
    load_both(first, count);
    along += dot_row(dy.x, x.x, round_up(count, kPad));
    zero = zero && std::all_of(dy.x, dy.x + count, [](float e) { return e == 0.0f; });
  }
  for (int64_t first = 0; first < K; first += kRun) {
    const int64_t count = std::min(kRun, K - first);
    if (K > kRun) load_both(first, count);
    for (int64_t i = 0; i < count; i += lane_count()) {
      const FloatVec across = hn::NegMulAdd(hn::Load(d, x.x + i), hn::Set(d, along), hn::Load(d, dy.x + i));
      hn::Store(hn::Mul(scale, across), d, x.x + i);
    }
    if (zero) std::fill_n(x.x, count, 0.0f);
    store(x, d_raw, run_of(d_raw, batch, token, head, first, count));
  }
}

// ---- The gate -------------------------------------------------------------------------------------------------------

/// What a run of a gate has for all tokens: dt_bias and exp(A_log), by feature.
struct GateParameters {
  Numbers bias, rate;
};

float parameter(const TensorView& view, int64_t i, float otherwise) {
  return view.given() ? static_cast<const float*>(view.data)[i * view.strides[0]] : otherwise;
}

GateParameters parameters_of(const Activation& a, const ActivationInputs& in, int64_t head, int64_t first,
                             int64_t count) {
  GateParameters p{};
  const auto rate_of = [&](int64_t h) {  // finite: times a vanishing softplus, or x = 0, infinity would be NaN
    const double rate = in.A_log.given() ? std::exp(static_cast<double>(parameter(in.A_log, h, 0))) : 1.0;
    constexpr double kMost = std::numeric_limits<float>::max();
    return static_cast<float>(rate > kMost ? kMost : rate);
  };
  const bool vector = a.gate == Gate::kVector;
  const float rate = rate_of(head);
  for (int64_t i = 0; i < count; ++i) {
    p.bias.x[i] = parameter(in.dt_bias, (vector ? head * a.K : 0) + first + i, 0);
    p.rate.x[i] = vector ? rate : rate_of(first + i);
  }
  return p;
}

/// What the other parts of a gate call for each run: heads of K features, or the heads themselves as features.
template <class Use>
void for_each_gate_run(const Activation& a, Use&& use) {
  const bool vector = a.gate == Gate::kVector;
  const int64_t width = vector ? a.K : a.HV;
  for (int64_t head = 0; head < (vector ? a.HV : 1); ++head) {
    for (int64_t first = 0; first < width; first += kRun) use(head, first, std::min(kRun, width - first));
  }
}

void gate_forward(const ActivationPlan& plan, int64_t batch, int64_t begin, int64_t end) {
  const FloatTag d;
  const ActivateArgs& args = *plan.forward;
  const FloatVec bound = hn::Set(d, static_cast<float>(plan.a.lower_bound.value_or(0)));
  for_each_gate_run(plan.a, [&](int64_t head, int64_t first, int64_t count) HWY_ATTR {
    const GateParameters p = parameters_of(plan.a, args.in, head, first, count);
    Numbers x;
    for (int64_t token = begin; token < end; ++token) {
      load(args.in.raw_g, run_of(args.in.raw_g, batch, token, head, first, count), x);
      for (int64_t i = 0; i < count; i += lane_count()) {
        const FloatVec sum = hn::Add(hn::Load(d, x.x + i), hn::Load(d, p.bias.x + i));
        const FloatVec rate = hn::Load(d, p.rate.x + i);
        if (plan.a.lower_bound) {
          const FloatVec z = hn::Mul(rate, sum);
          hn::Store(hn::Mul(bound, sigmoid(z, exp_of_distance(z))), d, x.x + i);
        } else {
          hn::Store(hn::Neg(hn::Mul(rate, softplus(sum, exp_of_distance(sum)))), d, x.x + i);
        }
      }
      store(x, args.g, run_of(args.g, batch, token, head, first, count));
    }
  });
}

/// d raw of a tile's tokens, and their sums: of a vector gate the rate's over the features too.
void gate_backward(const ActivationPlan& plan, int64_t batch, int64_t begin, int64_t end, int64_t slot) {
  const FloatTag d;
  const Activation& a = plan.a;
  const ActivateBackwardArgs& args = *plan.backward;
  const bool vector = a.gate == Gate::kVector;
  const FloatVec bound = hn::Set(d, static_cast<float>(a.lower_bound.value_or(0)));
  double rate_sum = 0;
  for_each_gate_run(a, [&](int64_t head, int64_t first, int64_t count) HWY_ATTR {
    const GateParameters p = parameters_of(a, args.in, head, first, count);
    Numbers x, dg, bias_sums{}, rate_sums{};
    const auto add_to = [&](Numbers& sums, int64_t i, FloatVec more)
                            HWY_ATTR { hn::Store(hn::Add(hn::Load(d, sums.x + i), more), d, sums.x + i); };
    for (int64_t token = begin; token < end; ++token) {
      load(args.in.raw_g, run_of(args.in.raw_g, batch, token, head, first, count), x);
      load(args.dg, run_of(args.dg, batch, token, head, first, count), dg);
      for (int64_t i = 0; i < count; i += lane_count()) {
        const FloatVec sum = hn::Add(hn::Load(d, x.x + i), hn::Load(d, p.bias.x + i));
        const FloatVec rate = hn::Load(d, p.rate.x + i), given = hn::Load(d, dg.x + i);
        FloatVec d_raw, d_A_log;
        if (a.lower_bound) {
          const FloatVec z = hn::Mul(rate, sum), e = exp_of_distance(z);
          const FloatVec root = hn::Add(hn::Set(d, 1.0f), e);
          const FloatVec slope = hn::Div(e, hn::Mul(root, root));
          const FloatVec dz = times_unless_zero(hn::Mul(given, bound), slope);
          d_raw = times_unless_zero(dz, rate);
          d_A_log = times_unless_zero(dz, z);
        } else {
          const FloatVec e = exp_of_distance(sum);
          d_raw = hn::Neg(times_unless_zero(given, hn::Mul(rate, sigmoid(sum, e))));
          d_A_log = hn::Neg(times_unless_zero(given, hn::Mul(rate, softplus(sum, e))));
        }
        hn::Store(d_raw, d, x.x + i);
        add_to(bias_sums, i, d_raw);
        add_to(rate_sums, i, d_A_log);
      }
      if (args.d_raw_g.given()) store(x, args.d_raw_g, run_of(args.d_raw_g, batch, token, head, first, count));
    }
    if (plan.bias_sums == nullptr) return;
    std::copy_n(bias_sums.x, count, plan.bias_sums + slot * gate_width(a) + (vector ? head * a.K : 0) + first);
    if (!vector) {
      std::copy_n(rate_sums.x, count, plan.rate_sums + slot * a.HV + first);
      return;
    }
    if (first == 0) rate_sum = 0;
    for (int64_t i = 0; i < count; ++i) rate_sum += static_cast<double>(rate_sums.x[i]);
    plan.rate_sums[slot * a.HV + head] = static_cast<float>(rate_sum);
  });
}

// ---- The strength ---------------------------------------------------------------------------------------------------

void strength_forward(const ActivationPlan& plan, int64_t batch, int64_t token) {
  const FloatTag d;
  const ActivateArgs& args = *plan.forward;
  const FloatVec factor = hn::Set(d, plan.a.allow_negative_eigenvalues ? 2.0f : 1.0f);
  Numbers x;
  for (int64_t first = 0; first < plan.a.HV; first += kRun) {
    const int64_t count = std::min(kRun, plan.a.HV - first);
    load(args.in.raw_beta, run_of(args.in.raw_beta, batch, token, 0, first, count), x);
    for (int64_t i = 0; i < count; i += lane_count()) {
      const FloatVec raw = hn::Load(d, x.x + i);
      hn::Store(hn::Mul(factor, sigmoid(raw, exp_of_distance(raw))), d, x.x + i);
    }
    store(x, args.beta, run_of(args.beta, batch, token, 0, first, count));
  }
}

void strength_backward(const ActivationPlan& plan, int64_t batch, int64_t token) {
  const FloatTag d;
  const ActivateBackwardArgs& args = *plan.backward;
  const FloatVec factor = hn::Set(d, plan.a.allow_negative_eigenvalues ? 2.0f : 1.0f);
  Numbers x, dbeta;
  for (int64_t first = 0; first < plan.a.HV; first += kRun) {
    const int64_t count = std::min(kRun, plan.a.HV - first);
    load(args.in.raw_beta, run_of(args.in.raw_beta, batch, token, 0, first, count), x);
    load(args.dbeta, run_of(args.dbeta, batch, token, 0, first, count), dbeta);
    for (int64_t i = 0; i < count; i += lane_count()) {
      const FloatVec e = exp_of_distance(hn::Load(d, x.x + i));
      const FloatVec root = hn::Add(hn::Set(d, 1.0f), e);
      const FloatVec slope = hn::Div(e, hn::Mul(root, root));
      hn::Store(times_unless_zero(hn::Mul(hn::Load(d, dbeta.x + i), factor), slope), d, x.x + i);
    }
    store(x, args.d_raw_beta, run_of(args.d_raw_beta, batch, token, 0, first, count));
  }
}

// ---- A tile ---------------------------------------------------------------------------------------------------------

/// Tokens [64 tile, 64 tile + 64) of one batch row; slot = batch * tiles + tile.
void activation_tile(const ActivationPlan& plan, int64_t slot) {
  const Activation& a = plan.a;
  const int64_t tiles = token_tiles(a), batch = slot / tiles;
  const int64_t begin = slot % tiles * kTokenTile, end = std::min(begin + kTokenTile, a.T);
  if (plan.forward != nullptr) {
    const ActivateArgs& args = *plan.forward;
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; a.normalise && head < a.H; ++head) {
        normalise(a.K, args.in.raw_q, args.q, args.q_rstd, batch, token, head);
        normalise(a.K, args.in.raw_k, args.k, args.k_rstd, batch, token, head);
      }
      if (a.strength) strength_forward(plan, batch, token);
    }
    if (a.gate != Gate::kNone) gate_forward(plan, batch, begin, end);
    return;
  }
  const ActivateBackwardArgs& args = *plan.backward;
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; a.normalise && head < a.H; ++head) {
      if (args.d_raw_q.given()) {
        normalise_backward(a.K, args.in.raw_q, args.q_rstd, args.dq, args.d_raw_q, batch, token, head);
      }
      if (args.d_raw_k.given()) {
        normalise_backward(a.K, args.in.raw_k, args.k_rstd, args.dk, args.d_raw_k, batch, token, head);
      }
    }
    if (args.d_raw_beta.given()) strength_backward(plan, batch, token);
  }
  if (args.d_raw_g.given() || plan.bias_sums != nullptr) gate_backward(plan, batch, begin, end, slot);
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rewy::cpu {

HWY_EXPORT(activation_tile);

}  // namespace rewy::cpu

namespace rewy {
namespace {

using namespace cpu;

int thread_count(const Execution& execution) {
  return execution.threads > 0 ? execution.threads : omp_get_max_threads();
}

void run_tiles(const ActivationPlan& plan, const Execution& execution) {
  const std::int64_t slots = plan.a.B * token_tiles(plan.a);
#pragma omp parallel num_threads(thread_count(execution))
  {
    const FloatState state(Subnormals::kKeep);
#pragma omp for schedule(dynamic) nowait
    for (std::int64_t slot = 0; slot < slots; ++slot) HWY_DYNAMIC_DISPATCH(activation_tile)(plan, slot);
  }
}

/// The sums over slots of columns [0, width) of sums [slots, width], in the order of the slots, each column in FP64: at
/// a hundred thousand tokens nothing is lost beyond the FP32 of the tiles.
void add_slots(const float* sums, std::int64_t slots, std::int64_t width, const TensorView& to,
               const Execution& execution) {
  if (!to.given()) return;
#pragma omp parallel num_threads(thread_count(execution))
  {
    const FloatState state(Subnormals::kKeep);
#pragma omp for schedule(dynamic) nowait
    for (std::int64_t first = 0; first < width; first += kRun) {
      const std::int64_t count = std::min(kRun, width - first);
      double total[kRun] = {};
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        const float* from = sums + slot * width + first;
        for (std::int64_t i = 0; i < count; ++i) total[i] += static_cast<double>(from[i]);
      }
      for (std::int64_t i = 0; i < count; ++i) {
        static_cast<float*>(to.data)[(first + i) * to.strides[0]] = static_cast<float>(total[i]);
      }
    }
  }
}

/// Where the sums of the tiles lie; on an empty arena it measures.
void lay_out(ActivationPlan& plan, Arena& arena) {
  const std::int64_t slots = plan.a.B * token_tiles(plan.a);
  plan.bias_sums = arena.take<float>(slots * gate_width(plan.a));
  plan.rate_sums = arena.take<float>(slots * plan.a.HV);
}

std::string declines_cpu(const Activation& a, Direction, const Execution&) {
  const bool wide = (a.normalise && a.dtype == DType::kF64) || (a.gate != Gate::kNone && a.gate_dtype == DType::kF64) ||
                    (a.strength && a.strength_dtype == DType::kF64);
  if (wide) return "dtype f64 is the reference's (this one computes in FP32)";
  return bound_fits_fp32(a) ? "" : "lower_bound is beyond the range of FP32";
}

std::size_t bytes_cpu(const Activation& a, Direction direction, const Execution&) {
  if (direction == Direction::kForward || a.gate == Gate::kNone) return 0;
  ActivationPlan plan{a};
  Arena arena;
  lay_out(plan, arena);
  return arena.used();
}

void forward_cpu(const Activation& a, const ActivateArgs& args, const Execution& execution) {
  ActivationPlan plan{a};
  plan.forward = &args;
  run_tiles(plan, execution);
}

void backward_cpu(const Activation& a, const ActivateBackwardArgs& args, const Execution& execution) {
  ActivationPlan plan{a};
  plan.backward = &args;
  if (args.d_A_log.given() || args.d_dt_bias.given()) {
    Arena arena(execution.workspace);
    lay_out(plan, arena);
  }
  run_tiles(plan, execution);
  const std::int64_t slots = a.B * token_tiles(a);
  add_slots(plan.bias_sums, slots, gate_width(a), args.d_dt_bias, execution);
  add_slots(plan.rate_sums, slots, a.HV, args.d_A_log, execution);
}

}  // namespace

const ActivationEntry kCpuActivation{Backend::kCpu, DeviceKind::kCpu, declines_cpu,
                                     bytes_cpu,     forward_cpu,      backward_cpu};

}  // namespace rewy
#endif  // HWY_ONCE
