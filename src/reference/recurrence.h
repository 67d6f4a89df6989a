// The delta rule token by token, for one sequence and one value head: plain loops over contiguous arrays, in the order
// of docs/math.md, section 1. Every other implementation is measured against these two functions, so they share no code
// with any. The scalar is a template parameter so that tests can differentiate the forward by complex step.
//
// Shapes in letters: T tokens, K key width, V value width. Gate and strengths are vectors here, for every operator;
// the caller repeats a scalar over the features and sums its gradient over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>

namespace rewy::reference {

template <class Real>
struct HeadInputs {
  std::int64_t T, K, V;
  double scale;   ///< on the queries
  const Real* q;  ///< [T, K] not yet scaled
  const Real* k;  ///< [T, K]
  const Real* v;  ///< [T, V]
  const Real* g;  ///< [T, K] log decay; -inf forgets the state
  const Real* b;  ///< [T, K] erase strength
  const Real* w;  ///< [T, V] write strength
};

/// One token's state update, before [K, V] -> after [K, V] (which may be the same memory); r [V] is left as well.
template <class Real>
void update_state(const HeadInputs<Real>& in, std::int64_t t, const Real* before, Real* after, Real* r) {
  const std::int64_t K = in.K, V = in.V;
  const Real *k = in.k + t * K, *g = in.g + t * K, *b = in.b + t * K;
  const Real *v = in.v + t * V, *w = in.w + t * V;

  // r = w * v - S-^T (b * k)  [V]   with   S- = diag(exp g) S  [K, V]
  for (std::int64_t j = 0; j < V; ++j) r[j] = w[j] * v[j];
  for (std::int64_t i = 0; i < K; ++i) {
    const Real decay = std::exp(g[i]);
    const Real erase = b[i] * k[i];
    const Real* from = before + i * V;
    Real* row = after + i * V;
#pragma omp simd
    for (std::int64_t j = 0; j < V; ++j) {
      row[j] = decay * from[j];
      r[j] -= row[j] * erase;
    }
  }
  // S = S- + k r^T  [K, V]
  for (std::int64_t i = 0; i < K; ++i) {
    const Real key = k[i];
    Real* row = after + i * V;
#pragma omp simd
    for (std::int64_t j = 0; j < V; ++j) row[j] += key * r[j];
  }
}

/// S [K, V]: the initial state, replaced by the final one. Writes o [T, V]. Scratch: r [V].
template <class Real>
void forward_head(const HeadInputs<Real>& in, Real* S, Real* o, Real* r) {
  const std::int64_t K = in.K, V = in.V;
  for (std::int64_t t = 0; t < in.T; ++t) {
    update_state(in, t, S, S, r);
    // o = S^T (scale * q)  [V]: the read sees the write of its own token
    Real* out = o + t * V;
    std::fill_n(out, V, Real(0));
    for (std::int64_t i = 0; i < K; ++i) {
      const Real query = in.scale * in.q[t * K + i];
      const Real* row = S + i * V;
#pragma omp simd
      for (std::int64_t j = 0; j < V; ++j) out[j] += row[j] * query;
    }
  }
}

/// Tokens between two states that the backward keeps from its first sweep. The states in between are computed again,
/// one segment at a time, so that memory is (T / kSegment + kSegment) states instead of T.
inline constexpr std::int64_t kSegment = 64;

inline std::int64_t segments_of(std::int64_t tokens) {
  return (tokens + kSegment - 1) / kSegment;
}

/// Gradients of one head. dq and dk are added to, as several value heads share them; the others are assigned.
struct HeadGradients {
  double* dq;  ///< [T, K]
  double* dk;  ///< [T, K]
  double* dv;  ///< [T, V]
  double* dg;  ///< [T, K]
  double* db;  ///< [T, K]
  double* dw;  ///< [T, V]
};

struct HeadScratch {
  double* checkpoints;  ///< [segments_of(T), K, V] states before the first token of each segment
  double* states;       ///< [kSegment, K, V]       states after each token of the current segment
  double* r;            ///< [kSegment, V]          and what each token wrote
  double* dr;           ///< [V]
};

/// S [K, V]: the initial state; overwritten. dS [K, V]: the gradient of the final state, replaced by that of the
/// initial one. dO [T, V].
inline void backward_head(const HeadInputs<double>& in, const double* dO, double* S, double* dS,
                          const HeadGradients& out, const HeadScratch& scratch) {
  const std::int64_t T = in.T, K = in.K, V = in.V;
  double* dr = scratch.dr;

  // First sweep: keep the state in front of every segment.
  for (std::int64_t t = 0; t < T; ++t) {
    if (t % kSegment == 0) std::copy_n(S, K * V, scratch.checkpoints + t / kSegment * K * V);
    update_state(in, t, S, S, scratch.r);
  }

  for (std::int64_t segment = segments_of(T); segment-- > 0;) {
    const std::int64_t first = segment * kSegment;
    const std::int64_t last = std::min(first + kSegment, T);
    const double* start = scratch.checkpoints + segment * K * V;
    const auto state_before = [&](std::int64_t t) {
      return t == first ? start : scratch.states + (t - 1 - first) * K * V;
    };
    for (std::int64_t t = first; t < last; ++t) {
      update_state(in, t, state_before(t), scratch.states + (t - first) * K * V, scratch.r + (t - first) * V);
    }

    for (std::int64_t t = last; t-- > first;) {
      const double *q = in.q + t * K, *k = in.k + t * K, *g = in.g + t * K, *b = in.b + t * K;
      const double *v = in.v + t * V, *w = in.w + t * V, *d_out = dO + t * V;
      const double* before = state_before(t);
      const double* after = scratch.states + (t - first) * K * V;
      const double* r = scratch.r + (t - first) * V;

      // o = S^T (scale * q):   dq = scale * S dO  [K]     dS += (scale * q) dO^T  [K, V]
      // S = S- + k r^T:        dk = dS r          [K]     dr = dS^T k             [V]
      std::fill_n(dr, V, 0.0);
      for (std::int64_t i = 0; i < K; ++i) {
        const double query = in.scale * q[i];
        const double key = k[i];
        const double* row = after + i * V;
        double* d_row = dS + i * V;
        double d_query = 0, d_key = 0;
#pragma omp simd reduction(+ : d_query, d_key)
        for (std::int64_t j = 0; j < V; ++j) {
          d_query += row[j] * d_out[j];
          d_row[j] += query * d_out[j];
          d_key += d_row[j] * r[j];
          dr[j] += d_row[j] * key;
        }
        out.dq[t * K + i] += in.scale * d_query;
        out.dk[t * K + i] += d_key;
      }

      // r = w * v - S-^T (b * k):   dv = w * dr     dw = v * dr  [V]
      for (std::int64_t j = 0; j < V; ++j) {
        out.dv[t * V + j] = w[j] * dr[j];
        out.dw[t * V + j] = v[j] * dr[j];
      }

      // and                         d(b * k) = -S- dr  [K]     dS- = dS - (b * k) dr^T  [K, V]
      // S- = diag(exp g) S_before:  dg = rowsum(dS- * S-)  [K]     dS_before = diag(exp g) dS-  [K, V]
      // At g = -inf, S- is zero, and with it dg and all that the state before would receive.
      for (std::int64_t i = 0; i < K; ++i) {
        const double decay = std::exp(g[i]);
        const double erase = b[i] * k[i];
        const double* row = before + i * V;
        double* d_row = dS + i * V;
        double d_erase = 0, d_gate = 0;
#pragma omp simd reduction(+ : d_erase, d_gate)
        for (std::int64_t j = 0; j < V; ++j) {
          const double decayed = decay * row[j];
          const double d_decayed = d_row[j] - erase * dr[j];
          d_erase -= decayed * dr[j];
          d_gate += d_decayed * decayed;
          d_row[j] = decay * d_decayed;
        }
        out.db[t * K + i] = k[i] * d_erase;
        out.dk[t * K + i] += b[i] * d_erase;
        out.dg[t * K + i] = d_gate;
      }
    }
  }
}

}  // namespace rewy::reference
