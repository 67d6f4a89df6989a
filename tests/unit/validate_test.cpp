// Every refusal of a call: the four words of the error, and that nothing was written before it.
#include "common/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "common/arena.h"

namespace rewy {
namespace {

constexpr std::byte kPoison{0xA5};

/// A call with every argument its operator has, valid until a test changes something.
class Call {
 public:
  Problem p{.B = 2, .T = 3, .H = 2, .HV = 4, .K = 8, .V = 16, .policy = Policy::kSave};
  Execution execution{.threads = 1};
  Inputs in;
  ForwardArgs fwd;
  BackwardArgs bwd;
  Work work{.pairwise = -1};

  explicit Call(Operator op, DType dtype = DType::kF32, std::vector<std::int64_t> offsets = {}) {
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    p.op = op;
    p.dtype = p.strength_dtype = dtype;
    if (!offsets.empty()) {
      p.B = 1;
      p.segments = static_cast<std::int64_t>(offsets.size()) - 1;
      in.cu_seqlens = tensor(DType::kI64, {*p.segments + 1});
      std::memcpy(in.cu_seqlens.data, offsets.data(), offsets.size() * sizeof(offsets[0]));
    }
    const auto qk = [&] { return tensor(dtype, {p.B, p.T, p.H, p.K}); };
    const auto v = [&] { return tensor(dtype, {p.B, p.T, p.HV, p.V}); };
    const auto state = [&] { return tensor(wide, {p.sequences(), p.HV, p.K, p.V}); };
    in.q = qk(), in.k = qk(), in.v = v(), in.initial_state = state();
    fwd.o = v(), fwd.final_state = state();
    bwd.d_o = v(), bwd.d_final_state = state();
    bwd.dq = qk(), bwd.dk = qk(), bwd.dv = v(), bwd.d_initial_state = state();
    if (gate_of(op) == Gate::kScalar) in.g = tensor(wide, {p.B, p.T, p.HV}), bwd.dg = tensor(wide, {p.B, p.T, p.HV});
    if (gate_of(op) == Gate::kVector) {
      in.g = tensor(wide, {p.B, p.T, p.HV, p.K});
      bwd.dg = tensor(wide, {p.B, p.T, p.HV, p.K});
    }
    if (strength_of(op) == Strength::kShared) {
      in.beta = tensor(dtype, {p.B, p.T, p.HV});
      bwd.dbeta = tensor(dtype, {p.B, p.T, p.HV});
    } else {
      in.b = tensor(dtype, {p.B, p.T, p.HV, p.K}), bwd.db = tensor(dtype, {p.B, p.T, p.HV, p.K});
      in.w = v(), bwd.dw = v();
    }
    const Bytes forward_bytes = workspace_bytes(p, Direction::kForward, execution);
    const Bytes backward_bytes = workspace_bytes(p, Direction::kBackward, execution);
    saved = memory(forward_bytes.saved);
    execution.workspace = memory(std::max(forward_bytes.workspace, backward_bytes.workspace));
    execution.work = &work;
    fwd.saved = saved, bwd.saved = saved;
  }

  std::span<std::byte> saved;

  TensorView tensor(DType dtype, std::vector<std::int64_t> shape) {
    TensorView t(nullptr, dtype, shape);
    t.data = memory(static_cast<std::size_t>(t.elements()) * size_of(dtype)).data();
    return t;
  }

  std::span<std::byte> memory(std::size_t bytes) {
    // With room for the largest tensor behind it, so that tests may shift views and put one into the memory of another.
    const std::size_t lines = bytes / Arena::kAlign + 80;
    blocks_.push_back({std::make_unique<Line[]>(lines), lines});
    Block& block = blocks_.back();
    std::memset(block.lines.get(), static_cast<int>(kPoison), lines * sizeof(Line));
    return {block.lines[0].bytes, bytes};
  }

  void run(Direction direction) {
    fwd.in = bwd.in = in;
    if (direction == Direction::kForward) {
      forward(p, fwd, execution);
    } else {
      backward(p, bwd, execution);
    }
  }

  std::vector<std::byte> contents() const {
    std::vector<std::byte> all;
    for (const Block& block : blocks_) {
      all.insert(all.end(), block.lines[0].bytes, block.lines[0].bytes + block.count * sizeof(Line));
    }
    return all;
  }

