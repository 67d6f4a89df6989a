#include "common/validate.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "common/arena.h"

namespace rewy {
namespace {

enum class Need { kRequired, kOptional };

std::string text_of(Device d) {
  std::string text(name(d.kind));
  return d.kind == DeviceKind::kCpu ? text : text + ":" + std::to_string(d.index);
}

std::string one_of(std::span<const DType> types) {
  std::string text;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (i != 0) text += i + 1 == types.size() ? " or " : ", ";
    text += name(types[i]);
  }
  return text;
}

std::string strides_text(const TensorView& t) {
  return shape_text({t.strides.data(), static_cast<std::size_t>(t.rank)});
}

/// Memory of one argument, to find outputs that share memory with something else.
struct Range {
  std::string argument;
  std::uintptr_t first = 0;  // address of the element at index 0
  std::uintptr_t low = 0;    // [low, high) holds every element
  std::uintptr_t high = 0;
  bool dense = true;  // every byte of [low, high) belongs to an element
  bool output = false;
};

/// The axes that move, by growing distance of their steps.
std::vector<std::pair<std::uint64_t, std::int64_t>> moving_axes(const TensorView& t) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> axes;  // {|stride|, extent}
  for (int a = 0; a < t.rank; ++a) {
    const auto stride = static_cast<std::uint64_t>(t.strides[a]);
    if (t.shape[a] > 1) axes.emplace_back(t.strides[a] < 0 ? -stride : stride, t.shape[a]);
  }
  std::ranges::sort(axes);
  return axes;
}

class Checker {
 public:
  Checker(const Problem& p, Direction direction, const Execution& execution)
      : operation_(operation(p, direction)), device_(execution.device) {}

  [[noreturn]] void refuse(const std::string& argument, const std::string& expected, const std::string& actual) const {
    throw Error(operation_, argument, expected, actual);
  }

  /// The one check of a tensor, in the order of its parameters.
  void expect(const TensorView& t, const char* argument, Need need, std::span<const DType> types,
              std::initializer_list<std::int64_t> shape, bool output = false) {
    if (!t.given()) {
      if (need == Need::kRequired) {
        refuse(argument, "a tensor of shape " + shape_text({shape.begin(), shape.size()}), "none");
      }
      return;
    }
    if (t.rank < 0 || t.rank > TensorView::kMaxRank) {
      refuse(argument, std::to_string(shape.size()) + " axes", std::to_string(t.rank));
    }
    if (!std::ranges::equal(t.dims(), shape)) {
      refuse(argument, "shape " + shape_text({shape.begin(), shape.size()}), shape_text(t.dims()));
    }
    if (std::ranges::find(types, t.dtype) == types.end()) {
      refuse(argument, "dtype " + one_of(types), std::string(name(t.dtype)));
    }
    if (t.device != device_) refuse(argument, "a tensor on " + text_of(device_), "one on " + text_of(t.device));
    if (t.elements() == 0) return;
    if (t.data == nullptr) refuse(argument, "data", "a null pointer");
    const auto first = reinterpret_cast<std::uintptr_t>(t.data);
    if (first % size_of(t.dtype) != 0) {
      refuse(argument, "data aligned to the " + std::to_string(size_of(t.dtype)) + " bytes of an element",
             "an address " + std::to_string(first % size_of(t.dtype)) + " bytes past it");
    }
    add_range(t, argument, output);
  }

  /// An argument that this operator or call does not have.
  void absent(const TensorView& t, const char* argument, const std::string& why) const {
    if (t.given()) refuse(argument, "no tensor, as " + why, "one of rank " + std::to_string(t.rank));
  }

  void memory(std::span<const std::byte> m, const char* argument, std::size_t bytes, bool output) {
    if (m.size() < bytes) refuse(argument, "at least " + std::to_string(bytes) + " bytes", std::to_string(m.size()));
    if (bytes == 0) return;
    const auto first = reinterpret_cast<std::uintptr_t>(m.data());
    if (first == 0) refuse(argument, "memory", "a null pointer");
    if (first % Arena::kAlign != 0) {
      refuse(argument, "memory aligned to " + std::to_string(Arena::kAlign) + " bytes",
             "an address " + std::to_string(first % Arena::kAlign) + " bytes past it");
    }
    ranges_.push_back({argument, first, first, first + bytes, true, output});  // the rest is never touched
  }

