#include "case.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>

namespace rewy::tool {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& allowed, std::string_view got) {
  throw Error("case", key, allowed, "'" + std::string(got) + "'");
}

template <class Number>
Number parse_number(const std::string& key, std::string_view text, const char* allowed) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) refuse(key, allowed, text);
  return value;
}

std::string number_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

// Words of the enums, in the order of the enumerators.
constexpr std::array<std::string_view, 3> kKeysWords{"normal", "repeat", "raw"};
constexpr std::array<std::string_view, 4> kStridesWords{"dense", "packed", "odd", "aligned"};
constexpr std::array<std::string_view, 6> kBetaWords{"mild", "zero3", "zero", "one", "two", "tiny"};
constexpr std::array<std::string_view, 11> kGateWords{"none",    "zero",  "mild",  "strong",  "bounded", "mixed",
                                                      "trained", "const", "reset", "perhead", "positive"};

template <std::size_t N>
std::string alternatives(const std::array<std::string_view, N>& words) {
  std::string text;
  for (std::string_view word : words) text += (text.empty() ? "" : "|") + std::string(word);
  return text;
}

template <class Enum, std::size_t N>
Enum parse_word(const std::string& key, std::string_view text, const std::array<std::string_view, N>& words,
                const std::string& allowed) {
  for (std::size_t i = 0; i < N; ++i) {
    if (words[i] == text) return static_cast<Enum>(i);
  }
  refuse(key, allowed, text);
}

template <class Parse>
auto parse_library_word(const std::string& key, std::string_view text, Parse parse) {
  try {
    return parse(text);
  } catch (const Error& e) {
    refuse(key, e.expected(), text);
  }
}

bool parse_flag(const std::string& key, std::string_view text) {
  if (text != "0" && text != "1") refuse(key, "0 or 1", text);
  return text == "1";
}

// "128,0,128", "1x2048" (2048 segments of one token), "none" (packed without any segment), or a mix.
std::vector<std::int64_t> parse_lengths(const std::string& key, std::string_view text) {
  const char* allowed = "segment lengths such as 128,0,128, or 1x2048 for 2048 segments of one token, or none";
  std::vector<std::int64_t> lengths;
  if (text == "none") return lengths;
  std::string item;
  std::istringstream items{std::string(text)};
  while (std::getline(items, item, ',')) {
    const std::size_t times = item.find('x');
    const auto length = parse_number<std::int64_t>(key, std::string_view(item).substr(0, times), allowed);
    const std::int64_t count = times == std::string::npos
                                   ? 1
                                   : parse_number<std::int64_t>(key, std::string_view(item).substr(times + 1), allowed);
    constexpr std::int64_t kMostSegments = 1 << 24;
    if (length < 0 || count < 0 || count > kMostSegments) refuse(key, allowed, text);
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), length);
  }
  if (lengths.empty()) refuse(key, allowed, text);
  return lengths;
}

std::string lengths_text(const std::vector<std::int64_t>& lengths) {
  std::string text;
  for (std::size_t i = 0; i < lengths.size();) {
    std::size_t run = i;
    while (run < lengths.size() && lengths[run] == lengths[i]) ++run;
    const std::size_t count = run - i;
    if (!text.empty()) text += ',';
    text += std::to_string(lengths[i]);
    if (count > 1) text += "x" + std::to_string(count);
    i = run;
  }
  return text.empty() ? "none" : text;
}