 private:
  struct alignas(Arena::kAlign) Line {
    std::byte bytes[Arena::kAlign];
  };
  struct Block {
    std::unique_ptr<Line[]> lines;
    std::size_t count;
  };
  std::vector<Block> blocks_;
};

constexpr Direction kBoth[] = {Direction::kForward, Direction::kBackward};

void expect_refusal(Call& call, Direction direction, const std::string& argument, const std::string& expected,
                    const std::string& actual) {
  SCOPED_TRACE(std::string(name(direction)) + " " + argument + " " + expected);
  const std::vector<std::byte> before = call.contents();
  const std::string op = std::string(name(call.p.op)) + " " + std::string(name(direction));
  try {
    call.run(direction);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.operation(), op);
    EXPECT_EQ(e.argument(), argument);
    EXPECT_EQ(e.expected(), expected);
    EXPECT_EQ(e.actual(), actual);
    EXPECT_EQ(std::string(e.what()), op + ": argument '" + argument + "': expected " + expected + ", got " + actual);
  }
  EXPECT_TRUE(call.contents() == before) << "something was written";
  EXPECT_EQ(call.work.pairwise, -1) << "work was written";
}

using Change = std::function<void(Call&)>;

struct Refusal {
  Change change;
  std::string argument, expected, actual;
};

void expect_all(Operator op, std::span<const Direction> directions, const std::vector<Refusal>& table,
                DType dtype = DType::kF32) {
  for (const Refusal& row : table) {
    for (Direction direction : directions) {
      Call call(op, dtype);
      row.change(call);
      expect_refusal(call, direction, row.argument, row.expected, row.actual);
    }
  }
}

TEST(Validate, Sizes) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 44;
  expect_all(Operator::kKda, kBoth,
             {
                 {[](Call& c) { c.p.B = 0; }, "B", "at least 1", "0"},
                 {[](Call& c) { c.p.T = -1; }, "T", "at least 0", "-1"},
                 {[](Call& c) { c.p.H = 0; }, "H", "at least 1", "0"},
                 {[](Call& c) { c.p.HV = 0; }, "HV", "at least 1", "0"},
                 {[](Call& c) { c.p.HV = 3; }, "HV", "a multiple of H = 2", "3"},
                 {[](Call& c) { c.p.H = 8; }, "HV", "a multiple of H = 8", "4"},
                 {[](Call& c) { c.p.K = 0; }, "K", "at least 1", "0"},
                 {[](Call& c) { c.p.V = -16; }, "V", "at least 1", "-16"},
                 {[](Call& c) { c.p.segments = -1; }, "segments", "at least 0", "-1"},
                 {[](Call& c) { c.p.segments = 2; }, "B", "1 with packed sequences", "2"},
                 {[](Call& c) { c.p.T = kHuge; }, "B, T, HV and K, V", "a product of at most 2^52",
                  "[2, 17592186044416, 4, 64]"},
                 {[](Call& c) { c.p.T = std::numeric_limits<std::int64_t>::max(); }, "B, T, HV and K, V",
                  "a product of at most 2^52", "[2, 9223372036854775807, 4, 64]"},
                 {[](Call& c) { c.p.K = kHuge; }, "B, T, HV and K, V", "a product of at most 2^52",
                  "[2, 64, 4, 17592186044416]"},
                 {[](Call& c) { c.p.B = 1, c.p.segments = std::numeric_limits<std::int64_t>::max(); },
                  "sequences, HV, K, V", "a product of at most 2^52", "[9223372036854775807, 4, 64, 64]"},
                 {[](Call& c) { c.p.B = 1, c.p.T = kHuge / 16, c.p.HV = 2, c.p.K = c.p.V = 1024; }, "chunks, HV, K, V",
                  "a product of at most 2^52", "[17179869185, 2, 1024, 1024]"},
             });
}

TEST(Validate, TypesOfTheProblem) {
  const std::string floats = "f64, f32, bf16 or f16";
  expect_all(
      Operator::kKda, kBoth,
      {
          {[](Call& c) { c.p.dtype = DType::kI32; }, "dtype", floats, "i32"},
          {[](Call& c) { c.p.strength_dtype = DType::kI64; }, "strength_dtype", floats, "i64"},
          {[](Call& c) { c.p.dtype = DType::kF64; }, "strength_dtype", "f64 with dtype f64", "f32"},
          {[](Call& c) { c.p.strength_dtype = DType::kF64; }, "strength_dtype", "f32, bf16 or f16 with dtype f32",
           "f64"},
          {[](Call& c) { c.p.scale = std::numeric_limits<double>::infinity(); }, "scale", "a finite number", "inf"},
          {[](Call& c) { c.p.policy = static_cast<Policy>(9); }, "policy", "a value of its enum", "another one"},
          {[](Call& c) { c.p.state_layout = static_cast<StateLayout>(9); }, "state_layout", "a value of its enum",
           "another one"},
          {[](Call& c) { c.p.op = static_cast<Operator>(9); }, "op", "a value of its enum", "another one"},
          {[](Call& c) { c.p.variant.graph = static_cast<Graph>(9); }, "variant.graph", "a value of its enum",
           "another one"},
          {[](Call& c) { c.p.variant.intra = static_cast<Intra>(9); }, "variant.intra", "a value of its enum",
           "another one"},
          {[](Call& c) { c.p.variant.gram = static_cast<Gram>(9); }, "variant.gram", "a value of its enum",
           "another one"},
      });
}