  /// No output may share memory with another argument. Slices of one packed buffer interleave without sharing, and
  /// telling them from strided views that do share is an integer program; so overlapping extents are refused only where
  /// both sides are dense, and a common first element always. Other overlaps of strided views are the caller's duty.
  void disjoint() const {
    for (const Range& a : ranges_) {
      if (!a.output) continue;
      for (const Range& b : ranges_) {
        if (&a == &b) continue;
        const bool overlap = a.low < b.high && b.low < a.high;
        // The first element of one inside the other's unbroken memory is shared for certain.
        const auto holds = [](const Range& whole, const Range& other) {
          return whole.dense && whole.low <= other.first && other.first < whole.high;
        };
        if (overlap && ((a.dense && b.dense) || a.first == b.first || holds(a, b) || holds(b, a))) {
          refuse(a.argument, "memory of its own", "memory shared with '" + b.argument + "'");
        }
      }
    }
  }

 private:
  void add_range(const TensorView& t, const char* argument, bool output) {
    std::int64_t low = 0, last = 0;  // offsets in elements
    bool fits = true;
    for (int a = 0; a < t.rank; ++a) {
      std::int64_t span = 0;
      fits = fits && !__builtin_mul_overflow(t.strides[a], t.shape[a] - 1, &span) &&
             !__builtin_add_overflow(span < 0 ? low : last, span, span < 0 ? &low : &last);
    }
    const auto size = static_cast<std::int64_t>(size_of(t.dtype));
    constexpr std::int64_t kReach = std::int64_t{1} << 60;  // elements; times 8 bytes still a difference of addresses
    if (!fits || low <= -kReach || last >= kReach) {
      refuse(argument, "strides that stay inside an address space", strides_text(t));
    }
    // `reach` is the extent of the axes seen so far, smallest steps first. A step below it lands inside them again; a
    // step above it leaves a hole.
    std::uint64_t reach = 1;
    bool dense = true;
    for (auto [stride, extent] : moving_axes(t)) {
      if (output && stride < reach) {
        refuse(argument, "an output that does not overlap itself",
               "strides " + strides_text(t) + " for shape " + shape_text(t.dims()));
      }
      dense = dense && stride <= reach;
      reach += stride * static_cast<std::uint64_t>(extent - 1);
    }
    const auto first = reinterpret_cast<std::uintptr_t>(t.data);
    ranges_.push_back({argument, first, first + static_cast<std::uintptr_t>(low * size),
                       first + static_cast<std::uintptr_t>((last + 1) * size), dense, output});
  }

  std::string operation_;
  Device device_;
  std::vector<Range> ranges_;
};

/// Shapes and types of a problem's tensors, each named once.
struct Call : Checker {
  const Problem& p;
  const Execution& execution;
  std::vector<DType> data, strength, wide;  // q k v o; beta b w; the gate and the states

  Call(const Problem& problem, Direction direction, const Execution& execution_)
      : Checker(problem, direction, execution_),
        p(problem),
        execution(execution_),
        data{p.dtype},
        strength{p.strength_dtype} {
    wide = p.dtype == DType::kF64 ? std::vector{DType::kF32, DType::kF64} : std::vector{DType::kF32};
  }

  void qk(const TensorView& t, const char* argument, Need need, bool output = false) {
    expect(t, argument, need, data, {p.B, p.T, p.H, p.K}, output);
  }
  void v(const TensorView& t, const char* argument, Need need, bool output = false) {
    expect(t, argument, need, data, {p.B, p.T, p.HV, p.V}, output);
  }
  void gate(const TensorView& t, const char* argument, Need need, bool output = false) {
    switch (gate_of(p.op)) {
      case Gate::kNone: return absent(t, argument, std::string(name(p.op)) + " has no gate");
      case Gate::kScalar: return expect(t, argument, need, wide, {p.B, p.T, p.HV}, output);
      case Gate::kVector: return expect(t, argument, need, wide, {p.B, p.T, p.HV, p.K}, output);
    }
  }
  void shared_strength(const TensorView& t, const char* argument, Need need, bool output = false) {
    if (strength_of(p.op) != Strength::kShared) {
      return absent(t, argument, std::string(name(p.op)) + " has b and w instead of beta");
    }
    expect(t, argument, need, strength, {p.B, p.T, p.HV}, output);
  }
  void own_strength(const TensorView& t, const char* argument, std::int64_t width, Need need, bool output = false) {
    if (strength_of(p.op) != Strength::kIndependent) {
      return absent(t, argument, std::string(name(p.op)) + " has beta instead of b and w");
    }
    expect(t, argument, need, strength, {p.B, p.T, p.HV, width}, output);
  }
  void state(const TensorView& t, const char* argument, bool output = false) {
    const bool kv = p.state_layout == StateLayout::kKV;
    expect(t, argument, Need::kOptional, wide, {p.sequences(), p.HV, kv ? p.K : p.V, kv ? p.V : p.K}, output);
  }

