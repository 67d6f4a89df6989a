#include "safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>
#include <utility>

namespace rewy::tool {
namespace {

// Tensors are used and written in place.
static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian");

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kDataAlignment = 64;  // what vector loads like best, and a multiple of every element size
constexpr std::size_t kMaxPrintedBytes = 80;
constexpr int kMaxRank = 4;  // TensorView::kMaxRank, without the library behind that header
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

struct ElementType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

// Those that rewy does not compute with are here for their sizes: a file is checked in full, even what is ignored.
constexpr std::array kElementTypes{
    ElementType{"F64", 64, DType::kF64},
    ElementType{"F32", 32, DType::kF32},
    ElementType{"BF16", 16, DType::kBF16},
    ElementType{"F16", 16, DType::kF16},
    ElementType{"I32", 32, DType::kI32},
    ElementType{"I64", 64, DType::kI64},
    ElementType{"BOOL", 8, {}},
    ElementType{"U8", 8, {}},
    ElementType{"I8", 8, {}},
    ElementType{"U16", 16, {}},
    ElementType{"I16", 16, {}},
    ElementType{"U32", 32, {}},
    ElementType{"U64", 64, {}},
    ElementType{"C64", 64, {}},
    ElementType{"F8_E5M2", 8, {}},
    ElementType{"F8_E4M3", 8, {}},
    ElementType{"F8_E8M0", 8, {}},
    ElementType{"F6_E2M3", 6, {}},
    ElementType{"F6_E3M2", 6, {}},
    ElementType{"F4", 4, {}},
};

const ElementType* find_element_type(std::string_view name) {
  const auto* it = std::find_if(kElementTypes.begin(), kElementTypes.end(), [&](auto& t) { return t.name == name; });
  return it == kElementTypes.end() ? nullptr : it;
}

std::string_view file_name(DType dtype) {
  return std::find_if(kElementTypes.begin(), kElementTypes.end(), [&](auto& t) { return t.dtype == dtype; })->name;
}

std::string escaped(std::string_view text, bool ascii_only) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (u < 0x20 || u == 0x7f || (ascii_only && u > 0x7f)) {
      out += {'\\', 'x', kHex[u >> 4], kHex[u & 15]};
    } else {
      out += c;
    }
  }
  return out;
}

std::string in_quotes(std::string_view name) {
  return "'" + printable(name) + "'";
}

std::string error_text(int error) {
  return std::strerror(error);
}

/// Product of the extents and `bits`, zero extents left out; not set if it exceeds int64. Leaving zeros out makes the
/// answer independent of the order of the extents, and strides computed from an accepted shape cannot overflow.
std::optional<std::int64_t> checked_bits(std::span<const std::int64_t> shape, std::int64_t bits) {
  std::int64_t product = bits;
  for (const std::int64_t n : shape) {
    if (n != 0 && __builtin_mul_overflow(product, n, &product)) return std::nullopt;
  }
  return product;
}