std::int64_t total(const std::vector<std::int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

/// One key: how to read it, and what it reads now.
struct Key {
  const char* name;
  std::function<void(Case&, const std::string&)> read;
  std::function<std::string(const Case&)> text;
};

Key size_key(const char* name, std::int64_t Problem::*field, std::int64_t least) {
  return {name,
          [=](Case& c, const std::string& text) {
            const std::string allowed = "a whole number of at least " + std::to_string(least);
            c.problem.*field = parse_number<std::int64_t>(name, text, allowed.c_str());
            if (c.problem.*field < least) refuse(name, allowed, text);
          },
          [=](const Case& c) { return std::to_string(c.problem.*field); }};
}

Key flag_key(const char* name, bool Case::*field) {
  return {name, [=](Case& c, const std::string& text) { c.*field = parse_flag(name, text); },
          [=](const Case& c) { return std::string(c.*field ? "1" : "0"); }};
}

template <class Enum>
Key word_key(const char* key, std::function<Enum&(Case&)> field, Enum (*parse)(std::string_view)) {
  return {key, [=](Case& c, const std::string& text) { field(c) = parse_library_word(key, text, parse); },
          [=](const Case& c) {
            Case copy = c;
            return std::string(name(field(copy)));
          }};
}

DType parse_float_dtype(std::string_view text) {
  const DType t = parse_dtype(text);
  if (t == DType::kI32 || t == DType::kI64) throw Error("case", "dtype", "f64, f32, bf16 or f16", std::string(text));
  return t;
}

DType parse_offsets_dtype(std::string_view text) {
  const DType t = parse_dtype(text);
  if (t != DType::kI32 && t != DType::kI64) throw Error("case", "offsets", "i32 or i64", std::string(text));
  return t;
}

// In the order of format_case().
const std::vector<Key>& keys() {
  static const std::vector<Key> table{
      word_key<Operator>(
          "op", [](Case& c) -> Operator& { return c.problem.op; }, parse_operator),
      size_key("B", &Problem::B, 1),
      size_key("T", &Problem::T, 0),
      size_key("H", &Problem::H, 1),
      size_key("HV", &Problem::HV, 1),
      size_key("K", &Problem::K, 1),
      size_key("V", &Problem::V, 1),
      {"packed",
       [](Case& c, const std::string& text) {
         c.lengths = parse_lengths("packed", text);
         c.problem.segments = static_cast<std::int64_t>(c.lengths.size());
       },
       [](const Case& c) { return c.problem.segments ? lengths_text(c.lengths) : ""; }},
      word_key<DType>(
          "offsets", [](Case& c) -> DType& { return c.offsets; }, parse_offsets_dtype),
      word_key<DType>(
          "dtype", [](Case& c) -> DType& { return c.problem.dtype; }, parse_float_dtype),
      word_key<DType>(
          "strength_dtype", [](Case& c) -> DType& { return c.problem.strength_dtype; }, parse_float_dtype),
      flag_key("h0", &Case::initial_state),
      flag_key("ht", &Case::final_state),
      flag_key("dht", &Case::d_final_state),
      word_key<StateLayout>(
          "layout", [](Case& c) -> StateLayout& { return c.problem.state_layout; }, parse_state_layout),
      {"keys",
       [](Case& c, const std::string& text) {
         c.keys = parse_word<Keys>("keys", text, kKeysWords, alternatives(kKeysWords));
       },
       [](const Case& c) { return std::string(kKeysWords[static_cast<std::size_t>(c.keys)]); }},
      {"beta",
       [](Case& c, const std::string& text) {
         const std::string allowed = alternatives(kBetaWords) + " or a number from 0 to 2";
         if (std::find(kBetaWords.begin(), kBetaWords.end(), text) == kBetaWords.end()) {
           const auto value = parse_number<double>("beta", text, allowed.c_str());
           if (!(value >= 0 && value <= 2)) refuse("beta", allowed, text);
         }
         c.beta = text;
       },
       [](const Case& c) { return c.beta; }},
      {"gate",
       [](Case& c, const std::string& text) {
         const std::string allowed = alternatives(kGateWords) + ", where const reads const:-20";
         c.gate_constant = 0;
         if (text.starts_with("const:")) {
           c.gate = GateKind::kConstant;
           c.gate_constant = parse_number<double>("gate", std::string_view(text).substr(6), allowed.c_str());
           if (std::isnan(c.gate_constant)) refuse("gate", allowed, text);  // NaN would compare equal to anything
           return;
         }
         c.gate = parse_word<GateKind>("gate", text, kGateWords, allowed);
         if (c.gate == GateKind::kConstant) refuse("gate", allowed, text);
       },
       [](const Case& c) {
         std::string text(kGateWords[static_cast<std::size_t>(c.gate)]);
         if (c.gate == GateKind::kConstant) text += ":" + number_text(c.gate_constant);
         return text;
       }},
      {"strides",
       [](Case& c, const std::string& text) {
         c.strides = parse_word<Placement>("strides", text, kStridesWords, alternatives(kStridesWords));
       },
       [](const Case& c) { return std::string(kStridesWords[static_cast<std::size_t>(c.strides)]); }},
      {"scale",
       [](Case& c, const std::string& text) { c.problem.scale = parse_number<double>("scale", text, "a number"); },
       [](const Case& c) { return c.problem.scale ? number_text(*c.problem.scale) : ""; }},
      word_key<Schedule>(
          "schedule", [](Case& c) -> Schedule& { return c.schedule; }, parse_schedule),
      word_key<Policy>(
          "policy", [](Case& c) -> Policy& { return c.problem.policy; }, parse_policy),
      word_key<Graph>(
          "graph", [](Case& c) -> Graph& { return c.problem.variant.graph; }, parse_graph),
      word_key<Intra>(
          "intra", [](Case& c) -> Intra& { return c.problem.variant.intra; }, parse_intra),
      word_key<Gram>(
          "gram", [](Case& c) -> Gram& { return c.problem.variant.gram; }, parse_gram),
      {"seed",
       [](Case& c, const std::string& text) {
         c.seed = parse_number<std::uint64_t>("seed", text, "a whole number of at least 0");
       },
       [](const Case& c) { return std::to_string(c.seed); }}};
  return table;
}

/// Keys that were not given and follow from others: HV = H, V = K, T = the segments' sum, strength_dtype f64 with f64,
/// no gate without one.
void derive(Case& c, const std::function<bool(std::string_view)>& given) {
  Problem& p = c.problem;
  if (!given("HV")) p.HV = p.H;
  if (!given("V")) p.V = p.K;
  if (!given("T") && p.segments) p.T = total(c.lengths);
  if (!given("strength_dtype") && p.dtype == DType::kF64) p.strength_dtype = DType::kF64;
  if (!given("gate") && gate_of(p.op) == Gate::kNone) c.gate = GateKind::kNone;
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

std::uint64_t random_bits(std::uint64_t stream, std::uint64_t position) {
  return mix(mix(stream * 0x9E3779B97F4A7C15ULL + 1) + position * 0x9E3779B97F4A7C15ULL);
}

double mild_gate(std::uint64_t stream, std::uint64_t position) {
  return -std::log1p(std::exp(-gaussian(stream, position))) / 16;
}

double between(double low, double high, double u) {
  return low + (high - low) * u;
}

/// The gate of one (batch, token, value head, feature); `token` and `feature` give positions of their own random draws.
class GateMaker {
 public:
  GateMaker(const Case& c, std::uint64_t stream) : case_(c), stream_(stream) {}

  double operator()(const Index& at, std::uint64_t position) const { return make(case_.gate, at, position); }

 private:
  double make(GateKind kind, const Index& at, std::uint64_t position) const {
    const double u = uniform(stream_ + 1, position);
    switch (kind) {
      case GateKind::kNone:
      case GateKind::kZero: return 0;
      case GateKind::kMild: return mild_gate(stream_, position);
      case GateKind::kStrong: return between(-80, -20, u);
      case GateKind::kBounded: return between(-5, 0, u);
      case GateKind::kMixed: {
        constexpr std::array<GateKind, 4> kKinds{GateKind::kZero, GateKind::kMild, GateKind::kBounded,
                                                 GateKind::kStrong};
        return make(kKinds[random_bits(stream_ + 2, position) % kKinds.size()], at, position);
      }
      case GateKind::kTrained: {
        // One feature in sixteen forgets fast, at one token in four; the others as mild as trained ones.
        const auto feature = static_cast<std::uint64_t>(at[2] * 4096 + at[3]);
        const bool fast = random_bits(stream_ + 3, feature) % 16 == 0 || case_.problem.op == Operator::kGdn;
        return fast && random_bits(stream_ + 4, position) % 4 == 0 ? between(-30, -5, u)
                                                                   : 2 * mild_gate(stream_, position);
      }
      case GateKind::kConstant: return case_.gate_constant;
      case GateKind::kReset: {
        const auto row = static_cast<std::uint64_t>((at[0] * case_.problem.T + at[1]) * case_.problem.HV + at[2]);
        const std::uint64_t draw = random_bits(stream_ + 5, row) % 16;
        const bool reset = draw == 0 || (draw == 1 && random_bits(stream_ + 6, position) % 2 == 0);
        return reset ? -std::numeric_limits<double>::infinity() : mild_gate(stream_, position);
      }
      case GateKind::kPerHead: {
        constexpr std::array<GateKind, 4> kKinds{GateKind::kStrong, GateKind::kZero, GateKind::kMild,
                                                 GateKind::kBounded};
        return make(kKinds[static_cast<std::size_t>(at[2]) % kKinds.size()], at, position);
      }
      case GateKind::kPositive: {
        const auto row = static_cast<std::uint64_t>(case_.problem.HV) *
                         (gate_of(case_.problem.op) == Gate::kVector ? static_cast<std::uint64_t>(case_.problem.K) : 1);
        const double before = position < row ? 0 : uniform(stream_ + 1, position - row);
        return before - u;
      }
    }
    return 0;
  }

  const Case& case_;
  std::uint64_t stream_;
};

double strength(const Case& c, std::uint64_t stream, const Index& at, std::uint64_t position) {
  if (c.beta == "zero") return 0;
  if (c.beta == "one") return 1;
  if (c.beta == "two") return 2;
  if (c.beta == "zero3" && at[1] % 3 == 0) return 0;
  const double mild = between(0.1, 0.9, uniform(stream, position));
  if (c.beta == "mild" || c.beta == "zero3") return mild;
  if (c.beta == "tiny") return mild * 1e-20;  // a quotient by beta would show: its square is below FP32
  return parse_number<double>("beta", c.beta, "a number");
}

using Make = std::function<double(const Index&, std::uint64_t)>;

/// Calls fn(begin, end) for positions of a view, in blocks of whole rows of its last axis; on all threads where the
/// view is large: a benchmark's inputs are a thousand million numbers.
template <class Fn>
void in_blocks(const TensorView& view, const Fn& fn) {
  constexpr std::int64_t kBlock = 1 << 16;
  const std::int64_t count = view.elements();
  const std::int64_t row = std::max<std::int64_t>(view.shape[static_cast<std::size_t>(view.rank - 1)], 1);
  const std::int64_t block = (kBlock + row - 1) / row * row;
  const std::int64_t blocks = (count + block - 1) / block;
#pragma omp parallel for schedule(dynamic) if (blocks > 16)
  for (std::int64_t i = 0; i < blocks; ++i) fn(i * block, std::min(count, (i + 1) * block));
}

Tensor make_tensor(DType dtype, const Shape& shape, Placement placement, const Make& make) {
  Tensor t(dtype, shape, placement);
  in_blocks(t.view, [&](std::int64_t begin, std::int64_t end) {
    for_each(t.view, begin, end, [&](std::byte* at, const Index& index, std::int64_t i) {
      store_element(at, dtype, make(index, static_cast<std::uint64_t>(i)));
    });
  });
  return t;
}

/// Queries and keys: rows [B, T, H, K] of Gaussians, normalised unless `raw`; `repeat` draws one row a (batch, head).
Tensor make_rows(const Case& c, std::uint64_t stream, bool repeat) {
  const Problem& p = c.problem;
  Tensor t(p.dtype, {p.B, p.T, p.H, p.K}, c.strides);
  in_blocks(t.view, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> row(static_cast<std::size_t>(p.K));
    for_each(t.view, begin, end, [&](std::byte* at, const Index& index, std::int64_t i) {
      const auto k = static_cast<std::size_t>(index[3]);
      if (k == 0) {
        const std::int64_t first = repeat ? (index[0] * p.H + index[2]) * p.K : i;
        double sum = 0;
        for (std::size_t j = 0; j < row.size(); ++j) {
          row[j] = gaussian(stream, static_cast<std::uint64_t>(first) + j);
          sum += row[j] * row[j];
        }
        const double norm = c.keys == Keys::kRaw || sum == 0 ? 1 : std::sqrt(sum);  // one feature can be exactly 0
        for (double& x : row) x /= norm;
      }
      store_element(at, p.dtype, row[k]);
    });
  });
  return t;
}

}  // namespace

