#include "report.h"

#include <algorithm>

#include <array>
#include <utility>

#include "console.h"

namespace rewy::tool {
namespace {

std::array<std::pair<const char*, Work::Stage>, 5> stages(const Work& w) {
  return {{{"prepare", w.prepare}, {"scan", w.scan}, {"local", w.local}, {"interact", w.interact}, {"all", w.total()}}};
}

}  // namespace

std::string work_table(const Work& work, const std::string& indent) {
  if (work.chunks == 0) return {};
  const auto each = static_cast<double>(work.chunks);
  Table table({"stage", "products", "dense Mop", "executed Mop"});
  for (const auto& [name, stage] : stages(work)) {
    table.add({name, printf_text("%.4g", static_cast<double>(stage.products) / each),
               printf_text("%.3f", static_cast<double>(stage.dense) * 1e-6 / each),
               printf_text("%.3f", static_cast<double>(stage.executed) * 1e-6 / each)});
  }
  std::string text = table.text(indent);
  if (work.pairwise > 0) {
    text += indent +
            printf_text("%.1f exponentials of single pairs and features\n", static_cast<double>(work.pairwise) / each);
  }
  return text;
}

std::string error_table(const std::vector<Comparison>& comparisons, const std::string& indent) {
  Table table({"output", "relative", "allowed", "largest", "worst element"});
  for (const Comparison& c : comparisons) {
    table.add({c.output, printf_text("%.2e", c.relative), printf_text("%.0e", c.allowed.relative),
               printf_text("%.1e", c.largest), c.passed ? c.worst : c.worst + "  <- " + c.reason});
  }
  return table.text(indent);
}

double median(std::vector<double> observations) {
  std::sort(observations.begin(), observations.end());
  const std::size_t n = observations.size();
  return (observations[n / 2] + observations[(n - 1) / 2]) / 2;
}

nlohmann::ordered_json to_json(const Work& work) {
  nlohmann::ordered_json json{{"chunks", work.chunks}, {"pairwise_exponentials", work.pairwise}};
  for (const auto& [name, stage] : stages(work)) {
    json[name] = {{"products", stage.products}, {"dense", stage.dense}, {"executed", stage.executed}};
  }
  return json;
}

nlohmann::ordered_json to_json(const std::vector<Comparison>& comparisons) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const Comparison& c : comparisons) {
    json[c.output] = {{"relative_error", c.relative},
                      {"allowed", c.allowed.relative},
                      {"largest_error", c.largest},
                      {"worst", c.worst},
                      {"passed", c.passed}};
  }
  return json;
}

void write_json(const std::string& path, const nlohmann::ordered_json& json) {
  // Names that are not UTF-8 come from the command line; they are replaced, not fatal.
  write_text(path, json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace rewy::tool