bool is_empty(std::span<const std::int64_t> shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

/// A tensor as the header describes it.
struct Entry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

/// Receives the header's tokens. Only the format's own nesting (three levels) is ever entered, so that depth costs
/// nothing, no tree is built, and duplicate names, which a tree would merge, are seen.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override {
    return in_list() ? fail(subject() + " has a negative number") : value("a number");
  }
  bool number_unsigned(number_unsigned_t n) override {
    if (!in_list()) return value("a number");
    if (n > static_cast<number_unsigned_t>(kMaxInt64)) return fail(subject() + " has a number past 2^63 - 1");
    list().push_back(static_cast<std::int64_t>(n));
    return true;
  }
  bool number_float(number_float_t, const string_t&) override { return value("a number that is not an int64"); }
  bool string(string_t& s) override {
    if (state_ == State::kMetadata) {
      metadata.emplace(key_, std::move(s));
      return true;
    }
    if (state_ == State::kEntry && field_ == Field::kDType) {
      entries.back().dtype = std::move(s);
      return true;
    }
    return value("a string");
  }
  bool binary(binary_t&) override { return value("binary data"); }

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kStart: state_ = State::kTop; return true;
      case State::kTop:
        if (key_ == kMetadataKey) {
          state_ = State::kMetadata;
        } else {
          entries.emplace_back().name = key_;
          state_ = State::kEntry;
        }
        return true;
      default: return value("an object");
    }
  }
  bool key(string_t& k) override {
    if (state_ == State::kEntry) {
      Entry& e = entries.back();
      bool* seen = nullptr;
      if (k == "dtype") {
        field_ = Field::kDType;
        seen = &e.has_dtype;
      } else if (k == "shape") {
        field_ = Field::kShape;
        seen = &e.has_shape;
      } else if (k == "data_offsets") {
        field_ = Field::kOffsets;
        seen = &e.has_offsets;
      } else {
        return fail("tensor " + in_quotes(e.name) + " has an unknown field " + in_quotes(k));
      }
      if (std::exchange(*seen, true)) return fail("tensor " + in_quotes(e.name) + " has the field '" + k + "' twice");
      return true;
    }
    key_ = std::move(k);
    if (state_ == State::kMetadata) {
      if (metadata.contains(key_)) return fail("metadata key " + in_quotes(key_) + " is there twice");
    } else if (!names_.insert(key_).second) {
      return fail((key_ == kMetadataKey ? "" : "tensor ") + in_quotes(key_) + " is there twice");
    }
    return true;
  }
  bool end_object() override {
    if (state_ == State::kEntry) {
      const Entry& e = entries.back();
      const char* missing = !e.has_dtype ? "dtype" : !e.has_shape ? "shape" : !e.has_offsets ? "data_offsets" : nullptr;
      if (missing != nullptr) return fail("tensor " + in_quotes(e.name) + " has no field '" + missing + "'");
    }
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }
  bool start_array(std::size_t) override {
    if (state_ != State::kEntry || field_ == Field::kDType) return value("a list");
    state_ = State::kList;
    return true;
  }
  bool end_array() override {
    state_ = State::kEntry;
    if (field_ == Field::kOffsets && entries.back().offsets.size() != 2) {
      return fail(subject() + " must be two numbers, got " + std::to_string(entries.back().offsets.size()));
    }
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override {
    // The parser's own text quotes the input. Only its kind is passed on.
    const std::string_view text = error.what();
    if (text.find("UTF-8") != std::string_view::npos) {
      return fail("header is not UTF-8 at byte " + std::to_string(position));
    }
    return fail("header is not JSON at byte " + std::to_string(position));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kEntry, kList, kEnd };
  enum class Field { kDType, kShape, kOffsets };

  bool in_list() const { return state_ == State::kList; }
  std::vector<std::int64_t>& list() { return field_ == Field::kShape ? entries.back().shape : entries.back().offsets; }
  std::string subject() const {
    static constexpr const char* kFields[] = {"dtype", "shape", "data_offsets"};
    return std::string(kFields[static_cast<int>(field_)]) + " of tensor " + in_quotes(entries.back().name);
  }
  bool fail(std::string text) {
    if (problem.empty()) problem = std::move(text);
    return false;
  }
  /// A value of a type that does not belong where it stands.
  bool value(const std::string& what) {
    switch (state_) {
      case State::kTop:
        return fail((key_ == kMetadataKey ? "" : "tensor ") + in_quotes(key_) + " must be an object, got " + what);
      case State::kMetadata: return fail("metadata " + in_quotes(key_) + " must be a string, got " + what);
      case State::kEntry:
        return fail(subject() + " must be " + (field_ == Field::kDType ? "a string" : "a list") + ", got " + what);
      case State::kList: return fail(subject() + " must be a list of integers, got " + what);
      default: return fail("header must be a JSON object, got " + what);
    }
  }

  State state_ = State::kStart;
  Field field_ = Field::kDType;
  std::string key_;
  std::unordered_set<std::string> names_;
};