double uniform(std::uint64_t stream, std::uint64_t position) {
  return static_cast<double>(random_bits(stream, position) >> 11) * 0x1p-53;
}

double gaussian(std::uint64_t stream, std::uint64_t position) {
  // The sum of eight 16-bit integers (Irwin-Hall, tails to 4.9 sigma) rather than Box-Muller: its logarithm and cosine
  // differ in the last bit between C libraries.
  std::uint64_t sum = 0;
  for (std::uint64_t half = 0; half < 2; ++half) {
    const std::uint64_t bits = random_bits(stream, 2 * position + half);
    for (int shift = 0; shift < 64; shift += 16) sum += (bits >> shift) & 0xFFFF;
  }
  constexpr double kMean = 8 * 65535.0 / 2;
  constexpr double kScale = 1.2247448713915890 / 65536;  // sqrt(12 / 8)
  return (static_cast<double>(sum) - kMean) * kScale;
}

Case parse_case(std::string_view text) {
  std::vector<std::string> given;
  Case c;
  std::string word;
  std::istringstream words{std::string(text)};
  while (words >> word) {
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const auto key = std::find_if(keys().begin(), keys().end(), [&](const Key& k) { return k.name == name; });
    if (equals == std::string::npos || key == keys().end()) {
      std::string names;
      for (const Key& k : keys()) names += (names.empty() ? "" : " ") + std::string(k.name);
      throw Error("case", name, "key=value with a key of: " + names, "'" + word + "'");
    }
    if (std::find(given.begin(), given.end(), name) != given.end()) refuse(name, "one value", word);
    given.push_back(name);
    key->read(c, word.substr(equals + 1));
  }
  derive(c, [&](std::string_view key) { return std::find(given.begin(), given.end(), key) != given.end(); });
  if (c.problem.segments && total(c.lengths) > c.problem.T) {
    refuse("packed", "segments of at most T = " + std::to_string(c.problem.T) + " tokens together",
           std::to_string(total(c.lengths)));
  }
  return c;
}