TEST(Validate, Execution) {
  expect_all(Operator::kKda, kBoth,
             {
                 {[](Call& c) { c.execution.threads = -2; }, "threads", "0 to 4096", "-2"},
                 {[](Call& c) { c.execution.threads = 4097; }, "threads", "0 to 4096", "4097"},
                 {[](Call& c) { c.execution.architecture = 80; }, "architecture", "0 on the cpu", "80"},
                 {[](Call& c) { c.execution.stream = &c; }, "stream", "none on the cpu", "one"},
                 {[](Call& c) { c.execution.backend = static_cast<Backend>(9); }, "backend", "a value of its enum",
                  "another one"},
                 {[](Call& c) { c.execution.schedule = static_cast<Schedule>(9); }, "schedule", "a value of its enum",
                  "another one"},
                 {[](Call& c) { c.execution.device.kind = static_cast<DeviceKind>(9); }, "device",
                  "a value of its enum", "another one"},
             });
}

TEST(Validate, Memory) {
  for (Direction direction : kBoth) {
    Call call(Operator::kKda);
    const std::size_t need = workspace_bytes(call.p, direction, call.execution).workspace;
    const std::size_t saved = workspace_bytes(call.p, direction, call.execution).saved;
    const auto whole = call.execution.workspace;
    const auto at_least = [](std::size_t n) { return "at least " + std::to_string(n) + " bytes"; };
    call.execution.workspace = {};
    expect_refusal(call, direction, "workspace", at_least(need), "0");
    call.execution.workspace = whole.first(need - 1);
    expect_refusal(call, direction, "workspace", at_least(need), std::to_string(need - 1));
    call.execution.workspace = {whole.data() + 4, whole.size()};
    expect_refusal(call, direction, "workspace", "memory aligned to 64 bytes", "an address 4 bytes past it");
    call.execution.workspace = std::span<std::byte>(static_cast<std::byte*>(nullptr), need);
    expect_refusal(call, direction, "workspace", "memory", "a null pointer");
    call.execution.workspace = whole;

    call.fwd.saved = call.saved.first(1), call.bwd.saved = call.saved.first(1);
    expect_refusal(call, direction, "saved", at_least(saved), "1");
    call.fwd.saved = {call.saved.data() + 32, call.saved.size()}, call.bwd.saved = call.fwd.saved;
    expect_refusal(call, direction, "saved", "memory aligned to 64 bytes", "an address 32 bytes past it");
    call.fwd.saved = whole.first(saved), call.bwd.saved = whole.first(saved);
    const bool forward = direction == Direction::kForward;
    expect_refusal(call, direction, forward ? "saved" : "workspace", "memory of its own",
                   forward ? "memory shared with 'workspace'" : "memory shared with 'saved'");
  }
}

/// A tensor of a call: where it is, its name, and what the call expects of it.
struct Place {
  std::function<TensorView&(Call&)> at;
  const char* name;
  std::string shape;
  std::string dtypes;
  bool required;
};

const std::string kQk = "[2, 3, 2, 8]", kV = "[2, 3, 4, 16]", kHeads = "[2, 3, 4]", kKeys = "[2, 3, 4, 8]",
                  kState = "[2, 4, 8, 16]";

std::vector<Place> inputs(Operator op) {
  std::vector<Place> places{
      {[](Call& c) -> TensorView& { return c.in.q; }, "q", kQk, "f32", true},
      {[](Call& c) -> TensorView& { return c.in.k; }, "k", kQk, "f32", true},
      {[](Call& c) -> TensorView& { return c.in.v; }, "v", kV, "f32", true},
      {[](Call& c) -> TensorView& { return c.in.initial_state; }, "initial_state", kState, "f32", false},
  };
  const Gate gate = gate_of(op);
  if (gate != Gate::kNone) {
    places.push_back(
        {[](Call& c) -> TensorView& { return c.in.g; }, "g", gate == Gate::kScalar ? kHeads : kKeys, "f32", true});
  }
  if (strength_of(op) == Strength::kShared) {
    places.push_back({[](Call& c) -> TensorView& { return c.in.beta; }, "beta", kHeads, "f32", true});
  } else {
    places.push_back({[](Call& c) -> TensorView& { return c.in.b; }, "b", kKeys, "f32", true});
    places.push_back({[](Call& c) -> TensorView& { return c.in.w; }, "w", kV, "f32", true});
  }
  return places;
}