/// Length of the header that `length_bytes` announces in a file of `file_bytes`.
std::size_t header_length(std::span<const std::byte> length_bytes, std::uint64_t file_bytes, const std::string& path) {
  if (file_bytes < kLengthBytes) {
    throw FileError(path, "truncated: " + std::to_string(file_bytes) + " bytes, a safetensors file has at least 8");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, length_bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    throw FileError(path, "not a safetensors file: header of " + std::to_string(length) + " bytes, the limit is " +
                              std::to_string(kMaxHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes) {
    throw FileError(path, "truncated: header of " + std::to_string(length) + " bytes, " +
                              std::to_string(file_bytes - kLengthBytes) + " are left in the file");
  }
  return static_cast<std::size_t>(length);
}

HeaderHandler parse_header(std::string_view header, const std::string& path) {
  if (header.empty()) throw FileError(path, "header is empty");
  // The format wants '{' first; the parser alone would take a byte-order mark.
  if (header.front() != '{') throw FileError(path, "header must begin with '{', so it is not a JSON object");
  // The parser takes a zero byte for the end of its input and would ignore what follows.
  if (const auto at = header.find('\0'); at != std::string_view::npos) {
    throw FileError(path, "header is not JSON at byte " + std::to_string(at + 1) + " (a zero byte)");
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &handler)) {
    throw FileError(path, handler.problem.empty() ? "header is not JSON" : handler.problem);
  }
  return handler;
}

/// Everything about a tensor that can be said without its neighbours. `data` is set later.
SafetensorsTensor check_entry(const Entry& e, std::int64_t data_bytes, const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw FileError(path, "tensor " + in_quotes(e.name) + ": " + reason);
  };
  const std::int64_t begin = e.offsets[0];
  const std::int64_t end = e.offsets[1];
  const std::string range = "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
  if (begin > end) refuse("data_offsets " + range + " go back");
  if (end > data_bytes) {
    refuse("truncated: data_offsets " + range + ", the file has " + std::to_string(data_bytes) + " bytes of data");
  }
  const ElementType* type = find_element_type(e.dtype);
  const auto bits = checked_bits(e.shape, type == nullptr ? 8 : type->bits);
  if (!bits) refuse("the size of its shape overflows");
  if (type != nullptr) {
    const std::int64_t total = is_empty(e.shape) ? 0 : *bits;
    if (total % 8 != 0) refuse("its elements do not fill whole bytes");
    if (total / 8 != end - begin) {
      refuse("shape and element type need " + std::to_string(total / 8) + " bytes, data_offsets " + range + " have " +
             std::to_string(end - begin));
    }
    if (type->dtype && begin % static_cast<std::int64_t>(size_of(*type->dtype)) != 0) {
      refuse("misaligned: starts at byte " + std::to_string(begin) + " with elements of " +
             std::to_string(size_of(*type->dtype)) + " bytes");
    }
  }
  SafetensorsTensor t;
  if (type != nullptr) t.dtype = type->dtype;
  if (!t.dtype) {
    t.unsupported = "element type " + printable(e.dtype);
  } else if (e.shape.empty() || e.shape.size() > kMaxRank) {
    t.unsupported = "rank " + std::to_string(e.shape.size());
  }
  t.name = e.name;
  t.dtype_name = e.dtype;
  t.shape = e.shape;
  return t;
}

/// The tensors must tile the data: no byte belongs to two of them, and none to no one.
void check_tiling(std::span<const Entry> entries, std::int64_t data_bytes, const std::string& path) {
  std::vector<const Entry*> sorted;
  for (const Entry& e : entries) sorted.push_back(&e);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Entry* a, const Entry* b) { return a->offsets < b->offsets; });
  std::int64_t at = 0;
  const Entry* previous = nullptr;
  for (const Entry* e : sorted) {
    if (e->offsets[0] < at) {
      throw FileError(path, "tensors " + in_quotes(previous->name) + " and " + in_quotes(e->name) + " overlap");
    }
    if (e->offsets[0] > at) {
      throw FileError(path,
                      "hole of " + std::to_string(e->offsets[0] - at) + " bytes before tensor " + in_quotes(e->name));
    }
    at = e->offsets[1];
    previous = e;
  }
  if (at != data_bytes) {
    throw FileError(path, std::to_string(data_bytes - at) + " bytes after the last tensor");
  }
}

struct Header {
  std::vector<SafetensorsTensor> tensors;
  std::vector<std::pair<std::size_t, std::size_t>> offsets;  // of each tensor
  std::map<std::string, std::string> metadata;
};

Header check_header(std::string_view text, std::uint64_t data_bytes, const std::string& path) {
  HeaderHandler parsed = parse_header(text, path);
  std::sort(parsed.entries.begin(), parsed.entries.end(),
            [](const Entry& a, const Entry& b) { return a.name < b.name; });
  const auto bytes = static_cast<std::int64_t>(std::min<std::uint64_t>(data_bytes, kMaxInt64));
  Header h;
  h.metadata = std::move(parsed.metadata);
  for (const Entry& e : parsed.entries) {
    h.tensors.push_back(check_entry(e, bytes, path));
    h.offsets.emplace_back(e.offsets[0], e.offsets[1]);
  }
  check_tiling(parsed.entries, bytes, path);
  return h;
}

