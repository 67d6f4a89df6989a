// The host side of the CUDA backend, without a GPU: what it declines, its memory, the strides it refuses.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "common/backend.h"
#include "cuda/kernels.h"
#include "cuda/sm90a/scan.h"
#include "cuda/workspace.h"

namespace rewy::cuda {
namespace {

constexpr Direction kBoth[] = {Direction::kForward, Direction::kBackward};
constexpr Policy kPolicies[] = {Policy::kRecompute, Policy::kSave};
constexpr std::size_t kMiB = std::size_t{1} << 20;
const Execution kOnCuda{.device = {DeviceKind::kCuda, 0}};

/// (1, 8192, 16) of KDA, K = V = 128.
Problem large() {
  return {.op = Operator::kKda,
          .T = 8192,
          .H = 16,
          .HV = 16,
          .K = 128,
          .V = 128,
          .dtype = DType::kBF16,
          .strength_dtype = DType::kBF16};
}

Problem with(auto&& change) {
  Problem p = large();
  change(p);
  return p;
}

std::string declines(const Problem& p) {
  return kCudaBackend.declines(p, Direction::kBackward, kOnCuda);
}

template <class Call>
Error refusal(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error("nothing", "thrown", "", "");
}

bool has_device() {
  int count = 0;
  const bool has = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();
  return has;
}

TEST(CudaDeclines, ByProblem) {
  const auto dtype = [](DType t) { return [=](Problem& p) { p.dtype = t; }; };
  EXPECT_EQ(declines(with(dtype(DType::kF32))), "dtype f32 is neither bf16 nor f16");
  EXPECT_EQ(declines(with(dtype(DType::kF64))), "dtype f64 is neither bf16 nor f16");
  const auto width = [](std::int64_t n) { return " = " + std::to_string(n) + " is not a multiple of 8 from 8 to 256"; };
  for (std::int64_t n : {1, 4, 12, 100, 264, 512}) {
    EXPECT_EQ(declines(with([=](Problem& p) { p.K = n; })), "K" + width(n));
    EXPECT_EQ(declines(with([=](Problem& p) { p.V = n; })), "V" + width(n));
  }
  EXPECT_EQ(declines(with([](Problem& p) { p.variant.graph = Graph::kExpanded; })),
            "the choice of a derivative graph is the CPU backend's");
  EXPECT_EQ(declines(with([](Problem& p) { p.scale = 1e300; })), "scale is beyond the range of FP32");
  EXPECT_EQ(declines(with([](Problem& p) { p.op = Operator::kGdn2, p.strength_dtype = DType::kF32; })),
            "strength_dtype f32 is not dtype bf16: b and w have the type of q");
  const char* counts = "T or chunks * HV reaches 2^31, or sequences * HV 2^26";
  EXPECT_EQ(declines(with([](Problem& p) { p.T = std::int64_t{1} << 31; })), counts);
  EXPECT_EQ(declines(with([](Problem& p) { p.B = std::int64_t{1} << 27, p.T = 1; })), counts);
  EXPECT_EQ(declines(with([](Problem& p) { p.segments = std::int64_t{1} << 27; })), counts);
}

TEST(CudaDeclines, TokenByToken) {
  Execution tokens = kOnCuda;
  tokens.schedule = Schedule::kTokens;
  const auto declines = [&](auto&& change) { return kCudaBackend.declines(with(change), Direction::kForward, tokens); };
  EXPECT_EQ(declines([](Problem& p) { p.dtype = p.strength_dtype = DType::kF64; }),
            "dtype f64 is the reference's (this one computes in FP32)");
  EXPECT_EQ(declines([](Problem& p) { p.K = 257; }), "K = 257 is above 256");
  EXPECT_EQ(declines([](Problem& p) { p.scale = 1e300; }), "scale is beyond the range of FP32");
  EXPECT_EQ(declines([](Problem& p) { p.B = std::int64_t{1} << 22; }), "sequences * HV * V / 4 reaches 2^31");
  EXPECT_EQ(kCudaBackend.declines(large(), Direction::kBackward, tokens),
            "token by token there is no backward (schedule tokens is for decoding)");
  const std::string reason = declines([](Problem&) {});
  EXPECT_EQ(reason.empty(), has_device()) << reason;
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType strength : {DType::kF32, DType::kBF16, DType::kF16}) {
      EXPECT_EQ(declines([=](Problem& p) { p.op = Operator::kGdn2, p.dtype = t, p.strength_dtype = strength; }),
                reason);
    }
  }
  EXPECT_EQ(declines([](Problem& p) { p.K = 3, p.V = 1001, p.T = std::int64_t{1} << 33; }), reason);
  EXPECT_EQ(declines([](Problem& p) { p.segments = 0; }), reason);
}

