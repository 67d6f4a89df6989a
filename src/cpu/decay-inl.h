// Decays of one chunk and the interactions between its tokens that pass through them (docs/math.md, section 4).
// Compiled once per instruction set.
//
// Every exponent is a sum of gates over the tokens between two positions, never a difference of two cumulative sums:
// sums of non-positive terms do not cancel, -inf never meets -inf, and nothing depends on a later row.

#if defined(REWY_CPU_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REWY_CPU_DECAY_INL_H_
#undef REWY_CPU_DECAY_INL_H_
#else
#define REWY_CPU_DECAY_INL_H_
#endif

#include <limits>

#include "cpu/gemm-inl.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 80 in log2 units: within it both factors of a split gate ratio, and their products with inputs, are normal numbers.
constexpr float kAnchorLimit = 55.45f;
/// exp of anything below is less than FP32's smallest normal number, and 0 here; so is a gate gradient, which carries
/// that factor.
constexpr float kVanishing = -87.34f;

/// The gates of one chunk and value head. A scalar gate is one column, broadcast where a tile is asked for.
struct Gates {
  Gate kind;
  int64_t n;        ///< tokens
  int64_t columns;  ///< key features, padded
  Tile g;           ///< [n, K] vector, [n] contiguous in row 0 scalar, unused for none
};

/// Rows from n on, up to a whole sub-block, are zero in every tile that a product may read.
inline void zero_tail(Tile tile, const Gates& gates) {
  for (int64_t i = gates.n; i < round_up(gates.n, kBlock); ++i) fill_row(tile.row(i), gates.columns, 0.0f);
}

/// out[i] = exp(sum of g over tokens 0..i)  [n, K], gamma in the docs.
inline void decay_from_start(const Gates& gates, Tile out) {
  const FloatTag d;
  zero_tail(out, gates);
  if (gates.kind != Gate::kVector) {
    float sum = 0;
    for (int64_t i = 0; i < gates.n; ++i) {
      if (gates.kind == Gate::kScalar) sum += gates.g.data[i];
      fill_row(out.row(i), gates.columns, gates.kind == Gate::kNone ? 1.0f : exp_of(sum));
    }
    return;
  }
  for (int64_t k = 0; k < gates.columns; k += lane_count()) {
    FloatVec sum = hn::Zero(d);
    for (int64_t i = 0; i < gates.n; ++i) {
      sum = hn::Add(sum, hn::LoadU(d, gates.g.row(i) + k));
      hn::StoreU(exp_of(sum), d, out.row(i) + k);
    }
  }
}

/// out[j] = exp(sum of g over tokens j+1..n-1)  [n, K]: what remains of token j's write at the end of the chunk.
inline void decay_to_end(const Gates& gates, Tile out) {
  const FloatTag d;
  zero_tail(out, gates);
  if (gates.kind != Gate::kVector) {
    float sum = 0;
    for (int64_t j = gates.n - 1; j >= 0; --j) {
      fill_row(out.row(j), gates.columns, gates.kind == Gate::kNone ? 1.0f : exp_of(sum));
      if (gates.kind == Gate::kScalar) sum += gates.g.data[j];
    }
    return;
  }
  for (int64_t k = 0; k < gates.columns; k += lane_count()) {
    FloatVec sum = hn::Zero(d);
    for (int64_t j = gates.n - 1; j >= 0; --j) {
      hn::StoreU(exp_of(sum), d, out.row(j) + k);
      sum = hn::Add(sum, hn::LoadU(d, gates.g.row(j) + k));
    }
  }
}

/// Scalar gates: matrix[i][j] *= exp(sum of g over j+1..i) for j <= i  [n, n].
inline void apply_scalar_ratio(const Gates& gates, float* sums, std::initializer_list<Tile> matrices) {
  if (gates.kind == Gate::kNone) return;
  const FloatTag d;
  const int64_t columns = round_up(gates.n, kPad);
  std::fill_n(sums, columns, 0.0f);
  for (int64_t i = 0; i < gates.n; ++i) {
    // sums[j] = sum over j+1..i; columns from i on hold 0 until their token has come.
    const FloatVec gi = hn::Set(d, gates.g.data[i]);
    for (int64_t j = 0; j < i; j += lane_count()) hn::StoreU(hn::Add(hn::LoadU(d, sums + j), gi), d, sums + j);
    std::fill_n(sums + i, columns - i, 0.0f);
    for (int64_t j = 0; j <= i; j += lane_count()) {
      const FloatVec ratio = exp_of(hn::LoadU(d, sums + j));
      for (const Tile& m : matrices) hn::StoreU(hn::Mul(hn::LoadU(d, m.row(i) + j), ratio), d, m.row(i) + j);
    }
  }
}

