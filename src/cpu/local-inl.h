// The local pullback of one chunk's correction R = A (Z - E S): from dR to P = dZ, D = dL and dE, by the ReWY graph and
// by the expanded one (docs/math.md, 3 and 6). Compiled once per instruction set.

#if defined(REWY_CPU_LOCAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REWY_CPU_LOCAL_INL_H_
#undef REWY_CPU_LOCAL_INL_H_
#else
#define REWY_CPU_LOCAL_INL_H_
#endif

#include "cpu/gemm-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace rewy::cpu::HWY_NAMESPACE {

struct LocalShape {
  int64_t n, K, V;
};

/// P = A^T dR  [n, V]: the one sensitivity that dZ, dE, D and dS share. The reverse scan needs it too, and forms it.
inline void shared_sensitivity(Tile a, Tile dr, int64_t n, int64_t width, Tile p, Count local) {
  gemm(transposed(a), Triangle::kUpper, dr, p, {n, width, n}, Store::kSet, local);
}

/// The rest of the ReWY graph: -D = P R^T, unmasked, and -dE = P S^T. The caller masks and negates.
inline void pull_back_rewy(LocalShape s, Tile p, Tile r_t, Tile state_t, Tile minus_d, Tile minus_de, Count local) {
  gemm(plain(p), Triangle::kFull, r_t, minus_d, {s.n, s.n, s.V}, Store::kSet, local, true);
  gemm(plain(p), Triangle::kFull, state_t, minus_de, {s.n, s.K, s.V}, Store::kSet, local);
}

/// Scratch of the expanded graph.
struct ExpandedTiles {
  Tile dw, z_t, e_t, a_t, da, product, p;  // [n, K], [V, n], [K, n], [n, n] three times, [n, V]
};

inline ExpandedTiles expanded_tiles(TileTaker& take) {
  ExpandedTiles t;
  t.dw = take.keys(), t.z_t = take.values_t(), t.e_t = take.keys_t(), t.a_t = take.matrix();
  t.da = take.matrix(), t.product = take.matrix(), t.p = take.values();
  return t;
}

/// The seven products of the expanded graph: dW = -dR S^T, dA = dR Z^T + dW E^T, D = -tril(A^T dA A^T, -1), P = A^T dR,
/// dE = A^T dW. Results as in pull_back_rewy, and P in t.p; t.dw holds -dW.
inline void pull_back_expanded(LocalShape s, Tile a, Tile dr, Tile state_t, Tile e, Tile z, const ExpandedTiles& t,
                               Tile minus_d, Tile minus_de, Count local) {
  const int64_t rows = round_up(s.n, kPad);
  transpose(z, rows, round_up(s.V, kPad), t.z_t);
  transpose(e, rows, round_up(s.K, kPad), t.e_t);
  transpose(a, rows, rows, t.a_t);
  gemm(plain(dr), Triangle::kFull, state_t, t.dw, {s.n, s.K, s.V}, Store::kSet, local);
  gemm(plain(dr), Triangle::kFull, t.z_t, t.da, {s.n, s.n, s.V}, Store::kSet, local, true);
  gemm(plain(t.dw), Triangle::kFull, t.e_t, t.da, {s.n, s.n, s.K}, Store::kSubtract, local, true);
  mask_lower(t.da, s.n, false);
  gemm(transposed(a), Triangle::kUpper, t.da, t.product, {s.n, s.n, s.n}, Store::kSet, local);
  gemm(plain(t.product), Triangle::kFull, t.a_t, minus_d, {s.n, s.n, s.n}, Store::kSet, local, true);
  shared_sensitivity(a, dr, s.n, s.V, t.p, local);
  gemm(transposed(a), Triangle::kUpper, t.dw, minus_de, {s.n, s.K, s.n}, Store::kSet, local);
}

}  // namespace rewy::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REWY_CPU_LOCAL_INL_H_
