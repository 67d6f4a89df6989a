// A problem as one line of text, and the inputs it stands for. tests/cases/*.txt, `rewy check` and `rewy bench` and the
// tests all read this form:
//
//   op=kda B=1 T=2048 H=4 K=128 V=128 dtype=bf16 gate=mild policy=recompute
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rewy/rewy.h"
#include "tensor.h"

namespace rewy::tool {

enum class Keys : std::uint8_t {
  kNormal,  ///< Gaussian, L2-normalised
  kRepeat,  ///< one normalised key for all tokens of a head
  kRaw      ///< Gaussian, not normalised: outside the contract, grows
};

enum class GateKind : std::uint8_t {
  kNone,      ///< the operator has no gate
  kZero,      ///< 0
  kMild,      ///< log(sigmoid(x)) / 16
  kStrong,    ///< -20 to -80
  kBounded,   ///< uniform in [-5, 0)
  kMixed,     ///< zero, mild, bounded and strong side by side
  kTrained,   ///< heavy tailed: most features mild, some lose 5 to 30 nats a token
  kConstant,  ///< const:-20
  kReset,     ///< mild, with -inf for whole tokens and for single features
  kPerHead,   ///< a different kind for every value head
  kPositive   ///< cumulated gates uniform in [-1, 0]: single gates above 0, outside the contract
};

struct Case {
  Problem problem{.T = 64, .K = 64, .V = 64};
  std::vector<std::int64_t> lengths;  ///< of the segments, when problem.segments is set
  DType offsets = DType::kI32;
  bool initial_state = false;
  bool final_state = true;  ///< whether the forward is asked for it
  bool d_final_state = false;
  Keys keys = Keys::kNormal;
  std::string beta = "mild";  ///< mild, zero3, zero, one, two, tiny or a number in [0, 2]
  GateKind gate = GateKind::kMild;
  double gate_constant = 0;
  Placement strides = Placement::kDense;
  Schedule schedule = Schedule::kChunks;
  std::uint64_t seed = 1;

  bool operator==(const Case&) const = default;
};

/// Throws rewy::Error naming the key and its allowed values.
Case parse_case(std::string_view text);
/// The shortest text that parse_case() turns into the same case.
std::string format_case(const Case&);

/// The same numbers token by token: the forward alone, without what only a backward or the chunks have.
Case token_case(Case);

/// The lines of a case list: comments and empty lines dropped.
std::vector<std::string> case_lines(std::string_view list);

/// token_case() of every line, each case once.
std::vector<std::string> token_lines(const std::vector<std::string>&);

/// One call's tensors, by view: what forward() and backward() are given apart from the outputs.
struct Call {
  Problem problem;
  Inputs in;
  TensorView d_o;
  TensorView d_final_state;
  bool final_state = true;
};

/// Every input of a call, owned.
struct Data {
  Problem problem;
  Tensor q, k, v, g, beta, b, w, initial_state, cu_seqlens, d_o, d_final_state;
  bool final_state = true;

  Call call() const;
};

/// The same values on every platform and for every placement of the tensors.
Data make_data(const Case&);

/// [N + 1] offsets of segments of these lengths.
Tensor make_offsets(const std::vector<std::int64_t>& lengths, DType);

/// Near-Gaussian numbers of variance 1 by position: no state, so any element can be made alone and in any order.
double gaussian(std::uint64_t stream, std::uint64_t position);
/// In [0, 1).
double uniform(std::uint64_t stream, std::uint64_t position);

}  // namespace rewy::tool