std::vector<Place> outputs(Operator op, Direction direction) {
  if (direction == Direction::kForward) {
    return {{[](Call& c) -> TensorView& { return c.fwd.o; }, "o", kV, "f32", true},
            {[](Call& c) -> TensorView& { return c.fwd.final_state; }, "final_state", kState, "f32", false}};
  }
  std::vector<Place> places{
      {[](Call& c) -> TensorView& { return c.bwd.dq; }, "dq", kQk, "f32", false},
      {[](Call& c) -> TensorView& { return c.bwd.dk; }, "dk", kQk, "f32", false},
      {[](Call& c) -> TensorView& { return c.bwd.dv; }, "dv", kV, "f32", false},
      {[](Call& c) -> TensorView& { return c.bwd.d_initial_state; }, "d_initial_state", kState, "f32", false},
  };
  const Gate gate = gate_of(op);
  if (gate != Gate::kNone) {
    places.push_back(
        {[](Call& c) -> TensorView& { return c.bwd.dg; }, "dg", gate == Gate::kScalar ? kHeads : kKeys, "f32", false});
  }
  if (strength_of(op) == Strength::kShared) {
    places.push_back({[](Call& c) -> TensorView& { return c.bwd.dbeta; }, "dbeta", kHeads, "f32", false});
  } else {
    places.push_back({[](Call& c) -> TensorView& { return c.bwd.db; }, "db", kKeys, "f32", false});
    places.push_back({[](Call& c) -> TensorView& { return c.bwd.dw; }, "dw", kV, "f32", false});
  }
  return places;
}

std::vector<Place> all(Operator op, Direction direction) {
  std::vector<Place> places = inputs(op);
  if (direction == Direction::kBackward) {
    places.push_back({[](Call& c) -> TensorView& { return c.bwd.d_o; }, "d_o", kV, "f32", true});
    places.push_back(
        {[](Call& c) -> TensorView& { return c.bwd.d_final_state; }, "d_final_state", kState, "f32", false});
  }
  for (Place& place : outputs(op, direction)) places.push_back(place);
  return places;
}

constexpr Operator kOperators[] = {Operator::kDeltaNet, Operator::kGdn, Operator::kKda, Operator::kGdn2};

TEST(Validate, EveryTensor) {
  for (Operator op : kOperators) {
    for (Direction direction : kBoth) {
      for (const Place& place : all(op, direction)) {
        const auto refuses = [&](const Change& change, const std::string& expected, const std::string& actual) {
          Call call(op);
          change(call);
          expect_refusal(call, direction, place.name, expected, actual);
        };
        if (place.required) {
          refuses([&](Call& c) { place.at(c) = {}; }, "a tensor of shape " + place.shape, "none");
        }
        refuses([&](Call& c) { place.at(c) = TensorView(place.at(c).data, DType::kF32, {7}); }, "shape " + place.shape,
                "[7]");
        const std::string other_shape = "[3" + place.shape.substr(2);
        refuses([&](Call& c) { place.at(c).shape[0] = 3; }, "shape " + place.shape, other_shape);
        refuses([&](Call& c) { place.at(c).dtype = DType::kI32; }, "dtype " + place.dtypes, "i32");
        refuses([&](Call& c) { place.at(c).dtype = DType::kF64; }, "dtype " + place.dtypes, "f64");
        refuses([&](Call& c) { place.at(c).device = {DeviceKind::kCuda, 2}; }, "a tensor on cpu", "one on cuda:2");
        refuses([&](Call& c) { place.at(c).data = nullptr; }, "data", "a null pointer");
        refuses([&](Call& c) { place.at(c).data = static_cast<char*>(place.at(c).data) + 2; },
                "data aligned to the 4 bytes of an element", "an address 2 bytes past it");
      }
    }
  }
}

TEST(Validate, RankOutOfRange) {
  // Not reachable through the constructors, but the members are public.
  for (int rank : {-1, 5, 1000}) {
    Call call(Operator::kKda);
    call.in.k.rank = rank;
    expect_refusal(call, Direction::kForward, "k", "4 axes", std::to_string(rank));
  }
}

TEST(Validate, Strides) {
  Call call(Operator::kKda);
  call.in.k.strides[0] = std::numeric_limits<std::int64_t>::min();
  expect_refusal(call, Direction::kForward, "k", "strides that stay inside an address space",
                 "[-9223372036854775808, 16, 8, 1]");
  call.in.k.strides[0] = std::int64_t{1} << 61;
  expect_refusal(call, Direction::kForward, "k", "strides that stay inside an address space",
                 "[2305843009213693952, 16, 8, 1]");
}