  void workspace(const Bytes& bytes, bool saved, bool dg) {
    const std::size_t unsaved = saved ? 0 : bytes.unsaved, without_dg = dg ? 0 : bytes.without_dg;
    memory(execution.workspace, "workspace", bytes.workspace + unsaved + without_dg, true);
  }

  void inputs(const Inputs& in) {
    qk(in.q, "q", Need::kRequired);
    qk(in.k, "k", Need::kRequired);
    v(in.v, "v", Need::kRequired);
    gate(in.g, "g", Need::kRequired);
    shared_strength(in.beta, "beta", Need::kRequired);
    own_strength(in.b, "b", p.K, Need::kRequired);
    own_strength(in.w, "w", p.V, Need::kRequired);
    state(in.initial_state, "initial_state");
    offsets(in.cu_seqlens);
  }

  void offsets(const TensorView& t) {
    static constexpr DType kInts[] = {DType::kI32, DType::kI64};
    if (!p.segments) return absent(t, "cu_seqlens", "the problem has no segments");
    expect(t, "cu_seqlens", Need::kRequired, kInts, {*p.segments + 1});
    if (t.device.kind != DeviceKind::kCpu) return;  // reading them would synchronise the device
    const auto at = [&](std::int64_t i) -> std::int64_t {
      const std::int64_t offset = i * t.strides[0];
      return t.dtype == DType::kI32 ? static_cast<const std::int32_t*>(t.data)[offset]
                                    : static_cast<const std::int64_t*>(t.data)[offset];
    };
    const auto entry = [](std::int64_t i) { return "entry " + std::to_string(i); };
    if (at(0) != 0) refuse("cu_seqlens", "entry 0 to be 0", std::to_string(at(0)));
    for (std::int64_t i = 1, before = 0; i <= *p.segments; ++i) {
      const std::int64_t now = at(i);
      if (now < before) {
        refuse("cu_seqlens", entry(i) + " of at least the " + std::to_string(before) + " of " + entry(i - 1),
               std::to_string(now));
      }
      if (now > p.T) refuse("cu_seqlens", entry(i) + " of at most T = " + std::to_string(p.T), std::to_string(now));
      before = now;
    }
  }
};

}  // namespace

std::string operation(const Problem& p, Direction direction) {
  return std::string(name(p.op)) + " " + std::string(name(direction));
}