std::string format_case(const Case& c) {
  // A key is left out where the case without it reads the same; `op` and the sizes help the reader and stay.
  Case plain;
  plain.problem.op = c.problem.op;
  plain.problem.H = c.problem.H;
  plain.problem.K = c.problem.K;
  plain.problem.dtype = c.problem.dtype;
  plain.lengths = c.lengths;
  plain.problem.segments = c.problem.segments;
  derive(plain, [](std::string_view) { return false; });
  plain.problem.segments.reset();
  std::string out;
  for (const Key& key : keys()) {
    const std::string text = key.text(c);
    const std::string_view name = key.name;
    const bool size = name == "op" || name == "T" || name == "H" || name == "K";
    const bool type = name == "dtype" && c.problem.dtype != DType::kF32;
    if (text.empty() || (!size && !type && text == key.text(plain))) continue;
    out += (out.empty() ? "" : " ") + std::string(name) + "=" + text;
  }
  return out;
}

Case token_case(Case c) {
  c.schedule = Schedule::kTokens;
  c.d_final_state = false;
  c.problem.policy = Policy::kRecompute;
  c.problem.variant = {};
  return c;
}

std::vector<std::string> case_lines(std::string_view list) {
  std::vector<std::string> lines;
  std::string line;
  std::istringstream all{std::string(list)};
  while (std::getline(all, line)) {
    line.erase(std::min(line.find('#'), line.size()));
    const std::size_t end = line.find_last_not_of(" \t\r");
    if (end == std::string::npos) continue;
    line.erase(end + 1);
    lines.push_back(line.substr(line.find_first_not_of(" \t")));
  }
  return lines;
}