TEST(Validate, ArgumentsOfOtherOperators) {
  const auto extra = [](Operator op, const Change& change, Direction direction, const char* argument,
                        const std::string& why, int rank) {
    Call call(op);
    change(call);
    expect_refusal(call, direction, argument, "no tensor, as " + why, "one of rank " + std::to_string(rank));
  };
  for (Direction direction : kBoth) {
    extra(
        Operator::kDeltaNet,
        [](Call& c) {
          c.in.g = c.tensor(DType::kF32, {2, 3, 4});
        },
        direction, "g", "deltanet has no gate", 3);
    extra(
        Operator::kGdn2,
        [](Call& c) {
          c.in.beta = c.tensor(DType::kF32, {2, 3, 4});
        },
        direction, "beta", "gdn2 has b and w instead of beta", 3);
    extra(
        Operator::kGdn, [](Call& c) { c.in.cu_seqlens = c.tensor(DType::kI32, {3}); }, direction, "cu_seqlens",
        "the problem has no segments", 1);
    for (Operator op : {Operator::kDeltaNet, Operator::kGdn, Operator::kKda}) {
      const std::string why = std::string(name(op)) + " has beta instead of b and w";
      extra(
          op,
          [](Call& c) {
            c.in.b = c.tensor(DType::kF32, {2, 3, 4, 8});
          },
          direction, "b", why, 4);
      extra(
          op,
          [](Call& c) {
            c.in.w = c.tensor(DType::kF32, {2, 3, 4, 16});
          },
          direction, "w", why, 4);
    }
  }
  const Direction backward = Direction::kBackward;
  extra(
      Operator::kDeltaNet,
      [](Call& c) {
        c.bwd.dg = c.tensor(DType::kF32, {2, 3, 4});
      },
      backward, "dg", "deltanet has no gate", 3);
  extra(
      Operator::kGdn2,
      [](Call& c) {
        c.bwd.dbeta = c.tensor(DType::kF32, {2, 3, 4});
      },
      backward, "dbeta", "gdn2 has b and w instead of beta", 3);
  extra(
      Operator::kKda,
      [](Call& c) {
        c.bwd.db = c.tensor(DType::kF32, {2, 3, 4, 8});
      },
      backward, "db", "kda has beta instead of b and w", 4);
  extra(
      Operator::kKda,
      [](Call& c) {
        c.bwd.dw = c.tensor(DType::kF32, {2, 3, 4, 16});
      },
      backward, "dw", "kda has beta instead of b and w", 4);
  extra(
      Operator::kKda, [](Call& c) { c.in.initial_state = {}; }, backward, "d_initial_state",
      "there is no initial_state and no gradient is invented", 4);
}

TEST(Validate, StateLayout) {
  Call call(Operator::kKda);
  call.p.state_layout = StateLayout::kVK;
  expect_refusal(call, Direction::kForward, "initial_state", "shape [2, 4, 16, 8]", "[2, 4, 8, 16]");
}

TEST(Validate, OutputsDoNotOverlapThemselves) {
  for (Direction direction : kBoth) {
    for (const Place& place : outputs(Operator::kKda, direction)) {
      for (std::int64_t stride : {0, 1, -1}) {
        Call call(Operator::kKda);
        TensorView& t = place.at(call);
        t.strides[1] = stride;
        expect_refusal(call, direction, place.name, "an output that does not overlap itself",
                       "strides " + shape_text({t.strides.data(), static_cast<std::size_t>(t.rank)}) + " for shape " +
                           place.shape);
      }
    }
  }
}

TEST(Validate, OutputsHaveMemoryOfTheirOwn) {
  for (Operator op : kOperators) {
    for (Direction direction : kBoth) {
      for (const Place& output : outputs(op, direction)) {
        for (const Place& other : all(op, direction)) {
          if (std::string(other.name) == output.name) continue;
          Call call(op);
          output.at(call).data = static_cast<float*>(other.at(call).data) + 1;
          const auto outs = outputs(op, direction);
          const bool two_outputs =
              std::ranges::any_of(outs, [&](const Place& x) { return std::string(x.name) == other.name; });
          const std::vector<std::byte> before = call.contents();
          try {
            call.run(direction);
            ADD_FAILURE() << output.name << " accepted inside " << other.name;
          } catch (const Error& e) {
            EXPECT_EQ(e.expected(), "memory of its own");
            const std::string shared = "memory shared with '";
            const bool named = e.argument() == output.name && e.actual() == shared + other.name + "'";
            const bool swapped = e.argument() == other.name && e.actual() == shared + output.name + "'";
            EXPECT_TRUE(named || (two_outputs && swapped)) << e.what();
          }
          EXPECT_TRUE(call.contents() == before);
        }
      }
    }
  }
}