/// Vector gates: the split exp(G_i - G_j) = receive_i * send_j about the first row of each 16-token block.
/// Tiles are the caller's scratch; begin_block() leaves in them what one block of receiving rows needs.
class AnchoredSplit {
 public:
  AnchoredSplit(const Gates& gates, Intra intra, Tile sums, Tile send, Tile receive, Tile past)
      : gates_(gates),
        every_row_(intra == Intra::kPairwise),
        sums_(sums),
        send_(send),
        receive_(receive),
        past_(past) {}

  Tile send() const { return send_; }        ///< [16 (block + 1), K] factor of sending row j
  Tile receive() const { return receive_; }  ///< [16, K] factor of receiving row i of the block, 0 where past the limit

  /// Blocks must be taken in order 0, 1, ...
  void begin_block(int64_t block) {
    const FloatTag d;
    const int64_t first = block * kBlock;
    const int64_t end = std::min(first + kBlock, gates_.n);
    const FloatVec limit = hn::Set(d, kAnchorLimit);
    const FloatVec below = hn::Set(d, -kAnchorLimit);
    const FloatVec one = hn::Set(d, 1.0f);
    const FloatVec zero = hn::Zero(d);
    any_past_ = false;
    for (int64_t k = 0; k < gates_.columns; k += lane_count()) {
      const auto g = [&](int64_t t) HWY_ATTR { return hn::LoadU(d, gates_.g.row(t) + k); };
      // Senders of the block before: sums from the sender to this block's first row, added from the near end.
      if (block > 0) {
        FloatVec sum = g(first);
        for (int64_t j = first - 1; j >= first - kBlock; --j) {
          hn::StoreU(sum, d, sums_.row(j) + k);
          hn::StoreU(exp_of(sum), d, send_.row(j) + k);
          sum = hn::Add(sum, g(j));
        }
        // Senders further back: `sum` has gained g(first - 16), the step from their last anchor's row on is missing it.
        FloatVec step = g(first);
        for (int64_t t = first - 1; t > first - kBlock; --t) step = hn::Add(step, g(t));
        for (int64_t j = 0; j < first - kBlock; ++j) {
          const FloatVec total = hn::Add(hn::LoadU(d, sums_.row(j) + k), step);
          hn::StoreU(total, d, sums_.row(j) + k);
          hn::StoreU(exp_of(total), d, send_.row(j) + k);
        }
      }
      // The block itself: sums from its first row.
      FloatVec prefix = zero;
      auto past = hn::Lt(one, zero);
      for (int64_t i = first; i < first + kBlock; ++i) {
        if (i > first && i < end) prefix = hn::Add(prefix, g(i));
        const auto inside = hn::And(hn::Ge(prefix, below), hn::Le(prefix, limit));
        past = hn::Or(past, hn::Not(inside));
        if (every_row_) past = hn::Eq(one, one);
        // Masked first: nothing past the limit is ever exponentiated.
        const FloatVec kept = hn::IfThenZeroElse(past, prefix);
        hn::StoreU(hn::IfThenZeroElse(past, exp_of(kept)), d, receive_.row(i - first) + k);
        hn::StoreU(hn::IfThenZeroElse(past, exp_of(hn::Neg(kept))), d, send_.row(i) + k);
        hn::StoreU(hn::IfThenElseZero(past, one), d, past_.row(i - first) + k);
        if (i < end && !hn::AllFalse(d, past)) any_past_ = true;
      }
    }
  }

  /// Calls use(i, j, k, ratio) for the pairs j < i of this block's rows that are past the limit, lane group by lane
  /// group, ratio being exp(sum of g over j+1..i) in those lanes and 0 in the others. Returns the exponentials taken.
  template <class Use>
  int64_t for_each_pair(int64_t block, Use&& use) const {
    if (!any_past_) return 0;
    const FloatTag d;
    // Next to 1, a ratio under 2^-80 is nothing in FP32; the study variant takes all that do not vanish.
    const FloatVec threshold = hn::Set(d, every_row_ ? kVanishing : -kAnchorLimit);
    const int64_t first = block * kBlock;
    const int64_t end = std::min(first + kBlock, gates_.n);
    int64_t taken = 0;
    for (int64_t i = first; i < end; ++i) {
      for (int64_t k = 0; k < gates_.columns; k += lane_count()) {
        const auto past = hn::Gt(hn::LoadU(d, past_.row(i - first) + k), hn::Zero(d));
        if (hn::AllFalse(d, past)) continue;
        FloatVec sum = hn::Zero(d);
        for (int64_t j = i - 1; j >= 0; --j) {
          sum = hn::Add(sum, hn::LoadU(d, gates_.g.row(j + 1) + k));
          const auto live = hn::And(past, hn::Not(hn::Le(sum, threshold)));
          if (hn::AllFalse(d, live)) continue;
          use(i, j, k, hn::IfThenElseZero(live, exp_of(sum)));
          taken += lane_count();
        }
      }
    }
    return taken;
  }

