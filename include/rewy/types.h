// The vocabulary of the library: operators, element types, devices, policies and their names.
//
// Letters used everywhere: B batch, T tokens, H query/key heads, HV value heads, K key width, V value width,
// C = 64 tokens a chunk, N sequences (B of them, or the segments of a packed call).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace rewy {

/// Tokens in one chunk of the chunkwise algorithm (docs/math.md, section 2).
inline constexpr std::int64_t kChunk = 64;

/// The four delta-rule operators. Each is a pair of traits, see gate_of() and strength_of().
enum class Operator : std::uint8_t { kDeltaNet, kGdn, kKda, kGdn2 };

/// How the state decays: not at all, by one number a token and head, or by one number a key feature.
enum class Gate : std::uint8_t { kNone, kScalar, kVector };

/// How strongly a token erases and writes: one shared beta, or independent vectors b (K) and w (V).
enum class Strength : std::uint8_t { kShared, kIndependent };

constexpr Gate gate_of(Operator op) {
  switch (op) {
    case Operator::kDeltaNet: return Gate::kNone;
    case Operator::kGdn: return Gate::kScalar;
    case Operator::kKda:
    case Operator::kGdn2: return Gate::kVector;
  }
  return Gate::kNone;
}

constexpr Strength strength_of(Operator op) {
  return op == Operator::kGdn2 ? Strength::kIndependent : Strength::kShared;
}

/// Element types. kI32 and kI64 serve offsets only.
enum class DType : std::uint8_t { kF64, kF32, kBF16, kF16, kI32, kI64 };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
  }
  return 0;
}

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// What the forward leaves for the backward (docs/math.md, section 5).
enum class Policy : std::uint8_t {
  kRecompute,  ///< A = M^-1 of every chunk, on a GPU Cq too; the backward recomputes R, the chunk states, on a CPU Cq.
  kSave        ///< A, Cq, R and the chunk states; the backward recomputes none of them.
};

/// Order of a state's last two axes in memory.
enum class StateLayout : std::uint8_t { kKV, kVK };

enum class Direction : std::uint8_t { kForward, kBackward };

/// How an operator call goes through its tokens. Results agree within rounding.
enum class Schedule : std::uint8_t {
  kChunks,  ///< 64 at a time, as matrix products: training and prompts
  kTokens   ///< one after the other: decoding. Forward only; nothing is saved.
};

/// The derivative graphs that can be compared (docs/math.md, section 6). Every choice gives the same gradients;
/// the defaults are the ReWY paper's and the fastest. Backends other than the CPU's decline all but the defaults.
enum class Graph : std::uint8_t {
  kRewy,     ///< one shared sensitivity P = A^T dR: three local products
  kExpanded  ///< the adjoints of W, U and A one by one: seven local products
};
enum class Intra : std::uint8_t {
  kMatrix,   ///< vector gates: gate ratios split into two factors, interactions as matrix products
  kPairwise  ///< vector gates: one exponential a pair of tokens and feature
};
enum class Gram : std::uint8_t {
  kOff,  ///< scalar gates: gate gradients from the matrix K K^T
  kOn    ///< scalar gates: gate gradients from the key gradients already formed (Gram elimination)
};

struct Variant {
  Graph graph = Graph::kRewy;
  Intra intra = Intra::kMatrix;
  Gram gram = Gram::kOn;
  bool operator==(const Variant&) const = default;
};

// Names as the tool and the files spell them: "kda", "bf16", "save", "kv", ... parse_x throws rewy::Error.
std::string_view name(Operator);
std::string_view name(DType);
std::string_view name(DeviceKind);
std::string_view name(Policy);
std::string_view name(StateLayout);
std::string_view name(Direction);
std::string_view name(Schedule);
std::string_view name(Graph);
std::string_view name(Intra);
std::string_view name(Gram);

Operator parse_operator(std::string_view);
DType parse_dtype(std::string_view);
Policy parse_policy(std::string_view);
StateLayout parse_state_layout(std::string_view);
Schedule parse_schedule(std::string_view);
Graph parse_graph(std::string_view);
Intra parse_intra(std::string_view);
Gram parse_gram(std::string_view);

}  // namespace rewy