std::vector<SafetensorsTensor> with_data(Header& h, std::span<const std::byte> data) {
  for (std::size_t i = 0; i < h.tensors.size(); ++i) {
    h.tensors[i].data = data.subspan(h.offsets[i].first, h.offsets[i].second - h.offsets[i].first);
  }
  return std::move(h.tensors);
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

void read_exactly(int fd, std::span<std::byte> out, const std::string& path) {
  while (!out.empty()) {
    const ssize_t n = ::read(fd, out.data(), out.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw FileError(path, "cannot read: " + error_text(errno));
    if (n == 0) throw FileError(path, "truncated while it was read");
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

void write_exactly(int fd, std::string_view in, const std::string& path) {
  while (!in.empty()) {
    const ssize_t n = ::write(fd, in.data(), in.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw FileError(path, "cannot write: " + error_text(errno));
    in.remove_prefix(static_cast<std::size_t>(n));
  }
}

/// The temporary of one write: removed on destruction unless it was renamed.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& target, mode_t mode) : target_(target), fd_(-1) {
    static std::atomic<unsigned> counter{0};
    constexpr int kAttempts = 100;
    for (int i = 0; i < kAttempts; ++i) {
      name_ = target + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
      fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      if (fd_ >= 0 || errno != EEXIST) break;
    }
    if (fd_ < 0) throw FileError(target, "cannot create a file next to it: " + error_text(errno));
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!name_.empty()) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int get() const { return fd_; }

  void commit() {
    if (::fsync(fd_) != 0) throw FileError(target_, "cannot sync: " + error_text(errno));
    if (::close(std::exchange(fd_, -1)) != 0) throw FileError(target_, "cannot close: " + error_text(errno));
    if (::rename(name_.c_str(), target_.c_str()) != 0) {
      throw FileError(target_, "cannot rename the finished file: " + error_text(errno));
    }
    name_.clear();
  }

 private:
  std::string target_, name_;
  int fd_;
};

/// Where a path leads: a link to an existing file is followed, so that the file is replaced and not the link.
std::string resolved(const std::string& path) {
  char* real = ::realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;
  std::string out = real;
  std::free(real);
  return out;
}

std::string json_string(const std::string& text, const std::string& path) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw FileError(path, in_quotes(text) + " is not UTF-8");
  }
}

}  // namespace

FileError::FileError(const std::string& path, const std::string& reason)
    : std::runtime_error(escaped(path, false) + ": " + reason), path_(path), reason_(reason) {}

std::string printable(std::string_view text) {
  // The printed length is what is limited: an escape is four times as long as its byte.
  std::string out;
  for (const char& c : text) {
    const std::string next = escaped({&c, 1}, true);
    if (out.size() + next.size() > kMaxPrintedBytes) return out + "...";
    out += next;
  }
  return out;
}

const SafetensorsTensor* SafetensorsReader::find(std::string_view name) const {
  const auto it = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const SafetensorsTensor& t, std::string_view n) { return t.name < n; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

SafetensorsReader SafetensorsReader::parse(std::span<const std::byte> bytes, const std::string& path) {
  const std::size_t length = header_length(bytes, bytes.size(), path);
  const auto data = bytes.subspan(kLengthBytes + length);
  Header h = check_header(as_text(bytes.subspan(kLengthBytes, length)), data.size(), path);
  SafetensorsReader r;
  r.path_ = path;
  r.metadata_ = std::move(h.metadata);
  r.tensors_ = with_data(h, data);
  return r;
}

SafetensorsReader SafetensorsReader::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe nobody writes to would wait for ever. It means nothing to a regular file.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) throw FileError(path, "cannot open: " + error_text(errno));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) throw FileError(path, "cannot open: " + error_text(errno));
  if (!S_ISREG(info.st_mode)) throw FileError(path, "not a regular file");
  const auto file_bytes = static_cast<std::uint64_t>(info.st_size);

  try {
    std::array<std::byte, kLengthBytes> length_bytes{};
    read_exactly(file.get(), std::span(length_bytes).first(std::min<std::uint64_t>(kLengthBytes, file_bytes)), path);
    const std::size_t length = header_length(length_bytes, file_bytes, path);
    std::vector<std::byte> header(length);
    read_exactly(file.get(), header, path);
    const std::size_t data_bytes = file_bytes - kLengthBytes - length;
    Header h = check_header(as_text(header), data_bytes, path);

    // Read, not mapped: a file truncated later by someone else cannot end the process, and the data start aligned
    // whatever the header's length.
    SafetensorsReader r;
    r.storage_.reset(new std::byte[data_bytes + kDataAlignment]);
    const auto misaligned = reinterpret_cast<std::uintptr_t>(r.storage_.get()) % kDataAlignment;
    const std::span<std::byte> data(r.storage_.get() + (kDataAlignment - misaligned) % kDataAlignment, data_bytes);
    read_exactly(file.get(), data, path);
    r.path_ = path;
    r.metadata_ = std::move(h.metadata);
    r.tensors_ = with_data(h, data);
    return r;
  } catch (const std::bad_alloc&) {
    throw FileError(path, "not enough memory for " + std::to_string(file_bytes) + " bytes");
  }
}