 private:
  const Gates& gates_;
  bool every_row_;
  bool any_past_ = false;
  Tile sums_, send_, receive_, past_;
};

/// Scratch of the interactions.
struct InteractionTiles {
  Tile sums, send, operand, operand_t;         // [C, K], [C, K], [C, K], [K, C]
  Tile receive, past, query, erase, received;  // [16, K] each
  float* row_sums;                             // [C]
};

/// Inner products through the gates: L_ij = <e_i, k_j ratio_ij> for j < i and Cq_ij = <q_i, k_j ratio_ij> for j <= i,
/// zero elsewhere. e = b * k. Either result may be absent (data null).
inline void interaction_matrices(const Gates& gates, Intra intra, Tile q, Tile e, Tile k_rows, int64_t width, Tile l,
                                 Tile cq, const InteractionTiles& t, Work& work) {
  const int64_t n = gates.n;
  if (gates.kind != Gate::kVector) {
    transpose(k_rows, round_up(n, kPad), gates.columns, t.operand_t);
    const auto form = [&](Tile left, Tile out) HWY_ATTR {
      if (out.data == nullptr) return;
      gemm(plain(left), Triangle::kFull, t.operand_t, out, {n, n, width}, Store::kSet, {&work.prepare}, true);
      apply_scalar_ratio(gates, t.row_sums, {out});
    };
    form(e, l);
    form(q, cq);
  } else {
    const FloatTag d;
    AnchoredSplit split(gates, intra, t.sums, t.send, t.receive, t.past);
    for (int64_t block = 0; block * kBlock < n; ++block) {
      const int64_t first = block * kBlock;
      const int64_t senders = first + kBlock;
      split.begin_block(block);
      multiply(k_rows, split.send(), senders, gates.columns, t.operand);
      transpose(t.operand, senders, gates.columns, t.operand_t);
      const auto form = [&](Tile left, Tile scaled, Tile out) HWY_ATTR {
        if (out.data == nullptr) return;
        multiply(left.from(first), split.receive(), kBlock, gates.columns, scaled);
        gemm(plain(scaled), Triangle::kFull, t.operand_t, out.from(first), {kBlock, senders, width}, Store::kSet,
             {&work.prepare, block == 0});
      };
      form(e, t.erase, l);
      form(q, t.query, cq);
      work.pairwise += split.for_each_pair(block, [&](int64_t i, int64_t j, int64_t k, FloatVec ratio) HWY_ATTR {
        const FloatVec kj = hn::Mul(hn::LoadU(d, k_rows.row(j) + k), ratio);
        const auto add = [&](Tile left, Tile out) HWY_ATTR {
          if (out.data == nullptr) return;
          out.at(i, j) += hn::GetLane(hn::SumOfLanes(d, hn::Mul(hn::LoadU(d, left.row(i) + k), kj)));
        };
        add(e, l);
        add(q, cq);
      });
      if (cq.data != nullptr) {
        // The diagonal passes no gate: restored where a row past the limit has lost it.
        for (int64_t i = first; i < std::min(senders, n); ++i) {
          cq.at(i, i) = dot_row(q.row(i), k_rows.row(i), gates.columns);
        }
      }
    }
  }
  if (l.data != nullptr) mask_lower(l, n, true);
  if (cq.data != nullptr) mask_lower(cq, n, false);
}

