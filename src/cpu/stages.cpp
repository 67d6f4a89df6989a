// The stages of the CPU backend (stages.h), compiled once per instruction set. Read beside docs/math.md.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stages.cpp"
// This order is Highway's: the choice of targets, then foreach_target, then the rest.
// clang-format off
#include "cpu/targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/highway.h>

#include "cpu/decay-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/local-inl.h"
#include "cpu/stages.h"
#include "cpu/tile-inl.h"
#include "cpu/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

Rows rows_of(const TensorView& view, const Chunk& c, int64_t head, int64_t first = 0) {
  return {&view, c.batch, c.token, head, first};
}

/// The array element of (chunk, head), as a tile.
Tile kept(float* array, int64_t index, int64_t floats, int64_t ld) {
  return {array + index * floats, ld};
}

Gates load_gates(const Plan& plan, const Chunk& c, int64_t head, Tile g) {
  const Gate kind = gate_of(plan.p.op);
  if (kind == Gate::kScalar) load_column(rows_of(plan.in->g, c, head), c.n, g.data);
  if (kind == Gate::kVector) load_rows(rows_of(plan.in->g, c, head), c.n, plan.p.K, g);
  return {kind, c.n, plan.size.Kp, g};
}

/// Erase (columns = K) or write (columns = V, from `first`) strengths as a tile: beta in every column, or b or w.
void load_strength(const Plan& plan, const TensorView& vectors, const Chunk& c, int64_t head, int64_t first,
                   int64_t width, float* beta, Tile out) {
  if (strength_of(plan.p.op) == Strength::kIndependent) {
    load_rows(rows_of(vectors, c, head, first), c.n, width, out);
    return;
  }
  load_column(rows_of(plan.in->beta, c, head), c.n, beta);
  const int64_t columns = round_up(width, kPad);
  for (int64_t i = 0; i < round_up(c.n, kBlock); ++i) fill_row(out.row(i), columns, i < c.n ? beta[i] : 0.0f);
}

/// Keys [n, K] into k, and e = b * k.
void load_keys(const Plan& plan, const Chunk& c, int64_t head, float* beta, Tile k, Tile e) {
  load_rows(rows_of(plan.in->k, c, head / plan.group()), c.n, plan.p.K, k);
  load_strength(plan, plan.in->b, c, head, 0, plan.p.K, beta, e);
  multiply(e, k, round_up(c.n, kBlock), plan.size.Kp, e);
}

/// Queries times the scale [n, K].
void load_queries(const Plan& plan, const Chunk& c, int64_t query_head, Tile q) {
  load_rows(rows_of(plan.in->q, c, query_head), c.n, plan.p.K, q);
  scale_all(q, static_cast<float>(plan.p.query_scale()), c.n, plan.size.Kp);
}

int64_t width_of(const Plan& plan, Slice s) {
  return std::min(s.end, plan.p.V) - s.begin;
}

/// Z = w * V, columns of the slice  [n, V].
void load_written_values(const Plan& plan, const Chunk& c, int64_t head, Slice s, float* beta, Tile w, Tile z) {
  load_rows(rows_of(plan.in->v, c, head, s.begin), c.n, width_of(plan, s), z);
  load_strength(plan, plan.in->w, c, head, s.begin, width_of(plan, s), beta, w);
  multiply(z, w, c.n, s.end - s.begin, z);
}

struct StateAt {
  int64_t base, key_step, value_step;
};

StateAt state_at(const TensorView& view, StateLayout layout, int64_t sequence, int64_t head, int64_t first_value) {
  const bool kv = layout == StateLayout::kKV;
  const int64_t value_step = view.strides[kv ? 3 : 2];
  return {sequence * view.strides[0] + head * view.strides[1] + first_value * value_step, view.strides[kv ? 2 : 3],
          value_step};
}

/// A state's columns of the slice into a tile [K, slice], zeros if the view is not given.
void load_state(const Plan& plan, const TensorView& view, int64_t sequence, int64_t head, Slice s, Tile out) {
  const int64_t columns = s.end - s.begin;
  for (int64_t k = 0; k < plan.size.Kp; ++k) fill_row(out.row(k), columns, 0.0f);
  if (!view.given()) return;
  const StateAt at = state_at(view, plan.p.state_layout, sequence, head, s.begin);
  const auto* base = static_cast<const float*>(view.data) + at.base;
  for (int64_t k = 0; k < plan.p.K; ++k) {
    for (int64_t v = 0; v < width_of(plan, s); ++v) out.at(k, v) = base[k * at.key_step + v * at.value_step];
  }
}