SafetensorsLayout safetensors_layout(std::span<const TensorToWrite> tensors,
                                     const std::map<std::string, std::string>& metadata, const std::string& path) {
  SafetensorsLayout layout;
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorToWrite& t = tensors[i];
    if (t.name == kMetadataKey) throw FileError(path, in_quotes(t.name) + " cannot name a tensor");
    if (!names.insert(t.name).second) throw FileError(path, "tensor " + in_quotes(t.name) + " is there twice");
    for (const std::int64_t n : t.shape) {
      if (n < 0) throw FileError(path, "shape of tensor " + in_quotes(t.name) + " has a negative number");
    }
    layout.order.push_back(i);
  }
  std::sort(layout.order.begin(), layout.order.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t size_a = size_of(tensors[a].dtype);
    const std::size_t size_b = size_of(tensors[b].dtype);
    return size_a != size_b ? size_a > size_b : tensors[a].name < tensors[b].name;
  });

  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"" + std::string(kMetadataKey) + "\":{";
    for (const auto& [key, text] : metadata) {
      if (json.back() != '{') json += ',';
      json += json_string(key, path) + ":" + json_string(text, path);
    }
    json += '}';
  }
  std::int64_t at = 0;
  for (const std::size_t i : layout.order) {
    const TensorToWrite& t = tensors[i];
    const auto bits = checked_bits(t.shape, 8 * static_cast<std::int64_t>(size_of(t.dtype)));
    const std::int64_t begin = at;
    if (!bits || __builtin_add_overflow(at, is_empty(t.shape) ? 0 : *bits / 8, &at)) {
      throw FileError(path, "the size of tensor " + in_quotes(t.name) + " overflows");
    }
    if (json.size() > 1) json += ',';
    json += json_string(t.name, path) + ":{\"dtype\":\"" + std::string(file_name(t.dtype)) + "\",\"shape\":[";
    for (const std::int64_t n : t.shape) {
      if (json.back() != '[') json += ',';
      json += std::to_string(n);
    }
    json += "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(at) + "]}";
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > kMaxHeaderBytes) throw FileError(path, "header would exceed the format's limit");

  const std::uint64_t length = json.size();
  layout.head.resize(kLengthBytes);
  std::memcpy(layout.head.data(), &length, kLengthBytes);
  layout.head += json;
  return layout;
}

void replace_file(const std::string& path, std::span<const std::string_view> parts) {
  const std::string target = resolved(path);
  // rename() would replace a device or a pipe by a file.
  struct stat info {};
  const bool replaces = ::stat(target.c_str(), &info) == 0;
  if (replaces && !S_ISREG(info.st_mode)) throw FileError(path, "not a regular file, so it is not replaced");

  TemporaryFile file(target, 0666);
  // A replaced file keeps its permissions; where that is not allowed the new one has the usual ones.
  if (replaces && ::fchmod(file.get(), info.st_mode & 0777) != 0) errno = 0;
  for (const std::string_view part : parts) write_exactly(file.get(), part, path);
  file.commit();
}

void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const SafetensorsLayout layout = safetensors_layout(tensors, metadata, path);
  std::vector<std::string_view> parts{layout.head};
  for (const std::size_t i : layout.order) {
    const TensorToWrite& t = tensors[i];
    if (is_empty(t.shape)) continue;
    const auto bits = *checked_bits(t.shape, 8 * static_cast<std::int64_t>(size_of(t.dtype)));
    parts.emplace_back(static_cast<const char*>(t.data), static_cast<std::size_t>(bits / 8));
  }
  replace_file(path, parts);
}

}  // namespace rewy::tool