std::vector<std::string> token_lines(const std::vector<std::string>& lines) {
  std::vector<std::string> all;
  std::set<std::string> seen;
  for (const std::string& line : lines) {
    const std::string text = format_case(token_case(parse_case(line)));
    if (seen.insert(text).second) all.push_back(text);
  }
  return all;
}

Tensor make_offsets(const std::vector<std::int64_t>& lengths, DType dtype) {
  Tensor t(dtype, {static_cast<std::int64_t>(lengths.size()) + 1});
  std::int64_t sum = 0;
  for_each(t.view, [&](std::byte* at, const Index& index, std::int64_t) {
    if (index[0] > 0) sum += lengths[static_cast<std::size_t>(index[0] - 1)];
    store_element(at, dtype, static_cast<double>(sum));
  });
  return t;
}

Data make_data(const Case& c) {
  const Problem& p = c.problem;
  const bool vector_gate = gate_of(p.op) == Gate::kVector;
  const DType wide = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const Shape per_head{p.B, p.T, p.HV};
  const auto with = [](Shape shape, std::int64_t width) {
    shape.push_back(width);
    return shape;
  };
  const Shape state =
      p.state_layout == StateLayout::kKV ? Shape{p.sequences(), p.HV, p.K, p.V} : Shape{p.sequences(), p.HV, p.V, p.K};
  // A stream of random numbers for every tensor; the gate uses several.
  const auto stream = [&](std::uint64_t id) { return c.seed * 64 + id; };
  const auto normal = [&](std::uint64_t id, double factor = 1) -> Make {
    return [=, s = stream(id)](const Index&, std::uint64_t i) { return factor * gaussian(s, i); };
  };
  const auto strengths = [&](std::uint64_t id) -> Make {
    return [&c, s = stream(id)](const Index& at, std::uint64_t i) { return strength(c, s, at, i); };
  };

  Data d;
  d.problem = p;
  d.final_state = c.final_state;
  d.q = make_rows(c, stream(0), false);
  d.k = make_rows(c, stream(1), c.keys == Keys::kRepeat);
  d.v = make_tensor(p.dtype, with(per_head, p.V), c.strides, normal(2));
  d.d_o = make_tensor(p.dtype, with(per_head, p.V), c.strides, normal(3));
  if (gate_of(p.op) != Gate::kNone) {
    d.g = make_tensor(wide, vector_gate ? with(per_head, p.K) : per_head, c.strides, GateMaker(c, stream(16)));
  }
  if (strength_of(p.op) == Strength::kShared) {
    d.beta = make_tensor(p.strength_dtype, per_head, c.strides, strengths(4));
  } else {
    d.b = make_tensor(p.strength_dtype, with(per_head, p.K), c.strides, strengths(4));
    d.w = make_tensor(p.strength_dtype, with(per_head, p.V), c.strides, strengths(5));
  }
  if (c.initial_state) d.initial_state = make_tensor(wide, state, c.strides, normal(6, 0.1));
  if (c.d_final_state) d.d_final_state = make_tensor(wide, state, c.strides, normal(7, 0.1));
  if (p.segments) d.cu_seqlens = make_offsets(c.lengths, c.offsets);
  return d;
}

Call Data::call() const {
  return {.problem = problem,
          .in = {.q = q.view,
                 .k = k.view,
                 .v = v.view,
                 .g = g.view,
                 .beta = beta.view,
                 .b = b.view,
                 .w = w.view,
                 .initial_state = initial_state.view,
                 .cu_seqlens = cu_seqlens.view},
          .d_o = d_o.view,
          .d_final_state = d_final_state.view,
          .final_state = final_state};
}

}  // namespace rewy::tool
