// The options of a call as the operators' schemas have them: words in one argument, since what PyTorch converts and
// checks costs the host by the argument.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "rewy/rewy.h"

namespace rewy::torch_ops {

/// For example "policy=save normalise activate_gate". A backward has those of its forward; schedule and
/// output_final_state say nothing to it.
struct Options {
  std::optional<Policy> policy = Policy::kRecompute;  ///< none: there will be no backward
  Backend backend = Backend::kAutomatic;
  Schedule schedule = Schedule::kChunks;
  bool output_final_state = false, state_v_first = false;
  bool normalise = false, activate_gate = false, activate_beta = false, allow_neg_eigval = false;

  /// Throws Error for a word it does not know.
  static Options parse(std::string_view words, const std::string& op) {
    struct Flag {
      std::string_view word;
      bool Options::*on;
    };
    static constexpr Flag kFlags[] = {{"output_final_state", &Options::output_final_state},
                                      {"state_v_first", &Options::state_v_first},
                                      {"normalise", &Options::normalise},
                                      {"activate_gate", &Options::activate_gate},
                                      {"activate_beta", &Options::activate_beta},
                                      {"allow_neg_eigval", &Options::allow_neg_eigval}};
    Options options;
    const auto value_of = [](std::string_view word, std::string_view key) -> std::optional<std::string_view> {
      if (!word.starts_with(key)) return std::nullopt;
      return word.substr(key.size());
    };
    while (!words.empty()) {
      const std::string_view word = words.substr(0, words.find(' '));
      words.remove_prefix(word.size() == words.size() ? word.size() : word.size() + 1);
      bool known = false;
      for (const Flag& flag : kFlags) {
        if (word == flag.word) options.*flag.on = known = true;
      }
      if (const auto policy = value_of(word, "policy=")) {
        options.policy = *policy == "none" ? std::nullopt : std::optional(parse_policy(*policy));
      } else if (const auto backend = value_of(word, "backend=")) {
        options.backend = parse_backend(*backend);
      } else if (const auto schedule = value_of(word, "schedule=")) {
        options.schedule = parse_schedule(*schedule);
      } else if (!known) {
        std::string expected = "policy=, backend=, schedule=";
        for (const Flag& flag : kFlags) expected += ", " + std::string(flag.word);
        throw Error(op, "options", "words among " + expected, "'" + std::string(word) + "'");
      }
    }
    return options;
  }

  /// The parts that `op` has. Each is activated inside the call.
  Gate gate(Operator op) const { return activate_gate ? gate_of(op) : Gate::kNone; }
  bool strength(Operator op) const { return activate_beta && strength_of(op) == Strength::kShared; }
  bool activates(Operator op) const { return normalise || gate(op) != Gate::kNone || strength(op); }

  bool keeps_saved() const { return policy && schedule == Schedule::kChunks; }
  /// Whether the backward is given what activations made; else it makes it again.
  bool keeps_activated(Operator op) const { return policy == Policy::kSave && activates(op); }
};

}  // namespace rewy::torch_ops