TEST(Validate, OutputsKeepOutOfWorkspaceAndSaved) {
  Call call(Operator::kGdn);
  call.fwd.o.data = call.execution.workspace.data();
  expect_refusal(call, Direction::kForward, "o", "memory of its own", "memory shared with 'workspace'");
  call.fwd.o.data = call.saved.data();
  expect_refusal(call, Direction::kForward, "o", "memory of its own", "memory shared with 'saved'");
  call.bwd.dq.data = call.saved.data();
  expect_refusal(call, Direction::kBackward, "dq", "memory of its own", "memory shared with 'saved'");
}

TEST(Validate, StridedOutputFromTheSameElement) {
  Call call(Operator::kGdn);
  const std::vector<std::int64_t> strides{3 * 64, 64, 32, 1};
  call.in.q = call.tensor(DType::kF32, {2, 3, 2, 32});
  call.in.q.shape[3] = 8;
  call.bwd.dq = call.in.q;
  expect_refusal(call, Direction::kBackward, "dq", "memory of its own", "memory shared with 'q'");
}

TEST(Validate, Offsets) {
  const auto refuses = [](std::vector<std::int64_t> offsets, const std::string& expected, const std::string& actual) {
    for (Direction direction : kBoth) {
      for (bool narrow : {false, true}) {
        Call call(Operator::kKda, DType::kF32, offsets);
        if (narrow) {
          const std::vector<std::int32_t> small(offsets.begin(), offsets.end());
          call.in.cu_seqlens = call.tensor(DType::kI32, {static_cast<std::int64_t>(small.size())});
          std::memcpy(call.in.cu_seqlens.data, small.data(), small.size() * sizeof(small[0]));
        }
        expect_refusal(call, direction, "cu_seqlens", expected, actual);
      }
    }
  };
  refuses({1, 3}, "entry 0 to be 0", "1");
  refuses({-1, 3}, "entry 0 to be 0", "-1");
  refuses({5}, "entry 0 to be 0", "5");
  refuses({0, 2, 1, 3}, "entry 2 of at least the 2 of entry 1", "1");
  refuses({0, -1, 3}, "entry 1 of at least the 0 of entry 0", "-1");
  refuses({0, 1, 4}, "entry 2 of at most T = 3", "4");

  Call call(Operator::kKda, DType::kF32, {0, 1, 3});
  call.in.cu_seqlens.dtype = DType::kF32;
  expect_refusal(call, Direction::kForward, "cu_seqlens", "dtype i32 or i64", "f32");
  call.in.cu_seqlens.dtype = DType::kI64;
  call.in.cu_seqlens.shape[0] = 2;
  expect_refusal(call, Direction::kForward, "cu_seqlens", "shape [3]", "[2]");
  call.in.cu_seqlens = {};
  expect_refusal(call, Direction::kForward, "cu_seqlens", "a tensor of shape [3]", "none");
}

// `unsaved` bytes come on top exactly where nothing is saved.
TEST(Validate, MemoryWhereNothingIsSaved) {
  for (Direction direction : kBoth) {
    Call call(Operator::kKda);
    call.fwd.in = call.bwd.in = call.in;
    Bytes bytes = workspace_bytes(call.p, direction, call.execution);
    bytes.unsaved = 64;
    call.execution.workspace = call.execution.workspace.first(bytes.workspace);
    const auto check = [&] {
      if (direction == Direction::kForward) {
        validate(call.p, call.fwd, call.execution, bytes);
      } else {
        validate(call.p, call.bwd, call.execution, bytes);
      }
    };
    EXPECT_NO_THROW(check());
    call.fwd.saved = {}, call.bwd.saved = {};
    try {
      check();
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.argument(), "workspace");
      EXPECT_EQ(e.expected(), "at least " + std::to_string(bytes.workspace + 64) + " bytes");
      EXPECT_EQ(e.actual(), std::to_string(bytes.workspace));
    }
    call.execution.workspace = {call.execution.workspace.data(), bytes.workspace + 64};
    EXPECT_NO_THROW(check());
  }
}

