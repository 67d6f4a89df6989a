#include "rounded.h"

#include <algorithm>
#include <cmath>

namespace rewy::tool {
namespace {

/// Row-major.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> x;

  Matrix() = default;
  Matrix(std::int64_t r, std::int64_t c) : rows(r), columns(c), x(static_cast<std::size_t>(r * c)) {}
  double& operator()(std::int64_t i, std::int64_t j) { return x[static_cast<std::size_t>(i * columns + j)]; }
  double operator()(std::int64_t i, std::int64_t j) const { return x[static_cast<std::size_t>(i * columns + j)]; }
};

/// Every element from its indices.
template <class Fn>
Matrix make(std::int64_t rows, std::int64_t columns, Fn&& fn) {
  Matrix m(rows, columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) m(i, j) = fn(i, j);
  }
  return m;
}

Matrix transposed(const Matrix& a) {
  return make(a.columns, a.rows, [&](auto i, auto j) { return a(j, i); });
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t m = 0; m < a.columns; ++m) {
      for (std::int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, m) * b(m, j);
    }
  }
  return c;
}

Matrix operator+(const Matrix& a, const Matrix& b) {
  return make(a.rows, a.columns, [&](auto i, auto j) { return a(i, j) + b(i, j); });
}
Matrix operator-(const Matrix& a, const Matrix& b) {
  return make(a.rows, a.columns, [&](auto i, auto j) { return a(i, j) - b(i, j); });
}

/// An input in FP64; a scalar of a token stands for all its features.
struct Input {
  std::vector<double> x;
  std::int64_t tokens = 0, heads = 0, width = 0;

  explicit Input(const TensorView& view) : x(values(view)) {
    if (!view.given()) return;
    tokens = view.shape[1], heads = view.shape[2], width = view.rank == 4 ? view.shape[3] : 1;
  }
  double at(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t column) const {
    const std::int64_t row = (batch * tokens + token) * heads + head;
    return x[static_cast<std::size_t>(row * width + (width == 1 ? 0 : column))];
  }
};

/// One chunk of one value head.
struct Chunk {
  std::int64_t first = 0, n = 0;
  Matrix q, k, v, b, w, d_o;                    // q with the scale
  Matrix decay, gamma, f;                       // [n, K]
  std::vector<Matrix> rho;                      // for each i: [i + 1, K]
  Matrix a, cq, erase, query, write, state, r;  // as products read them
};

class Rounded {
 public:
  explicit Rounded(const Call& call)
      : call_(call),
        p_(call.problem),
        q_(call.in.q),
        k_(call.in.k),
        v_(call.in.v),
        g_(call.in.g),
        b_(strength_of(p_.op) == Strength::kShared ? call.in.beta : call.in.b),
        w_(strength_of(p_.op) == Strength::kShared ? call.in.beta : call.in.w),
        d_o_(call.d_o),
        initial_(values(call.in.initial_state)),
        d_final_(values(call.d_final_state)) {}

