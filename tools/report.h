// How work and errors are printed and written as JSON, the same in every command.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run_case.h"

namespace rewy::tool {

/// Matrix products and millions of operations, a chunk and value head, by stage. Empty if nothing was counted.
std::string work_table(const Work&, const std::string& indent);
std::string error_table(const std::vector<Comparison>&, const std::string& indent);

/// Of at least one observation.
double median(std::vector<double> observations);

nlohmann::ordered_json to_json(const Work&);
nlohmann::ordered_json to_json(const std::vector<Comparison>&);
void write_json(const std::string& path, const nlohmann::ordered_json&);

}  // namespace rewy::tool