// `without_dg` bytes come on top exactly where a backward is given no dg, whatever is saved.
TEST(Validate, MemoryWithoutDg) {
  for (bool saved : {false, true}) {
    for (bool dg : {false, true}) {
      Call call(Operator::kKda);
      call.fwd.in = call.bwd.in = call.in;
      if (!saved) call.fwd.saved = {}, call.bwd.saved = {};
      if (!dg) call.bwd.dg = {};
      const Bytes bytes{.workspace = 128, .saved = 0, .unsaved = 64, .without_dg = 192};
      const std::size_t fwd = 128 + (saved ? 0 : 64), bwd = fwd + (dg ? 0 : 192);
      std::vector<std::byte> memory(bwd + Arena::kAlign);
      const auto past = reinterpret_cast<std::uintptr_t>(memory.data()) % Arena::kAlign;
      std::byte* const base = memory.data() + (Arena::kAlign - past) % Arena::kAlign;
      call.execution.workspace = {base, fwd};
      EXPECT_NO_THROW(validate(call.p, call.fwd, call.execution, bytes));
      call.execution.workspace = {base, bwd};
      EXPECT_NO_THROW(validate(call.p, call.bwd, call.execution, bytes));
      call.execution.workspace = {base, bwd - 1};
      try {
        validate(call.p, call.bwd, call.execution, bytes);
        ADD_FAILURE() << "accepted";
      } catch (const Error& e) {
        EXPECT_EQ(e.argument(), "workspace");
        EXPECT_EQ(e.expected(), "at least " + std::to_string(bwd) + " bytes");
      }
    }
  }
}

TEST(Validate, Architecture) {
  const Call call(Operator::kKda, DType::kBF16);
  const auto check = [&](int architecture) {
    validate(call.p, Direction::kForward, {.device = {DeviceKind::kCuda, 0}, .architecture = architecture});
  };
  for (const int architecture : {0, 80, 86, 90, 120}) EXPECT_NO_THROW(check(architecture)) << architecture;
  for (const int architecture : {-80, 1, 8, 79}) {
    try {
      check(architecture);
      ADD_FAILURE() << architecture;
    } catch (const Error& e) {
      EXPECT_EQ(e.argument(), "architecture");
      EXPECT_EQ(e.expected(), "0 or at least 80");
      EXPECT_EQ(e.actual(), std::to_string(architecture));
    }
  }
}

// Nothing on a device is read: neither offsets nor anything else.
TEST(Validate, TouchesNoDeviceMemory) {
  Call call(Operator::kKda, DType::kBF16, {0, 1, 3});
  const Device device{DeviceKind::kCuda, 1};
  auto elsewhere = [&, next = std::uintptr_t{1} << 44](TensorView& t) mutable {
    if (t.given()) t.device = device, t.data = reinterpret_cast<void*>(next += 1 << 20);
  };
  for (TensorView* t :
       {&call.in.q, &call.in.k, &call.in.v, &call.in.g, &call.in.beta, &call.in.initial_state, &call.in.cu_seqlens,
        &call.fwd.o, &call.fwd.final_state, &call.bwd.d_o, &call.bwd.d_final_state, &call.bwd.dq, &call.bwd.dk,
        &call.bwd.dv, &call.bwd.dg, &call.bwd.dbeta, &call.bwd.d_initial_state}) {
    elsewhere(*t);
  }
  call.fwd.saved = {reinterpret_cast<std::byte*>(std::uintptr_t{1} << 45), 4096}, call.bwd.saved = call.fwd.saved;
  call.execution = {
      .device = device, .stream = &call, .workspace = {reinterpret_cast<std::byte*>(std::uintptr_t{1} << 46), 4096}};
  call.fwd.in = call.bwd.in = call.in;
  const Bytes bytes{.workspace = 4096, .saved = 4096};
  for (Direction direction : kBoth) EXPECT_NO_THROW(validate(call.p, direction, call.execution));
  EXPECT_NO_THROW(validate(call.p, call.fwd, call.execution, bytes));
  EXPECT_NO_THROW(validate(call.p, call.bwd, call.execution, bytes));
  call.bwd.dq.data = call.bwd.dk.data;  // aliasing is found from the addresses
  EXPECT_THROW(validate(call.p, call.bwd, call.execution, bytes), Error);
  call.fwd.o = TensorView(call.fwd.saved.data() + 8192, DType::kBF16, {1, 3, 4, 16});
  EXPECT_THROW(validate(call.p, call.fwd, call.execution, bytes), Error);  // a CPU tensor among them
}