  Run run() {
    const bool kv = p_.state_layout == StateLayout::kKV;
    const auto output = [&](const char* name, const TensorView& like) {
      if (like.given())
        run_.outputs.push_back({name, Tensor(like.dtype, Shape(like.dims().begin(), like.dims().end()))});
      if (like.given()) fill(run_.outputs.back().tensor.view, 0);
    };
    const Inputs& in = call_.in;
    const DType wide = p_.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    const TensorView state(nullptr, wide, {p_.sequences(), p_.HV, kv ? p_.K : p_.V, kv ? p_.V : p_.K});
    output("o", in.v);
    if (call_.final_state) output("final_state", state);
    output("dq", in.q), output("dk", in.k), output("dv", in.v), output("dg", in.g), output("dbeta", in.beta);
    output("db", in.b), output("dw", in.w), output("dinitial_state", in.initial_state);
    for (const Output& o : run_.outputs) sums_.emplace_back(static_cast<std::size_t>(o.tensor.view.elements()));

    const std::vector<double> offsets = values(in.cu_seqlens);
    for (std::int64_t s = 0; s < p_.sequences(); ++s) {
      const auto at = static_cast<std::size_t>(s);
      const std::int64_t begin = p_.segments ? static_cast<std::int64_t>(offsets[at]) : 0;
      const std::int64_t end = p_.segments ? static_cast<std::int64_t>(offsets[at + 1]) : p_.T;
      for (std::int64_t head = 0; head < p_.HV; ++head) one(s, p_.segments ? 0 : s, begin, end, head);
    }
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const TensorView& view = run_.outputs[i].tensor.view;
      for_each(view, [&](std::byte* to, const Index&, std::int64_t element) {
        store_element(to, view.dtype, sums_[i][static_cast<std::size_t>(element)]);
      });
    }
    run_.products = Products::k16Bit;
    return std::move(run_);
  }

 private:
  Matrix rounded(Matrix m) const {
    for (double& x : m.x) x = round_to(p_.dtype, x);
    return m;
  }
  bool vector_gate() const { return gate_of(p_.op) == Gate::kVector; }

  std::size_t state_at(std::int64_t sequence, std::int64_t head, std::int64_t i, std::int64_t j) const {
    const std::int64_t inside = p_.state_layout == StateLayout::kKV ? i * p_.V + j : j * p_.K + i;
    return static_cast<std::size_t>((sequence * p_.HV + head) * p_.K * p_.V + inside);
  }
  Matrix load_state(const std::vector<double>& from, std::int64_t sequence, std::int64_t head) const {
    return make(p_.K, p_.V, [&](auto i, auto j) { return from.empty() ? 0 : from[state_at(sequence, head, i, j)]; });
  }
  std::vector<double>* sum(const std::string& name) {
    for (std::size_t i = 0; i < run_.outputs.size(); ++i) {
      if (run_.outputs[i].name == name) return &sums_[i];
    }
    return nullptr;
  }
  void store_state(const std::string& name, std::int64_t sequence, std::int64_t head, const Matrix& m) {
    auto* to = sum(name);
    if (to == nullptr) return;
    for (std::int64_t i = 0; i < p_.K; ++i) {
      for (std::int64_t j = 0; j < p_.V; ++j) (*to)[state_at(sequence, head, i, j)] = m(i, j);
    }
  }
  /// Adds rows to an output [B, T, heads, width], or their sums where it has one number a token.
  void add_rows(const std::string& name, std::int64_t batch, const Chunk& c, std::int64_t head, std::int64_t heads,
                bool scalar, const Matrix& m) {
    auto* to = sum(name);
    if (to == nullptr) return;
    for (std::int64_t i = 0; i < c.n; ++i) {
      const std::int64_t row = (batch * p_.T + c.first + i) * heads + head;
      for (std::int64_t j = 0; j < m.columns; ++j) {
        (*to)[static_cast<std::size_t>(scalar ? row : row * m.columns + j)] += m(i, j);
      }
    }
  }

  Chunk prepare(std::int64_t batch, std::int64_t first, std::int64_t n, std::int64_t head) const {
    const std::int64_t K = p_.K, V = p_.V, key_head = head / (p_.HV / p_.H);
    const auto rows = [&](const Input& in, std::int64_t h, std::int64_t width, double factor = 1) {
      return make(n, width, [&](auto i, auto j) { return factor * in.at(batch, first + i, h, j); });
    };
    Chunk c;
    c.first = first, c.n = n;
    c.q = rows(q_, key_head, K, p_.query_scale());
    c.k = rows(k_, key_head, K);
    c.v = rows(v_, head, V), c.b = rows(b_, head, K), c.w = rows(w_, head, V), c.d_o = rows(d_o_, head, V);
    c.decay = make(n, K, [&](auto i, auto j) { return g_.x.empty() ? 1 : std::exp(g_.at(batch, first + i, head, j)); });
    c.gamma = c.f = Matrix(n, K);
    for (std::int64_t j = 0; j < K; ++j) {
      for (std::int64_t i = 0; i < n; ++i) c.gamma(i, j) = (i == 0 ? 1 : c.gamma(i - 1, j)) * c.decay(i, j);
      for (std::int64_t i = n; i-- > 0;) c.f(i, j) = i == n - 1 ? 1 : c.f(i + 1, j) * c.decay(i + 1, j);
    }
    Matrix l(n, n);
    c.cq = Matrix(n, n);
    for (std::int64_t i = 0; i < n; ++i) {
      Matrix rho(i + 1, K);
      for (std::int64_t m = 0; m < K; ++m) {
        for (std::int64_t j = i + 1; j-- > 0;) {
          rho(j, m) = j == i ? 1 : rho(j + 1, m) * c.decay(j + 1, m);
          if (j < i) l(i, j) += c.b(i, m) * c.k(i, m) * rho(j, m) * c.k(j, m);
          c.cq(i, j) += c.q(i, m) * rho(j, m) * c.k(j, m);
        }
      }
      c.rho.push_back(std::move(rho));
    }
    c.a = Matrix(n, n);  // (I + L) A = I by forward substitution
    for (std::int64_t j = 0; j < n; ++j) {
      for (std::int64_t i = j; i < n; ++i) {
        c.a(i, j) = i == j ? 1 : 0;
        for (std::int64_t m = j; m < i; ++m) c.a(i, j) -= l(i, m) * c.a(m, j);
      }
    }
    c.a = rounded(c.a), c.cq = rounded(c.cq);
    c.erase = make(n, K, [&](auto i, auto j) { return c.gamma(i, j) * c.b(i, j) * c.k(i, j); });
    c.query = make(n, K, [&](auto i, auto j) { return c.gamma(i, j) * c.q(i, j); });
    c.write = make(n, K, [&](auto i, auto j) { return c.f(i, j) * c.k(i, j); });
    if (vector_gate()) c.erase = rounded(c.erase), c.query = rounded(c.query), c.write = rounded(c.write);
    return c;
  }

  /// operand^T x with x rounded. A scalar gate's operand is `plain`, k or q as given, and the rest, a factor of the
  /// row, multiplies x before it is rounded.
  template <class Factor>
  Matrix to_state(const Matrix& operand, const Matrix& plain, const Matrix& x, Factor&& factor) const {
    if (vector_gate()) return transposed(operand) * rounded(x);
    return transposed(plain) * rounded(make(x.rows, x.columns, [&](auto i, auto j) { return factor(i) * x(i, j); }));
  }
  static Matrix decayed(const Chunk& c, const Matrix& state) {
    return make(state.rows, state.columns, [&](auto i, auto j) { return c.gamma(c.n - 1, i) * state(i, j); });
  }

  void one(std::int64_t sequence, std::int64_t batch, std::int64_t begin, std::int64_t end, std::int64_t head) {
    std::vector<Chunk> chunks;
    Matrix state = load_state(initial_, sequence, head);
    for (std::int64_t first = begin; first < end; first += kChunk) {
      Chunk c = prepare(batch, first, std::min<std::int64_t>(kChunk, end - first), head);
      c.state = rounded(state);
      const Matrix z = make(c.n, p_.V, [&](auto i, auto j) { return c.w(i, j) * c.v(i, j); });
      const Matrix r = c.a * rounded(z - c.erase * c.state);
      c.r = rounded(r);
      add_rows("o", batch, c, head, p_.HV, false, c.query * c.state + c.cq * c.r);
      state = decayed(c, state) + to_state(c.write, c.k, r, [&](auto i) { return c.f(i, 0); });
      chunks.push_back(std::move(c));
    }
    store_state("final_state", sequence, head, state);

    Matrix d_state = load_state(d_final_, sequence, head);
    for (auto c = chunks.rbegin(); c != chunks.rend(); ++c) {
      const Matrix read = rounded(d_state);
      const Matrix p = transposed(c->a) * rounded(transposed(c->cq) * c->d_o + c->write * read);
      pull_back(*c, batch, head, rounded(p), read);
      d_state = decayed(*c, d_state) + to_state(c->query, c->q, c->d_o, [&](auto i) { return c->gamma(i, 0); }) -
                to_state(c->erase, c->k, p, [&](auto i) { return c->gamma(i, 0) * c->b(i, 0); });
    }
    store_state("dinitial_state", sequence, head, d_state);
  }

  /// Section 4.2, with D and Hq in FP64.
  void pull_back(const Chunk& c, std::int64_t batch, std::int64_t head, const Matrix& p, const Matrix& d_state) {
    const std::int64_t n = c.n, K = p_.K, V = p_.V, key_head = head / (p_.HV / p_.H);
    const Matrix d = p * transposed(c.r), hq = c.d_o * transposed(c.r), d_f = c.r * transposed(d_state);
    const Matrix from_query = c.d_o * transposed(c.state), from_erase = p * transposed(c.state);
    Matrix a(n, K), e(n, K), s(n, K);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::size_t>(i);
      for (std::int64_t m = 0; m < K; ++m) {
        a(i, m) += c.gamma(i, m) * from_query(i, m), e(i, m) -= c.gamma(i, m) * from_erase(i, m);
        for (std::int64_t j = 0; j < i; ++j) {
          const double rho = c.rho[row](j, m);
          a(i, m) += hq(i, j) * c.k(j, m) * rho, e(i, m) -= d(i, j) * c.k(j, m) * rho;
          s(j, m) += (hq(i, j) * c.q(i, m) - d(i, j) * c.b(i, m) * c.k(i, m)) * rho;
        }
      }
    }
    const double scale = p_.query_scale();
    const auto rows = [&](const char* name, std::int64_t h, std::int64_t heads, bool scalar, std::int64_t width,
                          auto fn) { add_rows(name, batch, c, h, heads, scalar, make(n, width, fn)); };
    rows("dq", key_head, p_.H, false, K, [&](auto i, auto m) { return scale * (a(i, m) + hq(i, i) * c.k(i, m)); });
    rows("dk", key_head, p_.H, false, K,
         [&](auto i, auto m) { return c.b(i, m) * e(i, m) + c.f(i, m) * d_f(i, m) + s(i, m) + hq(i, i) * c.q(i, m); });
    rows("dv", head, p_.HV, false, V, [&](auto i, auto j) { return c.w(i, j) * p(i, j); });
    const bool shared = strength_of(p_.op) == Strength::kShared;
    rows(shared ? "dbeta" : "db", head, p_.HV, shared, K, [&](auto i, auto m) { return c.k(i, m) * e(i, m); });
    rows(shared ? "dbeta" : "dw", head, p_.HV, shared, V, [&](auto i, auto j) { return c.v(i, j) * p(i, j); });

    Matrix dg(n, K);
    for (std::int64_t m = 0; m < K; ++m) {
      double end = 0, after = 0, before = 0;
      for (std::int64_t j = 0; j < V; ++j) end += c.gamma(n - 1, m) * c.state(m, j) * d_state(m, j);
      for (std::int64_t t = n; t-- > 0;) {
        after += c.q(t, m) * a(t, m) + c.b(t, m) * c.k(t, m) * e(t, m) - c.k(t, m) * s(t, m);
        dg(t, m) = after + end;
      }
      for (std::int64_t t = 0; t < n; ++t) {
        dg(t, m) = c.decay(t, m) == 0 ? 0 : dg(t, m) + before;
        before += c.f(t, m) * c.k(t, m) * d_f(t, m);
      }
    }
    add_rows("dg", batch, c, head, p_.HV, gate_of(p_.op) == Gate::kScalar, dg);
  }

  const Call& call_;
  const Problem& p_;
  Input q_, k_, v_, g_, b_, w_, d_o_;
  std::vector<double> initial_, d_final_;
  Run run_;
  std::vector<std::vector<double>> sums_;  ///< of each output, before it is rounded
};

}  // namespace

Run run_rounded(const Call& call) {
  return Rounded(call).run();
}

void allow_rounding(const Call& call, const Run& actual, const Run& expected, std::vector<Comparison>& comparisons) {
  constexpr double kRoom = 1.5;
  const Run plain = run_rounded(call);
  for (Comparison& c : comparisons) {
    if (c.passed) continue;
    Tolerance allowed = c.allowed;
    const double lost = compare(c.output, plain[c.output], expected[c.output], allowed).relative;
    allowed.relative = std::max(allowed.relative, kRoom * lost);
    c = compare(c.output, actual[c.output], expected[c.output], allowed);
  }
}

}  // namespace rewy::tool
