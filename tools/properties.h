// What holds beyond closeness to the reference: bits that must not change, and values that must be exact.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "run_case.h"

namespace rewy::tool {

struct PropertySetting {
  Operator op = Operator::kKda;
  Backend backend = Backend::kAutomatic;
  Device device{};
  int architecture = 0;  ///< Execution::architecture
  Schedule schedule = Schedule::kChunks;
};

/// What a property is about.
enum class Where : std::uint8_t { kEverywhere, kCpu, kGpu };
enum class Schedules : std::uint8_t { kBoth, kChunks };

/// A backend that fails a property throws std::runtime_error with the element that shows it.
struct Property {
  std::string name;
  std::string meaning;
  std::function<bool(Operator)> applies;
  std::function<void(const PropertySetting&)> check;
  Schedules schedules = Schedules::kBoth;
  Where where = Where::kEverywhere;
  bool by_name_only = false;  ///< too large for a list that runs anywhere

  bool holds_on(const Device&) const;
};

const std::vector<Property>& properties();

/// "property=causality op=kda" for every property and operator it applies to on the device, and with schedule=tokens
/// those that are about it.
std::vector<std::string> property_lines(const Device& = {});
bool is_property_line(const std::string& text);

/// A row of `rewy check` for a property line. Like check_case(), it turns exceptions into failed rows; a line that
/// names no property throws rewy::Error. Of the options device, backend and architecture count.
CheckResult check_property(const std::string& text, const RunOptions&);

}  // namespace rewy::tool