// Validation alone, so that what is accepted does not depend on what a backend computes from poison.
void expect_accepted(Call& call) {
  call.fwd.in = call.bwd.in = call.in;
  for (Direction direction : kBoth) {
    const Bytes bytes = workspace_bytes(call.p, direction, call.execution);
    try {
      validate(call.p, direction, call.execution);
      if (direction == Direction::kForward) {
        validate(call.p, call.fwd, call.execution, bytes);
      } else {
        validate(call.p, call.bwd, call.execution, bytes);
      }
    } catch (const Error& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

TEST(Validate, AcceptsWholeCalls) {
  for (Operator op : kOperators) {
    for (DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      Call call(op, dtype);
      expect_accepted(call);
      for (const std::vector<std::int64_t>& offsets :
           {std::vector<std::int64_t>{0}, {0, 0, 0}, {0, 1, 2, 3}, {0, 0, 2, 2}, {0, 3, 3}}) {
        Call packed(op, dtype, offsets);
        expect_accepted(packed);
      }
    }
  }
}

TEST(Validate, AcceptsOptionalArgumentsLeftOut) {
  Call call(Operator::kGdn2);
  call.fwd.saved = {}, call.bwd.saved = {};
  call.fwd.final_state = {};
  call.in.initial_state = {};
  const TensorView d_o = call.bwd.d_o;
  call.bwd = {};
  call.bwd.d_o = d_o;
  expect_accepted(call);
}

TEST(Validate, AcceptsEmptyTensorsWithoutData) {
  for (Operator op : kOperators) {
    Call call(op);
    call.p.T = 0;
    for (Direction direction : kBoth) {
      for (const Place& place : all(op, direction)) {
        TensorView& t = place.at(call);
        if (place.shape == kState) continue;
        t.shape[1] = 0;
        t.data = nullptr;
      }
    }
    expect_accepted(call);
  }
}

TEST(Validate, AcceptsAnyStridesOfInputs) {
  Call call(Operator::kKda);
  call.in.q.strides = {0, 0, 0, 0};
  call.in.g.strides = {96, 32, 0, 1};  // one gate for all heads
  call.in.k.data = static_cast<float*>(call.in.k.data) + 7;
  call.in.k.strides[3] = -1;
  call.in.beta = call.in.q;  // inputs may share memory
  call.in.beta.rank = 3, call.in.beta.shape = {2, 3, 4}, call.in.beta.strides = {0, 0, 0};
  expect_accepted(call);
}

TEST(Validate, AcceptsSlicesOfOnePackedBuffer) {
  Call call(Operator::kKda);
  // [B, T, head, q | k | v] of an input and of its gradient.
  const auto slices = [&](TensorView& q, TensorView& k, TensorView& v) {
    call.p.HV = 2;
    const TensorView whole = call.tensor(DType::kF32, {2, 3, 2, 8 + 8 + 16});
    q = k = v = whole;
    k.data = static_cast<float*>(whole.data) + 8, v.data = static_cast<float*>(whole.data) + 16;
    q.shape[3] = k.shape[3] = 8, v.shape[3] = 16;
  };
  slices(call.in.q, call.in.k, call.in.v);
  slices(call.bwd.dq, call.bwd.dk, call.bwd.dv);
  call.fwd.o.shape[2] = call.bwd.d_o.shape[2] = 2;
  for (TensorView* t : {&call.in.g, &call.in.beta, &call.bwd.dg, &call.bwd.dbeta}) t->shape[2] = 2;
  for (TensorView* t :
       {&call.in.initial_state, &call.fwd.final_state, &call.bwd.d_final_state, &call.bwd.d_initial_state}) {
    t->shape[1] = 2;
  }
  expect_accepted(call);
}

TEST(Validate, AcceptsOddStridesOfSingletonAxes) {
  Call call(Operator::kKda, DType::kF32, {0, 3});
  call.bwd.dq.strides[0] = 0;
  call.fwd.o.strides[0] = 1;
  call.in.initial_state.strides[0] = std::numeric_limits<std::int64_t>::min();
  expect_accepted(call);
}

TEST(Validate, GateAndStatesAreF32OrF64WhereDtypeIsF64) {
  Call call(Operator::kKda, DType::kF64);
  call.in.g.dtype = DType::kF32;
  call.fwd.final_state.dtype = DType::kF32;
  expect_accepted(call);
  call.in.g.dtype = DType::kBF16;
  expect_refusal(call, Direction::kForward, "g", "dtype f32 or f64", "bf16");
  Call half(Operator::kKda, DType::kBF16);
  half.in.g.dtype = DType::kBF16;
  expect_refusal(half, Direction::kForward, "g", "dtype f32", "bf16");
}

TEST(Validate, ReadsNoValues) {
  Call call(Operator::kKda);
  for (float* x = static_cast<float*>(call.in.k.data); x < static_cast<float*>(call.in.k.data) + 96; ++x) {
    *x = std::numeric_limits<float>::quiet_NaN();
  }
  expect_accepted(call);
}

TEST(Validate, WorkIsZeroedOnceAccepted) {
  Call call(Operator::kDeltaNet);
  call.execution.backend = Backend::kReference;  // which counts nothing
  call.run(Direction::kForward);
  EXPECT_EQ(call.work.pairwise, 0);
}

}  // namespace
}  // namespace rewy