void validate(const Problem& p, Direction direction, const Execution& execution) {
  const Checker check(p, direction, execution);
  const auto known = [&](const char* argument, std::string_view word) {
    if (word == "unknown") check.refuse(argument, "a value of its enum", "another one");
  };
  known("op", name(p.op));
  known("state_layout", name(p.state_layout));
  known("policy", name(p.policy));
  known("variant.graph", name(p.variant.graph));
  known("variant.intra", name(p.variant.intra));
  known("variant.gram", name(p.variant.gram));
  known("device", name(execution.device.kind));
  known("backend", name(execution.backend));

  const auto at_least = [&](const char* argument, std::int64_t value, std::int64_t least) {
    if (value < least) check.refuse(argument, "at least " + std::to_string(least), std::to_string(value));
  };
  at_least("B", p.B, 1);
  at_least("T", p.T, 0);
  at_least("H", p.H, 1);
  at_least("HV", p.HV, 1);
  at_least("K", p.K, 1);
  at_least("V", p.V, 1);
  if (p.HV % p.H != 0) check.refuse("HV", "a multiple of H = " + std::to_string(p.H), std::to_string(p.HV));
  if (p.segments) {
    at_least("segments", *p.segments, 0);
    if (p.B != 1) check.refuse("B", "1 with packed sequences", std::to_string(p.B));
  }

  // Element counts of the longest tensors and of all chunk states. Far below 2^63, so that sums of their bytes, which
  // backends form, do not overflow either.
  constexpr std::int64_t kMost = std::int64_t{1} << 52;
  const auto product = [&](const char* argument, std::initializer_list<std::int64_t> factors) {
    std::int64_t n = 1;
    for (std::int64_t factor : factors) {
      if (__builtin_mul_overflow(n, factor, &n) || n > kMost) {
        check.refuse(argument, "a product of at most 2^52", shape_text({factors.begin(), factors.size()}));
      }
    }
    return n;
  };
  const std::int64_t longest = std::max({p.K, p.V, kChunk});
  product("B, T, HV and K, V", {p.B, std::max<std::int64_t>(p.T, kChunk), p.HV, longest});
  const std::int64_t chunks = product("B, T", {p.B, p.T / kChunk + 1});
  product("sequences, HV, K, V", {p.sequences(), p.HV, longest, longest});
  product("chunks, HV, K, V", {chunks, p.HV, p.K, p.V});

  static constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  const auto floating = [&](const char* argument, DType t) {
    if (std::ranges::find(kFloats, t) == std::end(kFloats)) {
      check.refuse(argument, one_of(kFloats), std::string(name(t)));
    }
  };
  floating("dtype", p.dtype);
  floating("strength_dtype", p.strength_dtype);
  if ((p.dtype == DType::kF64) != (p.strength_dtype == DType::kF64)) {
    check.refuse("strength_dtype", "f64 with dtype f64 and only then",
                 std::string(name(p.strength_dtype)) + " with dtype " + std::string(name(p.dtype)));
  }
  if (p.scale && !std::isfinite(*p.scale)) check.refuse("scale", "a finite number", std::to_string(*p.scale));

  if (execution.device.kind == DeviceKind::kCpu && execution.stream != nullptr) {
    check.refuse("stream", "none on the cpu", "one");
  }
  constexpr int kLeastArchitecture = 80;
  if (execution.architecture != 0 && execution.device.kind == DeviceKind::kCpu) {
    check.refuse("architecture", "0 on the cpu", std::to_string(execution.architecture));
  }
  if (execution.architecture != 0 && execution.architecture < kLeastArchitecture) {
    check.refuse("architecture", "0 or at least " + std::to_string(kLeastArchitecture),
                 std::to_string(execution.architecture));
  }
  // Each thread has scratch of its own in the workspace: a bound keeps the sum of bytes from overflowing.
  constexpr int kMostThreads = 4096;
  if (execution.threads < 0 || execution.threads > kMostThreads) {
    check.refuse("threads", "0 to " + std::to_string(kMostThreads), std::to_string(execution.threads));
  }
}

void validate(const Problem& p, const ForwardArgs& args, const Execution& execution, const Bytes& bytes) {
  Call call(p, Direction::kForward, execution);
  call.inputs(args.in);
  call.v(args.o, "o", Need::kRequired, true);
  call.state(args.final_state, "final_state", true);
  if (!args.saved.empty()) call.memory(args.saved, "saved", bytes.saved, true);
  call.workspace(bytes, !args.saved.empty(), true);
  call.disjoint();
}

void validate(const Problem& p, const BackwardArgs& args, const Execution& execution, const Bytes& bytes) {
  Call call(p, Direction::kBackward, execution);
  call.inputs(args.in);
  call.v(args.d_o, "d_o", Need::kRequired);
  call.state(args.d_final_state, "d_final_state");
  call.qk(args.dq, "dq", Need::kOptional, true);
  call.qk(args.dk, "dk", Need::kOptional, true);
  call.v(args.dv, "dv", Need::kOptional, true);
  call.gate(args.dg, "dg", Need::kOptional, true);
  call.shared_strength(args.dbeta, "dbeta", Need::kOptional, true);
  call.own_strength(args.db, "db", p.K, Need::kOptional, true);
  call.own_strength(args.dw, "dw", p.V, Need::kOptional, true);
  if (!args.in.initial_state.given()) {
    call.absent(args.d_initial_state, "d_initial_state", "there is no initial_state and no gradient is invented");
  }
  call.state(args.d_initial_state, "d_initial_state", true);
  if (!args.saved.empty()) call.memory(args.saved, "saved", bytes.saved, false);
  call.workspace(bytes, !args.saved.empty(), args.dg.given());
  call.disjoint();
}

}  // namespace rewy