void store_state(const Plan& plan, Tile from, const TensorView& view, int64_t sequence, int64_t head, Slice s) {
  if (!view.given()) return;
  const StateAt at = state_at(view, plan.p.state_layout, sequence, head, s.begin);
  auto* base = static_cast<float*>(view.data) + at.base;
  for (int64_t k = 0; k < plan.p.K; ++k) {
    for (int64_t v = 0; v < width_of(plan, s); ++v) base[k * at.key_step + v * at.value_step] = from.at(k, v);
  }
}

InteractionTiles interaction_tiles(TileTaker& take) {
  InteractionTiles t;
  t.sums = take.keys();
  t.send = take.keys();
  t.operand = take.keys();
  t.operand_t = take.keys_t();
  t.receive = take.block_keys();
  t.past = take.block_keys();
  t.query = take.block_keys();
  t.erase = take.block_keys();
  t.received = take.block_keys();
  t.row_sums = take.tokens();
  return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// prepare: A and Cq of one chunk

struct PrepareTiles {
  Tile q, k, e, g, l, gamma, w, z;
  float* beta;
  InteractionTiles t;
  PrepareTiles(Arena& arena, const Sizes& size) {
    TileTaker take(arena, size);
    q = take.keys(), k = take.keys(), e = take.keys(), g = take.gates(), l = take.matrix(), gamma = take.keys();
    w = take.values(), z = take.values();
    beta = take.tokens();
    t = interaction_tiles(take);
  }
};

void prepare_chunk(const Plan& plan, int64_t chunk, int64_t head, Arena scratch, Work& work) {
  const Sizes& size = plan.size;
  const Chunk& c = plan.chunks[chunk];
  const PrepareTiles t(scratch, size);
  const Tile a = kept(plan.keep.a, plan.at(chunk, head), size.matrix(), size.ldc);
  const Tile cq = plan.make_cq ? kept(plan.keep.cq, plan.cq_at(chunk, head), size.matrix(), size.ldc) : Tile{};
  const Tile l = plan.make_a ? t.l : Tile{};

  if (!plan.make_a && !plan.make_cq && !plan.make_w) return;
  load_keys(plan, c, head, t.beta, t.k, t.e);
  const Gates gates = load_gates(plan, c, head, t.g);
  if (plan.make_a || plan.make_cq) {
    if (plan.make_cq) load_queries(plan, c, head / plan.group(), t.q);
    interaction_matrices(gates, plan.p.variant.intra, t.q, t.e, t.k, plan.p.K, l, cq, t.t, work);
    if (plan.make_a) invert_unit_lower(l, c.n, a);
  }
  if (plan.make_w) {
    const Tile w = kept(plan.keep.w, plan.at(chunk, head), size.keys(), size.ldk);
    decay_from_start(gates, t.gamma);
    multiply(t.gamma, t.e, c.n, size.Kp, t.e);
    gemm(plain(a), Triangle::kLower, t.e, w, {c.n, plan.p.K, c.n}, Store::kSet, {&work.prepare});
    if (plan.keep.u != nullptr) {
      const Tile u = kept(plan.keep.u, plan.at(chunk, head), size.values(), size.ldv);
      load_written_values(plan, c, head, {0, size.Vp}, t.beta, t.w, t.z);
      gemm(plain(a), Triangle::kLower, t.z, u, {c.n, plan.p.V, c.n}, Store::kSet, {&work.prepare});
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// scans: the states through the chunks of one sequence, for some value columns

struct ScanTiles {
  Tile state, q, k, e, g, gamma, to_end, x, r, w, o;
  float* beta;
  ScanTiles(Arena& arena, const Sizes& size) {
    TileTaker take(arena, size);
    state = take.state();
    q = take.keys(), k = take.keys(), e = take.keys(), g = take.gates(), gamma = take.keys(), to_end = take.keys();
    x = take.values(), r = take.values(), w = take.values(), o = take.values();
    beta = take.tokens();
  }
};

/// k, e = gamma * b * k, f = k * decay to the end, and the gates' factors; common to both scans.
void load_scan_keys(const Plan& plan, const Chunk& c, int64_t head, const ScanTiles& t) {
  load_keys(plan, c, head, t.beta, t.k, t.e);
  const Gates gates = load_gates(plan, c, head, t.g);
  decay_from_start(gates, t.gamma);
  decay_to_end(gates, t.to_end);
  multiply(t.gamma, t.e, c.n, plan.size.Kp, t.e);
  multiply(t.to_end, t.k, c.n, plan.size.Kp, t.to_end);
}

void pullback_chunk(const Plan& plan, int64_t chunk, int64_t query_head, Arena scratch, Work& work);

/// Chunk by chunk  R = A (Z - E S),  O = Qg S + Cq R,  S <- diag(lambda) S + F^T R  (docs/math.md, 2).
void scan_forward(const Plan& plan, int64_t sequence, int64_t head, Slice slice, Arena scratch, Work& total) {
  const Problem& p = plan.p;
  const Sizes& size = plan.size;
  const Sequence& seq = plan.sequences[sequence];
  const ScanTiles t(scratch, size);
  const int64_t columns = slice.end - slice.begin;
  const int64_t width = width_of(plan, slice);
  const bool outputs = plan.direction == Direction::kForward;
  Work work;
  const Count scan{&work.scan};

  load_state(plan, plan.in->initial_state, sequence, head, slice, t.state);
  for (int64_t begin = 0, chunk = seq.first_chunk; begin < seq.tokens; begin += kChunk, ++chunk) {
    const Chunk& c = plan.chunks[chunk];
    const int64_t at = plan.at(chunk, head);
    if (plan.fused) prepare_chunk(plan, chunk, head, scratch, work);
    load_scan_keys(plan, c, head, t);
    if (plan.keep.state_t != nullptr) {
      transpose(t.state, size.Kp, columns, kept(plan.keep.state_t, at, size.state_t(), size.ldk).from(slice.begin));
    }
    const Tile r = plan.keep.r != nullptr ? kept(plan.keep.r, at, size.values(), size.ldv).from(0, slice.begin) : t.r;
    if (plan.expanded()) {
      const Tile u = kept(plan.keep.u, at, size.values(), size.ldv).from(0, slice.begin);
      const Tile w = kept(plan.keep.w, at, size.keys(), size.ldk);
      for (int64_t i = 0; i < round_up(c.n, 8); ++i) std::copy_n(u.row(i), columns, r.row(i));
      gemm(plain(w), Triangle::kFull, t.state, r, {c.n, width, p.K}, Store::kSubtract, scan);
    } else {
      const Tile a = kept(plan.keep.a, at, size.matrix(), size.ldc);
      load_written_values(plan, c, head, slice, t.beta, t.w, t.x);
      gemm(plain(t.e), Triangle::kFull, t.state, t.x, {c.n, width, p.K}, Store::kSubtract, scan);
      gemm(plain(a), Triangle::kLower, t.x, r, {c.n, width, c.n}, Store::kSet, scan);
    }
    if (outputs) {
      const Tile cq = kept(plan.keep.cq, plan.cq_at(chunk, head), size.matrix(), size.ldc);
      load_queries(plan, c, head / plan.group(), t.q);
      multiply(t.gamma, t.q, c.n, size.Kp, t.q);
      gemm(plain(t.q), Triangle::kFull, t.state, t.o, {c.n, width, p.K}, Store::kSet, scan);
      gemm(plain(cq), Triangle::kLower, r, t.o, {c.n, width, c.n}, Store::kAdd, scan);
      store_rows(t.o, c.n, width, rows_of(plan.fwd->o, c, head, slice.begin));
    }
    scale_rows(t.state, t.gamma.row(c.n - 1), size.Kp, columns);
    gemm(transposed(t.to_end), Triangle::kFull, r, t.state, {p.K, width, c.n}, Store::kAdd, scan);
  }
  if (outputs) store_state(plan, t.state, plan.fwd->final_state, sequence, head, slice);
  if (slice.begin != 0) work.scan.products = 0;  // counted with the first columns
  total += work;
}

/// From the last chunk back  dR = Cq^T dO + F dS+,  P = A^T dR,  dS = diag(lambda) dS+ + Qg^T dO - E^T P
/// (docs/math.md, 3). /// The expanded graph keeps dR and subtracts W^T dR.
void scan_reverse(const Plan& plan, int64_t sequence, int64_t head, Slice slice, Arena scratch, Work& total) {
  const Problem& p = plan.p;
  const Sizes& size = plan.size;
  const Sequence& seq = plan.sequences[sequence];
  const ScanTiles t(scratch, size);
  const int64_t columns = slice.end - slice.begin;
  const int64_t width = width_of(plan, slice);
  Work work;
  const Count scan{&work.scan};

  load_state(plan, plan.bwd->d_final_state, sequence, head, slice, t.state);
  const int64_t last = seq.first_chunk + (seq.tokens + kChunk - 1) / kChunk - 1;
  for (int64_t chunk = last; chunk >= seq.first_chunk; --chunk) {
    const Chunk& c = plan.chunks[chunk];
    const int64_t at = plan.at(chunk, head);
    if (plan.fused) prepare_chunk(plan, chunk, head, scratch, work);
    const Tile a = kept(plan.keep.a, at, size.matrix(), size.ldc);
    const Tile cq = kept(plan.keep.cq, plan.cq_at(chunk, head), size.matrix(), size.ldc);
    const Tile sensitivity =
        kept(plan.keep.p, plan.adjoint_at(chunk, head), size.values(), size.ldv).from(0, slice.begin);
    const Tile dr = plan.expanded() ? sensitivity : t.r;
    load_scan_keys(plan, c, head, t);
    load_queries(plan, c, head / plan.group(), t.q);
    multiply(t.gamma, t.q, c.n, size.Kp, t.q);
    load_rows(rows_of(plan.bwd->d_o, c, head, slice.begin), c.n, width, t.o);
    transpose(t.state, size.Kp, columns,
              kept(plan.keep.dstate_t, plan.adjoint_at(chunk, head), size.state_t(), size.ldk).from(slice.begin));

    gemm(transposed(cq), Triangle::kUpper, t.o, dr, {c.n, width, c.n}, Store::kSet, scan);
    gemm(plain(t.to_end), Triangle::kFull, t.state, dr, {c.n, width, p.K}, Store::kAdd, scan);
    scale_rows(t.state, t.gamma.row(c.n - 1), size.Kp, columns);
    gemm(transposed(t.q), Triangle::kFull, t.o, t.state, {p.K, width, c.n}, Store::kAdd, scan);
    if (plan.expanded()) {
      const Tile w = kept(plan.keep.w, at, size.keys(), size.ldk);
      gemm(transposed(w), Triangle::kFull, dr, t.state, {p.K, width, c.n}, Store::kSubtract, scan);
    } else {
      shared_sensitivity(a, dr, c.n, width, sensitivity, {&work.local});
      gemm(transposed(t.e), Triangle::kFull, sensitivity, t.state, {p.K, width, c.n}, Store::kSubtract, scan);
    }
    if (plan.fused) pullback_chunk(plan, chunk, head, scratch, work);
  }
  store_state(plan, t.state, plan.bwd->d_initial_state, sequence, head, slice);
  if (slice.begin != 0) work.scan.products = work.local.products = 0;  // counted with the first columns
  total += work;
}

// ---------------------------------------------------------------------------------------------------------------------
// token by token: the recurrence itself, for some value columns of one sequence and head

struct TokenTiles {
  Tile state, q, k, e, g, z, w, o;  // [K, columns], kBlock tokens of the others
  float* beta;
  TokenTiles(Arena& arena, const Sizes& size) {
    TileTaker take(arena, size);
    state = {arena.take<float>(size.Kp * kTokenColumns), kTokenColumns};
    for (Tile* tile : {&q, &k, &e, &g}) *tile = take.block_keys();
    for (Tile* tile : {&z, &w, &o}) *tile = {arena.take<float>(kBlock * kTokenColumns), kTokenColumns};
    beta = take.tokens();
  }
};

/// exp(g) of every token and feature; 1 without a gate.
void load_decays(const Plan& plan, const Chunk& c, int64_t head, Tile out) {
  const FloatTag d;
  const int64_t columns = plan.size.Kp;
  if (gate_of(plan.p.op) == Gate::kVector) load_rows(rows_of(plan.in->g, c, head), c.n, plan.p.K, out);
  float scalar[kBlock] = {};
  if (gate_of(plan.p.op) == Gate::kScalar) load_column(rows_of(plan.in->g, c, head), c.n, scalar);
  for (int64_t i = 0; i < c.n; ++i) {
    if (gate_of(plan.p.op) != Gate::kVector) fill_row(out.row(i), columns, scalar[i]);
    for (int64_t k = 0; k < columns; k += lane_count()) {
      hn::StoreU(exp_of(hn::LoadU(d, out.row(i) + k)), d, out.row(i) + k);
    }
  }
}

/// S- = diag(decay) S,  r = z - S-^T e,  S = S- + k r^T,  o = S^T q, for kColumns columns. A column's sums are chains
/// over the features in order, whatever the slice.
template <int kColumns>
void token_step(int64_t K, const float* decay, const float* e, const float* k, const float* q, const float* z,
                Tile state, float* o) {
  constexpr int kNV = kColumns / kVectorLanes;
  const FloatTag d;
  FloatVec r[kNV], out[kNV];
#pragma GCC unroll 8
  for (int v = 0; v < kNV; ++v) r[v] = hn::LoadU(d, z + v * kVectorLanes);
  for (int64_t i = 0; i < K; ++i) {
    float* row = state.row(i);
    const FloatVec kept_share = hn::Set(d, decay[i]), erase = hn::Set(d, e[i]);
#pragma GCC unroll 8
    for (int v = 0; v < kNV; ++v) {
      const FloatVec s = hn::Mul(kept_share, hn::LoadU(d, row + v * kVectorLanes));
      hn::StoreU(s, d, row + v * kVectorLanes);
      r[v] = hn::NegMulAdd(erase, s, r[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kNV; ++v) out[v] = hn::Zero(d);
  for (int64_t i = 0; i < K; ++i) {
    float* row = state.row(i);
    const FloatVec key = hn::Set(d, k[i]), query = hn::Set(d, q[i]);
#pragma GCC unroll 8
    for (int v = 0; v < kNV; ++v) {
      const FloatVec s = hn::MulAdd(key, r[v], hn::LoadU(d, row + v * kVectorLanes));
      hn::StoreU(s, d, row + v * kVectorLanes);
      out[v] = hn::MulAdd(query, s, out[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kNV; ++v) hn::StoreU(out[v], d, o + v * kVectorLanes);
}

void scan_tokens(const Plan& plan, int64_t sequence, int64_t head, Slice slice, Arena scratch, Work& work) {
  const int64_t K = plan.p.K, columns = slice.end - slice.begin, width = width_of(plan, slice);
  const Sequence& seq = plan.sequences[sequence];
  const TokenTiles t(scratch, plan.size);

  load_state(plan, plan.in->initial_state, sequence, head, slice, t.state);
  for (int64_t begin = 0; begin < seq.tokens; begin += kBlock) {
    const Chunk c{seq.batch, seq.begin + begin, std::min(kBlock, seq.tokens - begin)};
    load_keys(plan, c, head, t.beta, t.k, t.e);
    load_queries(plan, c, head / plan.group(), t.q);
    load_written_values(plan, c, head, slice, t.beta, t.w, t.z);
    load_decays(plan, c, head, t.g);
    for (int64_t i = 0; i < c.n; ++i) {
      const auto step = columns == kTokenColumns ? token_step<kTokenColumns> : token_step<kPad>;
      step(K, t.g.row(i), t.e.row(i), t.k.row(i), t.q.row(i), t.z.row(i), t.state, t.o.row(i));
    }
    store_rows(t.o, c.n, width, rows_of(plan.fwd->o, c, head, slice.begin));
  }
  store_state(plan, t.state, plan.fwd->final_state, sequence, head, slice);

  constexpr int64_t kProducts = 3;  // S^T e, k r^T and S^T q
  if (slice.begin == 0) work.scan.products += kProducts * seq.tokens;
  work.scan.dense += kProducts * 2 * K * width * seq.tokens;
  work.scan.executed += kProducts * 2 * K * width * seq.tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// pullback: all input gradients of one chunk

struct PullbackTiles {
  Tile q, k, dq, dk;                                           // of the query head
  Tile e, b, g, gamma, to_end, v, w, d_o, z;                   // of the value head
  Tile r_t, d, hq;                                             // R^T, D, Hq
  Tile de, dqg, df, query_received, erase_received, key_sent;  // [n, K]
  Tile dgate, end_path, db, dv, dw;                            // gradients before their sums and stores
  ExpandedTiles ex;
  Tile key_sent_to_query;  // study variants only
  float *beta, *diagonal, *state_path, *erase_sums, *gate_sums, *column;
  InteractionTiles it;
  PullbackTiles(Arena& arena, const Problem& problem, const Sizes& size) {
    TileTaker take(arena, size);
    for (Tile* tile : {&q, &k, &dq, &dk, &e, &b, &g, &gamma, &to_end, &de, &dqg, &df, &query_received, &erase_received,
                       &key_sent, &dgate, &end_path, &db}) {
      *tile = take.keys();
    }
    for (Tile* tile : {&v, &w, &d_o, &z, &dv, &dw}) *tile = take.values();
    r_t = take.values_t(), d = take.matrix(), hq = take.matrix();
    beta = take.tokens(), diagonal = take.tokens(), state_path = take.key_row();
    erase_sums = take.tokens(), gate_sums = take.tokens(), column = take.tokens();
    it = interaction_tiles(take);
    if (problem.variant != Variant{}) {
      ex = expanded_tiles(take);
      key_sent_to_query = take.keys();
    }
  }
};

/// The scalar gate's share of L through the matrix K K^T: with J_ij = D_ij ratio_ij <k_i, k_j>, the erase part of
/// dbeta_i is sum_j J_ij and that of dG_i is beta_i sum_j J_ij - sum_j beta_j J_ji (docs/math.md, 4.5).
void gram_sums(const Plan& plan, int64_t n, const PullbackTiles& t, Work& work) {
  const Tile gram = t.ex.product;
  transpose(t.k, round_up(n, kPad), plan.size.Kp, t.it.operand_t);
  gemm(plain(t.k), Triangle::kFull, t.it.operand_t, gram, {n, n, plan.p.K}, Store::kSet, {&work.interact}, true);
  std::fill_n(t.erase_sums, n, 0.0f);
  std::fill_n(t.gate_sums, n, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const float pair = t.d.at(i, j) * gram.at(i, j);
      t.erase_sums[i] += pair;
      t.gate_sums[i] += t.beta[i] * pair;
      t.gate_sums[j] -= t.beta[i] * pair;
    }
  }
}

/// dg_t = sum_{i >= t} dG_i + (decay of S) + sum_{j < t} F_j dF_j, each a sum of its own terms only; see
/// docs/math.md, 4.2.
void store_gate_gradient(const Plan& plan, const Chunk& c, int64_t head, const Gates& gates, const PullbackTiles& t) {
  const FloatTag d;
  const int64_t n = c.n;
  if (gates.kind == Gate::kScalar) {
    float prefix = 0;
    for (int64_t i = 0; i < n; ++i) {
      t.column[i] = prefix;
      prefix += sum_row(t.end_path.row(i), plan.size.Kp);
    }
    float suffix = sum_row(t.state_path, plan.size.Kp);
    for (int64_t i = n - 1; i >= 0; --i) {
      suffix += sum_row(t.dgate.row(i), plan.size.Kp) + t.gate_sums[i];
      t.column[i] = t.g.data[i] < kVanishing ? 0.0f : suffix + t.column[i];
    }
    store_column(t.column, n, rows_of(plan.bwd->dg, c, head));
    return;
  }
  for (int64_t k = 0; k < plan.size.Kp; k += lane_count()) {
    FloatVec prefix = hn::Zero(d);
    for (int64_t i = 0; i < n; ++i) {
      const FloatVec term = hn::LoadU(d, t.end_path.row(i) + k);
      hn::StoreU(prefix, d, t.end_path.row(i) + k);
      prefix = hn::Add(prefix, term);
    }
    FloatVec suffix = hn::LoadU(d, t.state_path + k);
    for (int64_t i = n - 1; i >= 0; --i) {
      suffix = hn::Add(suffix, hn::LoadU(d, t.dgate.row(i) + k));
      const FloatVec sum = hn::Add(suffix, hn::LoadU(d, t.end_path.row(i) + k));
      const auto vanished = hn::Lt(hn::LoadU(d, t.g.row(i) + k), hn::Set(d, kVanishing));
      hn::StoreU(hn::IfThenZeroElse(vanished, sum), d, t.dgate.row(i) + k);
    }
  }
  store_rows(t.dgate, n, plan.p.K, rows_of(plan.bwd->dg, c, head));
}

/// Chain rule of the factors, feature by feature: from the adjoints of Qg, E, F and the interactions to dq, dk, db and
/// the terms of dG. Pairs of a token with itself pass no gate and stay out of dG.
void combine_features(const Plan& plan, int64_t n, bool gram_off, const PullbackTiles& t) {
  const FloatTag d;
  for (int64_t i = 0; i < n; ++i) {
    const FloatVec self = hn::Set(d, t.diagonal[i]);
    for (int64_t c = 0; c < plan.size.Kp; c += lane_count()) {
      const auto load = [&](Tile tile) HWY_ATTR { return hn::LoadU(d, tile.row(i) + c); };
      const auto store = [&](FloatVec x, Tile tile) HWY_ATTR { hn::StoreU(x, d, tile.row(i) + c); };
      const FloatVec q = load(t.q), k = load(t.k), b = load(t.b), e = load(t.e), gamma = load(t.gamma);
      const FloatVec received = load(t.query_received), sent = load(t.key_sent);
      const FloatVec state_query = hn::Mul(gamma, load(t.dqg));          // gamma * dO S^T
      const FloatVec state_erase = hn::Neg(hn::Mul(gamma, load(t.de)));  // -gamma * P S^T
      const FloatVec intra_erase = load(t.erase_received);
      const FloatVec erase = hn::Add(state_erase, intra_erase);
      const FloatVec to_end = hn::Mul(load(t.to_end), load(t.df));
      const FloatVec dq = hn::MulAdd(self, k, hn::Add(state_query, received));
      const FloatVec dk = hn::MulAdd(self, q, hn::MulAdd(b, erase, hn::Add(to_end, sent)));
      store(hn::Add(load(t.dq), dq), t.dq);
      store(hn::Add(load(t.dk), dk), t.dk);
      store(hn::Mul(k, gram_off ? state_erase : erase), t.db);
      store(hn::Mul(k, to_end), t.end_path);
      const FloatVec sent_in_gate = gram_off ? load(t.key_sent_to_query) : sent;
      const FloatVec erase_in_gate = gram_off ? state_erase : erase;
      store(hn::MulAdd(q, hn::Add(state_query, received), hn::NegMulAdd(k, sent_in_gate, hn::Mul(e, erase_in_gate))),
            t.dgate);
    }
  }
}

void pullback_chunk(const Plan& plan, int64_t chunk, int64_t query_head, Arena scratch, Work& work) {
  const Problem& p = plan.p;
  const Sizes& size = plan.size;
  const BackwardArgs& out = *plan.bwd;
  const Chunk& c = plan.chunks[chunk];
  const int64_t n = c.n;
  const PullbackTiles t(scratch, p, size);
  const FloatTag d;
  const bool gram_off = p.variant.gram == Gram::kOff && gate_of(p.op) != Gate::kVector;
  const Count interact{&work.interact};

  load_queries(plan, c, query_head, t.q);
  for (int64_t i = 0; i < n; ++i) {
    fill_row(t.dq.row(i), size.Kp, 0.0f);
    fill_row(t.dk.row(i), size.Kp, 0.0f);
  }
  for (int64_t head = query_head * plan.group(); head < (query_head + 1) * plan.group(); ++head) {
    const int64_t at = plan.at(chunk, head);
    const Tile state_t = kept(plan.keep.state_t, at, size.state_t(), size.ldk);
    const Tile dstate_t = kept(plan.keep.dstate_t, plan.adjoint_at(chunk, head), size.state_t(), size.ldk);
    const Tile r = kept(plan.keep.r, at, size.values(), size.ldv);
    const Tile sensitivity = kept(plan.keep.p, plan.adjoint_at(chunk, head), size.values(), size.ldv);
    load_keys(plan, c, head, t.beta, t.k, t.e);
    load_strength(plan, plan.in->b, c, head, 0, p.K, t.beta, t.b);
    load_strength(plan, plan.in->w, c, head, 0, p.V, t.beta, t.w);
    load_rows(rows_of(plan.in->v, c, head), n, p.V, t.v);
    load_rows(rows_of(out.d_o, c, head), n, p.V, t.d_o);
    const Gates gates = load_gates(plan, c, head, t.g);
    decay_from_start(gates, t.gamma);
    decay_to_end(gates, t.to_end);
    transpose(r, round_up(n, 4), size.Vp, t.r_t);

    Tile pull = sensitivity;  // P
    if (plan.expanded()) {
      multiply(t.v, t.w, round_up(n, kBlock), size.Vp, t.z);
      multiply(t.gamma, t.e, round_up(n, kBlock), size.Kp, t.key_sent);
      const Tile a = kept(plan.keep.a, at, size.matrix(), size.ldc);
      pull_back_expanded({n, p.K, p.V}, a, sensitivity, state_t, t.key_sent, t.z, t.ex, t.d, t.de, {&work.local});
      pull = t.ex.p;
    } else {
      pull_back_rewy({n, p.K, p.V}, sensitivity, t.r_t, state_t, t.d, t.de, {&work.local});
    }
    scale_all(t.d, -1.0f, n, round_up(n, kPad));
    mask_lower(t.d, n, true);
    gemm(plain(t.d_o), Triangle::kFull, t.r_t, t.hq, {n, n, p.V}, Store::kSet, interact, true);
    for (int64_t i = 0; i < n; ++i) t.diagonal[i] = t.hq.at(i, i);
    mask_lower(t.hq, n, true);
    gemm(plain(t.d_o), Triangle::kFull, state_t, t.dqg, {n, p.K, p.V}, Store::kSet, interact);
    gemm(plain(r), Triangle::kFull, dstate_t, t.df, {n, p.K, p.V}, Store::kSet, interact);
    interaction_gradients(gates, p.variant.intra, t.hq, t.d, t.q, t.e, t.k, p.K, t.query_received, t.erase_received,
                          t.key_sent, gram_off ? t.key_sent_to_query : Tile{}, t.it, work);
    std::fill_n(t.gate_sums, n, 0.0f);
    std::fill_n(t.erase_sums, n, 0.0f);
    if (gram_off) gram_sums(plan, n, t, work);
    combine_features(plan, n, gram_off, t);

    if (out.dg.given()) {
      // What the gates do to the incoming state: lambda * rowsum(S * dS+), the same for every token of the chunk.
      const float* lambda = t.gamma.row(n - 1);
      for (int64_t k = 0; k < size.Kp; k += lane_count()) {
        FloatVec sum = hn::Zero(d);
        for (int64_t v = 0; v < p.V; ++v) {
          sum = hn::MulAdd(hn::LoadU(d, state_t.row(v) + k), hn::LoadU(d, dstate_t.row(v) + k), sum);
        }
        hn::StoreU(hn::Mul(hn::LoadU(d, lambda + k), sum), d, t.state_path + k);
      }
      store_gate_gradient(plan, c, head, gates, t);
    }
    if (out.dv.given()) {
      multiply(t.w, pull, n, size.Vp, t.dv);
      store_rows(t.dv, n, p.V, rows_of(out.dv, c, head));
    }
    if (out.db.given()) store_rows(t.db, n, p.K, rows_of(out.db, c, head));
    if (out.dw.given() || out.dbeta.given()) multiply(t.v, pull, n, size.Vp, t.dw);
    if (out.dw.given()) store_rows(t.dw, n, p.V, rows_of(out.dw, c, head));
    if (out.dbeta.given()) {
      for (int64_t i = 0; i < n; ++i) {
        t.column[i] = sum_row(t.db.row(i), size.Kp) + t.erase_sums[i] + sum_row(t.dw.row(i), size.Vp);
      }
      store_column(t.column, n, rows_of(out.dbeta, c, head));
    }
  }
  if (out.dq.given()) {
    scale_all(t.dq, static_cast<float>(p.query_scale()), n, size.Kp);
    store_rows(t.dq, n, p.K, rows_of(out.dq, c, query_head));
  }
  if (out.dk.given()) store_rows(t.dk, n, p.K, rows_of(out.dk, c, query_head));
}

const char* target_name() {
  return hwy::TargetName(HWY_TARGET);
}

int64_t scratch_of(const Problem& p, Direction direction, Schedule schedule) {
  const Sizes size(p);
  if (schedule == Schedule::kTokens) {
    Arena tokens;
    TokenTiles(tokens, size);
    return static_cast<int64_t>(tokens.used());
  }
  // The scans run the other stages in what they leave of the scratch.
  Arena scan, prepare, pullback;
  ScanTiles(scan, size);
  PrepareTiles(prepare, size);
  if (direction == Direction::kBackward) PullbackTiles(pullback, p, size);
  return static_cast<int64_t>(scan.used() + std::max(prepare.used(), pullback.used()));
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rewy::cpu {

HWY_EXPORT(prepare_chunk);
HWY_EXPORT(scan_forward);
HWY_EXPORT(scan_reverse);
HWY_EXPORT(pullback_chunk);
HWY_EXPORT(scan_tokens);
HWY_EXPORT(target_name);
HWY_EXPORT(scratch_of);

Stages stages_for_this_cpu() {
  // The first dynamic dispatch asks the processor; the pointers must be taken after it.
  (void)HWY_DYNAMIC_DISPATCH(target_name)();
  return {HWY_DYNAMIC_DISPATCH(prepare_chunk), HWY_DYNAMIC_DISPATCH(scan_forward), HWY_DYNAMIC_DISPATCH(scan_reverse),
          HWY_DYNAMIC_DISPATCH(pullback_chunk), HWY_DYNAMIC_DISPATCH(scan_tokens)};
}

std::size_t scratch_bytes(const Problem& p, Direction direction, Schedule schedule) {
  return static_cast<std::size_t>(HWY_DYNAMIC_DISPATCH(scratch_of)(p, direction, schedule));
}

const char* instruction_set() {
  return HWY_DYNAMIC_DISPATCH(target_name)();
}

std::string usable_instruction_sets() {
  std::string names;
  const auto usable = static_cast<uint64_t>(HWY_TARGETS) & static_cast<uint64_t>(hwy::SupportedTargets());
  for (uint64_t rest = usable; rest != 0; rest &= rest - 1) {
    if (!names.empty()) names += ' ';
    names += hwy::TargetName(static_cast<int64_t>(rest & ~(rest - 1)));
  }
  return names;
}

}  // namespace rewy::cpu
#endif  // HWY_ONCE