/// The adjoint of interaction_matrices, pairs j < i only. With ratio_ij the gate ratio [K]:
///   query_received_i = sum_j Hq_ij k_j ratio_ij     erase_received_i = sum_j D_ij k_j ratio_ij
///   key_sent_j       = sum_i (Hq_ij q_i + D_ij e_i) ratio_ij
/// Hq and D are strictly lower. Scalar gates: Hq and D are overwritten with their products with the ratio, and
/// `key_sent_to_query`, if its data is not null, receives the Hq part of key_sent alone.
inline void interaction_gradients(const Gates& gates, Intra intra, Tile hq, Tile dmat, Tile q, Tile e, Tile k_rows,
                                  int64_t width, Tile query_received, Tile erase_received, Tile key_sent,
                                  Tile key_sent_to_query, const InteractionTiles& t, Work& work) {
  const int64_t n = gates.n;
  if (gates.kind != Gate::kVector) {
    apply_scalar_ratio(gates, t.row_sums, {hq, dmat});
    const GemmShape shape{n, width, n};
    gemm(plain(hq), Triangle::kLower, k_rows, query_received, shape, Store::kSet, {&work.interact});
    gemm(plain(dmat), Triangle::kLower, k_rows, erase_received, shape, Store::kSet, {&work.interact});
    gemm(transposed(hq), Triangle::kUpper, q, key_sent, shape, Store::kSet, {&work.interact});
    if (key_sent_to_query.data != nullptr) {
      for (int64_t j = 0; j < n; ++j) std::copy_n(key_sent.row(j), gates.columns, key_sent_to_query.row(j));
    }
    gemm(transposed(dmat), Triangle::kUpper, e, key_sent, shape, Store::kAdd, {&work.interact});
    return;
  }
  const FloatTag d;
  AnchoredSplit split(gates, intra, t.sums, t.send, t.receive, t.past);
  for (int64_t i = 0; i < round_up(n, kBlock); ++i) fill_row(key_sent.row(i), gates.columns, 0.0f);
  for (int64_t block = 0; block * kBlock < n; ++block) {
    const int64_t first = block * kBlock;
    const int64_t senders = first + kBlock;
    const bool count = block == 0;
    split.begin_block(block);
    multiply(k_rows, split.send(), senders, gates.columns, t.operand);
    // Earlier blocks whole, the block itself as a triangle: what a row does not depend on is never read, be it NaN.
    const auto receive = [&](Tile matrix, Tile out) HWY_ATTR {
      gemm(plain(matrix.from(first)), Triangle::kFull, t.operand, t.received, {kBlock, width, first}, Store::kSet,
           {&work.interact, count});
      gemm(plain(matrix.from(first, first)), Triangle::kLower, t.operand.from(first), t.received,
           {kBlock, width, kBlock}, Store::kAdd, {&work.interact, false});
      multiply(t.received, split.receive(), kBlock, gates.columns, out.from(first));
    };
    receive(hq, query_received);
    receive(dmat, erase_received);
    multiply(q.from(first), split.receive(), kBlock, gates.columns, t.query);
    multiply(e.from(first), split.receive(), kBlock, gates.columns, t.erase);
    const auto send = [&](Tile matrix, Tile scaled, Store store) HWY_ATTR {
      gemm(transposed(matrix.from(first)), Triangle::kFull, scaled, t.operand, {first, width, kBlock}, store,
           {&work.interact, count});
      gemm(transposed(matrix.from(first, first)), Triangle::kUpper, scaled, t.operand.from(first),
           {kBlock, width, kBlock}, store, {&work.interact, false});
    };
    send(hq, t.query, Store::kSet);
    send(dmat, t.erase, Store::kAdd);
    for (int64_t j = 0; j < senders; ++j) {
      for (int64_t k = 0; k < gates.columns; k += lane_count()) {
        const FloatVec sum = hn::MulAdd(hn::LoadU(d, t.operand.row(j) + k), hn::LoadU(d, split.send().row(j) + k),
                                        hn::LoadU(d, key_sent.row(j) + k));
        hn::StoreU(sum, d, key_sent.row(j) + k);
      }
    }
    work.pairwise += split.for_each_pair(block, [&](int64_t i, int64_t j, int64_t k, FloatVec ratio) HWY_ATTR {
      const FloatVec h = hn::Mul(hn::Set(d, hq.at(i, j)), ratio);
      const FloatVec dl = hn::Mul(hn::Set(d, dmat.at(i, j)), ratio);
      const FloatVec kj = hn::LoadU(d, k_rows.row(j) + k);
      const auto add = [&](Tile out, int64_t row, FloatVec a, FloatVec b) HWY_ATTR {
        hn::StoreU(hn::MulAdd(a, b, hn::LoadU(d, out.row(row) + k)), d, out.row(row) + k);
      };
      add(query_received, i, h, kj);
      add(erase_received, i, dl, kj);
      add(key_sent, j, h, hn::LoadU(d, q.row(i) + k));
      add(key_sent, j, dl, hn::LoadU(d, e.row(i) + k));
    });
  }
}

/// A = (I + L)^-1 by forward substitution in FP32, L strictly lower  [n, n].
inline void invert_unit_lower(Tile l, int64_t n, Tile a) {
  const FloatTag d;
  const int64_t end = round_up(n, kPad);
  for (int64_t i = 0; i < end; ++i) {
    std::fill_n(a.row(i), end, 0.0f);
    if (i >= n) continue;
    for (int64_t c = 0; c < i; c += lane_count()) {
      FloatVec sum = hn::Zero(d);
      for (int64_t j = c; j < i; ++j) {
        sum = hn::NegMulAdd(hn::Set(d, l.at(i, j)), hn::LoadU(d, a.row(j) + c), sum);
      }
      hn::StoreU(sum, d, a.row(i) + c);
    }
    std::fill(a.row(i) + i + 1, a.row(i) + end, 0.0f);
    a.at(i, i) = 1.0f;
  }
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REWY_CPU_DECAY_INL_H_
