#include "console.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "safetensors.h"

namespace rewy::tool {
namespace {

bool is_number(const std::string& cell) {
  return cell == "nan" || (!cell.empty() && cell.find_first_not_of("0123456789.+-e") == std::string::npos);
}

}  // namespace

std::string Table::text(const std::string& indent) const {
  std::vector<std::size_t> widths;
  std::vector<bool> right;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t c = 0; c < rows_[r].size(); ++c) {
      if (c >= widths.size()) {
        widths.push_back(0);
        right.push_back(c > 0);
      }
      widths[c] = std::max(widths[c], rows_[r][c].size());
      if (r > 0 && !rows_[r][c].empty() && !is_number(rows_[r][c])) right[c] = false;
    }
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line = indent;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string space(widths[c] - row[c].size(), ' ');
      line += (c > 0 ? "  " : "") + (right[c] ? space + row[c] : row[c] + space);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

Progress::Progress(std::size_t total, bool long_work)
    : total_(total), terminal_(isatty(STDERR_FILENO) == 1), at_once_(long_work) {}

void Progress::at(std::size_t done, const std::string& what) {
  const auto elapsed = std::chrono::steady_clock::now() - start_;
  if (!terminal_ || (!at_once_ && elapsed < std::chrono::seconds(1))) return;
  constexpr std::size_t kWidth = 24;
  constexpr std::size_t kText = 60;
  const std::size_t filled = total_ == 0 ? kWidth : kWidth * done / total_;
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  std::fprintf(stderr, "\r\033[K[%s] %zu/%zu %s", bar.c_str(), done, total_, what.substr(0, kText).c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

std::string printf_text(const char* format, ...) {
  char text[256];
  std::va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return text;
}

std::string seconds_text(double s) {
  if (s < 1e-3) return printf_text("%.1f us", s * 1e6);
  if (s < 1) return printf_text("%.2f ms", s * 1e3);
  return printf_text("%.2f s", s);
}

std::string bytes_text(std::uint64_t bytes) {
  const auto x = static_cast<double>(bytes);
  if (bytes < 10'000) return std::to_string(bytes) + " B";
  if (bytes < 10'000'000) return printf_text("%.1f KB", x / 1e3);
  return printf_text("%.1f MB", x / 1e6);
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
  }
  return "unknown";
}

int default_threads() {
  return omp_get_max_threads();
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file) throw FileError(path, std::strerror(errno));
  return text.str();
}

void write_text(const std::string& path, const std::string& text) {
  const std::string_view whole[] = {text};
  replace_file(path, whole);
}

}  // namespace rewy::tool
