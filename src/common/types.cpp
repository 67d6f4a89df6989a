// One table of words an enum; name() and parse_x() both read it.
#include "rewy/types.h"

#include <array>
#include <string>

#include "rewy/error.h"
#include "rewy/rewy.h"

namespace rewy {
namespace {

// In the order of the enumerators.
using Word = std::string_view;
constexpr std::array<Word, 4> kOperators{"deltanet", "gdn", "kda", "gdn2"};
constexpr std::array<Word, 6> kDTypes{"f64", "f32", "bf16", "f16", "i32", "i64"};
constexpr std::array<Word, 2> kDeviceKinds{"cpu", "cuda"};
constexpr std::array<Word, 2> kPolicies{"recompute", "save"};
constexpr std::array<Word, 2> kStateLayouts{"kv", "vk"};
constexpr std::array<Word, 2> kDirections{"forward", "backward"};
constexpr std::array<Word, 2> kSchedules{"chunks", "tokens"};
constexpr std::array<Word, 2> kGraphs{"rewy", "expanded"};
constexpr std::array<Word, 2> kIntras{"matrix", "pairwise"};
constexpr std::array<Word, 2> kGrams{"off", "on"};
constexpr std::array<Word, 4> kBackends{"auto", "cpu", "cuda", "reference"};

// A value outside its enum gets a word too: error texts are built from values nobody has checked yet.
template <class Enum, std::size_t N>
Word word_of(Enum value, const std::array<Word, N>& words) {
  const auto i = static_cast<std::size_t>(value);
  return i < N ? words[i] : Word("unknown");
}

template <class Enum, std::size_t N>
Enum parse(Word text, const std::array<Word, N>& words, const char* argument) {
  std::string allowed;
  for (std::size_t i = 0; i < N; ++i) {
    if (words[i] == text) return static_cast<Enum>(i);
    if (i != 0) allowed += i + 1 == N ? " or " : ", ";
    allowed += words[i];
  }
  throw Error("parse", argument, allowed, '"' + std::string(text) + '"');
}

}  // namespace

Word name(Operator x) {
  return word_of(x, kOperators);
}
Word name(DType x) {
  return word_of(x, kDTypes);
}
Word name(DeviceKind x) {
  return word_of(x, kDeviceKinds);
}
Word name(Policy x) {
  return word_of(x, kPolicies);
}
Word name(StateLayout x) {
  return word_of(x, kStateLayouts);
}
Word name(Direction x) {
  return word_of(x, kDirections);
}
Word name(Schedule x) {
  return word_of(x, kSchedules);
}
Word name(Graph x) {
  return word_of(x, kGraphs);
}
Word name(Intra x) {
  return word_of(x, kIntras);
}
Word name(Gram x) {
  return word_of(x, kGrams);
}
Word name(Backend x) {
  return word_of(x, kBackends);
}

Operator parse_operator(Word text) {
  return parse<Operator>(text, kOperators, "op");
}
DType parse_dtype(Word text) {
  return parse<DType>(text, kDTypes, "dtype");
}
Policy parse_policy(Word text) {
  return parse<Policy>(text, kPolicies, "policy");
}
StateLayout parse_state_layout(Word text) {
  return parse<StateLayout>(text, kStateLayouts, "state_layout");
}
Schedule parse_schedule(Word text) {
  return parse<Schedule>(text, kSchedules, "schedule");
}
Graph parse_graph(Word text) {
  return parse<Graph>(text, kGraphs, "graph");
}
Intra parse_intra(Word text) {
  return parse<Intra>(text, kIntras, "intra");
}
Gram parse_gram(Word text) {
  return parse<Gram>(text, kGrams, "gram");
}
Backend parse_backend(Word text) {
  return parse<Backend>(text, kBackends, "backend");
}

}  // namespace rewy