TEST(CudaBytes, TokenByTokenNone) {
  Execution tokens = kOnCuda;
  tokens.schedule = Schedule::kTokens;
  for (const std::int64_t segments : {-1, 0, 10}) {
    const Problem p = with([=](Problem& x) {
      if (segments >= 0) x.segments = segments;
    });
    const Bytes bytes = kCudaBackend.bytes(p, Direction::kForward, tokens);
    EXPECT_EQ(bytes.workspace + bytes.saved + bytes.unsaved + bytes.without_dg, 0u);
  }
}

// The figures of docs/kernels/pullback.md and of README's sentence on cards with 99 KB a block.
TEST(CudaHost, PullbackSharedMemory) {
  const auto bytes = [](Operator op, std::int64_t group) { return pullback_shared_bytes({op, DType::kBF16}, group); };
  EXPECT_EQ(bytes(Operator::kGdn, 1), 75008);
  EXPECT_EQ(bytes(Operator::kGdn, 2), 107776);
  EXPECT_EQ(bytes(Operator::kKda, 1), 113920);
  EXPECT_EQ(bytes(Operator::kGdn2, 4), 146688);
}

TEST(Architecture, OnlyLowersADevice) {
  const DeviceLimits hopper{.multiprocessors = 132, .shared_bytes_per_block = 232448, .compute_capability = 90};
  EXPECT_EQ(restricted(hopper, 0).compute_capability, 90);
  EXPECT_EQ(restricted(hopper, 80).compute_capability, 80);
  EXPECT_EQ(restricted(hopper, 120).compute_capability, 90);
  EXPECT_EQ(restricted(hopper, 80).shared_bytes_per_block, hopper.shared_bytes_per_block);
  Params p{};
  p.K = p.V = 128;
  EXPECT_FALSE(sm90a::scans_serve(p, restricted(hopper, 80)));
}

