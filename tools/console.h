// What the commands print with: aligned tables and a progress bar.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace rewy::tool {

/// Rows of cells; columns of numbers align right. The first row is the heading.
class Table {
 public:
  explicit Table(std::vector<std::string> heading) { add(std::move(heading)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Every line starts with `indent`.
  std::string text(const std::string& indent = "") const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// A bar on standard error while it is a terminal and the work has taken a second, or is known to (`long_work`);
/// otherwise nothing.
class Progress {
 public:
  explicit Progress(std::size_t total, bool long_work = false);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void at(std::size_t done, const std::string& what);
  /// Takes the bar away, for a line of output.
  void clear();

 private:
  std::size_t total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool terminal_;
  bool at_once_;
  bool shown_ = false;
};

std::string printf_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string seconds_text(double);       ///< "12.3 ms"
std::string bytes_text(std::uint64_t);  ///< "1.5 MB"
std::string cpu_model();
int default_threads();                                         ///< what Execution::threads = 0 means
std::string read_text(const std::string& path);                ///< throws FileError
void write_text(const std::string& path, const std::string&);  ///< through a temporary file; throws FileError

}  // namespace rewy::tool