// Everything else is a question of the device alone.
TEST(CudaDeclines, ByDevice) {
  const std::string reason = declines(large());
  EXPECT_EQ(reason.empty(), has_device()) << reason;
  if (!has_device()) {
    EXPECT_EQ(reason.find("no usable CUDA device ("), 0u) << reason;
  }
  const auto same = [&](auto&& change) { EXPECT_EQ(declines(with(change)), reason); };
  for (Operator op : {Operator::kDeltaNet, Operator::kGdn, Operator::kKda, Operator::kGdn2}) {
    for (DType t : {DType::kBF16, DType::kF16}) same([=](Problem& p) { p.op = op, p.dtype = p.strength_dtype = t; });
  }
  for (DType t : {DType::kBF16, DType::kF16, DType::kF32}) same([=](Problem& p) { p.strength_dtype = t; });
  same([](Problem& p) { p.K = 8, p.V = 256; });
  same([](Problem& p) { p.T = 0; });
  same([](Problem& p) { p.segments = 100'000; });
  same([](Problem& p) { p.B = 3, p.HV = 128, p.state_layout = StateLayout::kVK; });
}

TEST(CudaDispatch, ErrorWithoutDevice) {
  if (has_device()) GTEST_SKIP() << "there is a GPU";
  for (Direction direction : kBoth) {
    const Error e = refusal([&] { workspace_bytes(large(), direction, kOnCuda); });
    EXPECT_EQ(e.argument(), "backend");
    EXPECT_EQ(e.expected(), "a backend that serves kda of dtype bf16, K = 128, V = 128 on cuda");
    EXPECT_EQ(e.actual().find("cuda: no usable CUDA device ("), 0u) << e.actual();
  }
  EXPECT_EQ(refusal([&] { forward(large(), {}, kOnCuda); }).argument(), "backend");
  EXPECT_EQ(refusal([&] { backward(large(), {}, kOnCuda); }).argument(), "backend");
}

TEST(CudaDispatch, OtherDevicesAskNoDriver) {
  EXPECT_EQ(explain(large(), Direction::kForward).text(), "cuda declines: serves cuda tensors only\ncpu serves it\n");
  const Execution forced{.backend = Backend::kCuda};
  EXPECT_EQ(refusal([&] { workspace_bytes(large(), Direction::kForward, forced); }).actual(),
            "cuda: serves cuda tensors only");
}

TEST(CudaBytes, OfTheLargestBenchmark) {
  constexpr std::size_t S = 64 * kMiB, R = 32 * kMiB, A = 16 * kMiB, E = 32 * kMiB, decay = kMiB;
  constexpr std::size_t sums = 128 * 16 * 3 * sizeof(RowSums);  // of two tiles of 64 features and the values
  for (Policy policy : kPolicies) {
    const Problem p = with([=](Problem& x) { x.policy = policy; });
    const bool save = policy == Policy::kSave;
    const Bytes fwd = kCudaBackend.bytes(p, Direction::kForward, kOnCuda);
    EXPECT_EQ(fwd.workspace, 3 * E + decay);  // E, F and Qg
    EXPECT_EQ(fwd.without_dg, 0u);
    EXPECT_EQ(fwd.unsaved, 2 * A);  // A and Cq
    EXPECT_EQ(fwd.saved, 2 * A + (save ? S + R : 0));
    const Bytes bwd = kCudaBackend.bytes(p, Direction::kBackward, kOnCuda);
    EXPECT_EQ(bwd.workspace, E + decay + S + R + (save ? 0 : S + R) + sums);  // E and F lie in dg
    EXPECT_EQ(bwd.without_dg, 2 * E);
    EXPECT_EQ(bwd.unsaved, 2 * A + (save ? S + R : 0));
    EXPECT_EQ(bwd.saved, fwd.saved);
    const Problem scalar = with([=](Problem& x) { x.op = Operator::kGdn, x.policy = policy; });
    EXPECT_EQ(kCudaBackend.bytes(scalar, Direction::kForward, kOnCuda).workspace, 0u);
    const Bytes scalar_bwd = kCudaBackend.bytes(scalar, Direction::kBackward, kOnCuda);
    EXPECT_EQ(scalar_bwd.workspace, bwd.workspace - E - decay);
    EXPECT_EQ(scalar_bwd.without_dg, 0u);
    const Problem independent = with([=](Problem& x) { x.op = Operator::kGdn2, x.policy = policy; });
    EXPECT_EQ(kCudaBackend.bytes(independent, Direction::kBackward, kOnCuda).workspace, bwd.workspace - sums);
  }
}

TEST(CudaBytes, GrowLinearlyWithT) {
  for (Direction direction : kBoth) {
    for (Policy policy : kPolicies) {
      for (std::int64_t segments : {-1, 10}) {
        const auto at = [&](std::int64_t T) {
          return kCudaBackend.bytes(with([=](Problem& p) {
                                      p.T = T, p.policy = policy;
                                      if (segments >= 0) p.segments = segments;
                                    }),
                                    direction, kOnCuda);
        };
        const Bytes one = at(64 * 64), two = at(64 * 128), three = at(64 * 192);
        EXPECT_NEAR(static_cast<double>(three.workspace - two.workspace),
                    static_cast<double>(two.workspace - one.workspace), Arena::kAlign);
        EXPECT_EQ(three.unsaved - two.unsaved, two.unsaved - one.unsaved);
        EXPECT_EQ(three.saved - two.saved, two.saved - one.saved);
        EXPECT_EQ(three.without_dg - two.without_dg, two.without_dg - one.without_dg);
      }
    }
  }
}

// A partly filled last chunk takes a whole slot; every segment of a packed call may end in one.
TEST(CudaBytes, ChunkSlots) {
  const auto slots = [](auto&& change) {
    const Problem p = with(change);
    return kCudaBackend.bytes(p, Direction::kForward, kOnCuda).saved / (2 * 64 * 64 * 2) / 16;
  };
  EXPECT_EQ(slots([](Problem& p) { p.T = 0; }), 0u);
  EXPECT_EQ(slots([](Problem& p) { p.T = 1, p.B = 3; }), 3u);
  EXPECT_EQ(slots([](Problem& p) { p.T = 65; }), 2u);
  EXPECT_EQ(slots([](Problem& p) { p.T = 640, p.segments = 5; }), 15u);
  EXPECT_EQ(slots([](Problem& p) { p.T = 3, p.segments = 5; }), 3u);
  EXPECT_EQ(slots([](Problem& p) { p.T = 640, p.segments = 0; }), 10u);
}

// The memory carved is the memory measured; blocks follow each other without overlap.
TEST(CudaWorkspace, MeasuresWhatItCarves) {
  struct alignas(Arena::kAlign) Line {
    std::byte bytes[Arena::kAlign];
  };
  struct Choice {
    Direction direction;
    Policy policy;
    Operator op;
    bool saved, dg;
    std::int64_t segments;
  };
  const auto carves = [](const Choice& c) {
    const Problem p = with([&](Problem& x) {
      x.op = c.op, x.T = 200, x.H = 1, x.HV = 3, x.K = 24, x.V = 8, x.policy = c.policy;
      if (c.segments >= 0) x.segments = c.segments;
    });
    const bool backward = c.direction == Direction::kBackward;
    const Bytes bytes = kCudaBackend.bytes(p, c.direction, kOnCuda);
    std::vector<Line> memory((bytes.workspace + bytes.unsaved + bytes.without_dg) / sizeof(Line) + 1);
    auto* base = reinterpret_cast<std::byte*>(memory.data());
    Params at{};
    Arena arena(std::span(base, memory.size() * sizeof(Line)));
    lay_out_workspace(p, c.direction, {.saved = c.saved, .dg = c.dg}, arena, at);
    EXPECT_EQ(arena.used(), bytes.workspace + (c.saved ? 0 : bytes.unsaved) + (c.dg ? 0 : bytes.without_dg));

    const auto blocks = static_cast<std::size_t>(most_chunks(p) * p.HV) * 2;
    const std::byte* next = base;
    const auto follows = [&](const void* block, std::size_t size, bool expected) {
      EXPECT_EQ(block != nullptr, expected);
      if (block == nullptr) return;
      EXPECT_EQ(block, next);
      next += (size + Arena::kAlign - 1) / Arena::kAlign * Arena::kAlign;
    };
    const auto rows_follow = [&](const Rows& rows, bool expected) {
      follows(rows.data, 200 * 3 * 24 * 2, expected);
      if (expected) {
        EXPECT_TRUE(rows.batch == 200 * 3 * 24 && rows.token == 3 * 24 && rows.head == 24);
      }
    };
    const bool vector = c.op != Operator::kGdn, packed = p.segments.has_value();
    const bool states = backward && !(c.saved && c.policy == Policy::kSave);
    follows(at.first_chunk, (static_cast<std::size_t>(p.sequences()) + 1) * 4, packed);
    follows(at.chunk_table, static_cast<std::size_t>(most_chunks(p)) * sizeof(ChunkAt), packed);
    follows(at.a, blocks * 64 * 64, !c.saved);
    follows(at.cq, blocks * 64 * 64, !c.saved);
    follows(at.decay, blocks * 24 * 2, vector);
    rows_follow(at.query, vector);
    rows_follow(at.erase, vector && !(backward && c.dg));
    rows_follow(at.write, vector && !(backward && c.dg));
    follows(at.state_t, blocks * 8 * 24, states);
    follows(at.r_t, blocks * 8 * 64, states);
    follows(at.dstate_t, blocks * 8 * 24, backward);
    follows(at.p_t, blocks * 8 * 64, backward);
    follows(at.row_sums, blocks * sizeof(RowSums), backward && c.op != Operator::kGdn2);
    EXPECT_EQ(next, base + arena.used());
  };
  for (Direction direction : kBoth) {
    for (Policy policy : kPolicies) {
      for (Operator op : {Operator::kGdn, Operator::kKda, Operator::kGdn2}) {
        for (bool saved : {false, true}) {
          for (bool dg : {false, true}) {
            for (std::int64_t segments : {-1, 0, 7}) carves({direction, policy, op, saved, dg, segments});
          }
        }
      }
    }
  }
}

// E and F share dg's rows: 16-bit elements, the first half of each row and the second.
TEST(CudaWorkspace, OperandsInDg) {
  const Problem p = with([](Problem& x) { x.K = 24; });
  std::vector<float> dg(2 * 24);
  Params at{};
  at.dg = {dg.data(), 1000, 100, -28};
  lay_out_in_dg(p, at);
  EXPECT_EQ(at.erase.data, dg.data());
  EXPECT_EQ(at.write.data, dg.data() + 12);
  for (const Rows& rows : {at.erase, at.write}) {
    EXPECT_TRUE(rows.batch == 2000 && rows.token == 200 && rows.head == -56);
  }
}

/// A call of GDN2 or KDA on addresses that nothing reads: refused before the first launch, or it would fail there.
struct Call {
  Problem p{.B = 2, .T = 3, .H = 2, .HV = 4, .K = 16, .V = 8, .dtype = DType::kBF16, .strength_dtype = DType::kBF16};
  Inputs in;
  ForwardArgs fwd;
  BackwardArgs bwd;

  explicit Call(Operator op) {
    p.op = op;
    const DType half = DType::kBF16;
    in.q = tensor(half, p.H, p.K), in.k = tensor(half, p.H, p.K), in.v = tensor(half, p.HV, p.V);
    in.g = tensor(DType::kF32, p.HV, p.K), bwd.dg = tensor(DType::kF32, p.HV, p.K);
    in.b = tensor(half, p.HV, p.K), in.w = tensor(half, p.HV, p.V);
    fwd.o = tensor(half, p.HV, p.V), bwd.d_o = tensor(half, p.HV, p.V);
    bwd.dq = tensor(half, p.H, p.K), bwd.dk = tensor(half, p.H, p.K), bwd.dv = tensor(half, p.HV, p.V);
    bwd.db = tensor(half, p.HV, p.K), bwd.dw = tensor(half, p.HV, p.V);
  }
  TensorView tensor(DType t, std::int64_t heads, std::int64_t width) {
    next_ += 1 << 20;
    return {reinterpret_cast<void*>(next_), t, {p.B, p.T, heads, width}, {DeviceKind::kCuda, 0}};
  }
  Error refused(Direction direction) {
    fwd.in = bwd.in = in;
    return refusal([&] {
      // A device that does not exist: a call that passes its checks ends in an error of CUDA's.
      const Execution nowhere{.device = {DeviceKind::kCuda, 1 << 20}};
      if (direction == Direction::kForward) {
        kCudaBackend.forward(p, fwd, nowhere);
      } else {
        kCudaBackend.backward(p, bwd, nowhere);
      }
    });
  }

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 44;
};

struct Place {
  const char* argument;
  TensorView& (*of)(Call&);
  Direction direction;
};
const Place kPlaces[] = {
    {"q", [](Call& c) -> TensorView& { return c.in.q; }, Direction::kForward},
    {"k", [](Call& c) -> TensorView& { return c.in.k; }, Direction::kBackward},
    {"v", [](Call& c) -> TensorView& { return c.in.v; }, Direction::kForward},
    {"g", [](Call& c) -> TensorView& { return c.in.g; }, Direction::kForward},
    {"b", [](Call& c) -> TensorView& { return c.in.b; }, Direction::kBackward},
    {"w", [](Call& c) -> TensorView& { return c.in.w; }, Direction::kForward},
    {"o", [](Call& c) -> TensorView& { return c.fwd.o; }, Direction::kForward},
    {"d_o", [](Call& c) -> TensorView& { return c.bwd.d_o; }, Direction::kBackward},
    {"dq", [](Call& c) -> TensorView& { return c.bwd.dq; }, Direction::kBackward},
    {"dk", [](Call& c) -> TensorView& { return c.bwd.dk; }, Direction::kBackward},
    {"dv", [](Call& c) -> TensorView& { return c.bwd.dv; }, Direction::kBackward},
    {"dg", [](Call& c) -> TensorView& { return c.bwd.dg; }, Direction::kBackward},
    {"db", [](Call& c) -> TensorView& { return c.bwd.db; }, Direction::kBackward},
    {"dw", [](Call& c) -> TensorView& { return c.bwd.dw; }, Direction::kBackward},
};

TEST(CudaStrides, Refused) {
  for (const Place& place : kPlaces) {
    const auto expect = [&](auto&& change, bool refused) {
      Call call(Operator::kGdn2);
      change(call, place.of(call));
      const Error e = call.refused(place.direction);
      EXPECT_EQ(e.argument() == place.argument, refused) << place.argument << ": " << e.what();
      if (!refused) return;
      EXPECT_EQ(e.operation(), place.direction == Direction::kForward ? "gdn2 forward" : "gdn2 backward");
      EXPECT_EQ(e.expected(), "last axis contiguous, rows 16-byte aligned");
    };
    const auto step = [](const TensorView& t) { return static_cast<std::int64_t>(16 / size_of(t.dtype)); };
    expect([](Call&, TensorView&) {}, false);
    expect([](Call&, TensorView& t) { t.strides[3] = 2; }, true);
    for (int axis : {0, 1, 2}) {
      expect([&](Call&, TensorView& t) { t.strides[axis] += step(t) / 2; }, true);
      expect([&](Call&, TensorView& t) { t.strides[axis] += 3 * step(t); }, false);
    }
    expect([](Call&, TensorView& t) { t.data = static_cast<char*>(t.data) + 8; }, true);
    expect([](Call&, TensorView& t) { t.data = static_cast<char*>(t.data) + 16; }, false);
    // The stride along one element is never used.
    expect([](Call&, TensorView& t) { t.shape[0] = 1, t.strides[0] = 7; }, false);
    // Nor any of a tensor without elements.
    expect([](Call&, TensorView& t) { t.shape[1] = 0, t.strides[2] = 7; }, false);
  }
}

TEST(CudaStrides, TextOfTheError) {
  Call call(Operator::kGdn2);
  call.in.q.strides[1] = 33;
  EXPECT_STREQ(call.refused(Direction::kForward).what(),
               "gdn2 forward: argument 'q': expected last axis contiguous, rows 16-byte aligned, got strides "
               "[96, 33, 16, 1] of bf16");
  call.in.q = {reinterpret_cast<void*>(1026), DType::kBF16, {2, 3, 2, 16}};
  EXPECT_EQ(call.refused(Direction::kBackward).actual(), "an address 2 bytes past it");
}

TEST(CudaStrides, ScalarsMayHaveAny) {
  Call call(Operator::kGdn);
  call.p.strength_dtype = DType::kF16;
  call.in.b = call.in.w = call.bwd.db = call.bwd.dw = {};
  const std::int64_t shape[] = {2, 3, 4}, strides[] = {-71, 17, 5};
  for (TensorView* t : {&call.in.g, &call.bwd.dg}) {
    *t = TensorView(reinterpret_cast<void*>((std::uintptr_t{1} << 45) + 4), DType::kF32, shape, strides);
  }
  for (TensorView* t : {&call.in.beta, &call.bwd.dbeta}) {
    *t = TensorView(reinterpret_cast<void*>((std::uintptr_t{1} << 45) + 2), DType::kF16, shape, strides);
  }
  for (Direction direction : kBoth) EXPECT_EQ(call.refused(direction).operation(), "cuda");
}

}  // namespace
}  // namespace rewy::cuda
