// Reading and writing safetensors files: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
//
// The reader takes files from anywhere, so that everything the header says is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "rewy/types.h"

namespace rewy::tool {

/// A file that cannot be read, is not valid, or cannot be written. what() is one line, "PATH: REASON".
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& path, const std::string& reason);
  const std::string& path() const noexcept { return path_; }
  const std::string& reason() const noexcept { return reason_; }

 private:
  std::string path_, reason_;
};

/// The reference implementation's limit. It bounds what a hostile header length can make us allocate.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// `text` with every byte that is not printable ASCII as \xNN, cut after 80 characters: safe to print on a terminal.
std::string printable(std::string_view text);

struct SafetensorsTensor {
  std::string name;
  std::string dtype_name;        ///< as the file spells it: "BF16"
  std::optional<DType> dtype{};  ///< not set for an element type outside DType
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  ///< aligned to the element, when it comes from open()
  /// Empty if the tensor can be viewed as a rewy::TensorView; else why not: "element type U8", "rank 0", "rank 5".
  std::string unsupported;

  bool supported() const { return unsupported.empty(); }
};

/// A valid file. Owns its bytes when it comes from open(); movable, and the tensors' data stay where they are.
class SafetensorsReader {
 public:
  /// Reads a whole regular file. The header is checked before memory for the data is allocated.
  static SafetensorsReader open(const std::string& path);

  /// Checks bytes already in memory, which must outlive the result. `path` is for messages only.
  static SafetensorsReader parse(std::span<const std::byte> bytes, const std::string& path = "<memory>");

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  ///< sorted by name
  const SafetensorsTensor* find(std::string_view name) const;                 ///< null if there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::string path_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unique_ptr<std::byte[]> storage_;
};

/// One contiguous tensor to write.
struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
};

/// The first bytes of a file (length and header, a multiple of 8) and the order in which the tensors' data follow it.
struct SafetensorsLayout {
  std::string head;
  std::vector<std::size_t> order;
};

/// Tensors are ordered by descending element size, then by name, so that each one starts aligned without holes.
/// Throws FileError for names that are duplicate, reserved or not UTF-8, and for shapes that are negative or overflow.
SafetensorsLayout safetensors_layout(std::span<const TensorToWrite> tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     const std::string& path = "<memory>");

/// Writes the parts, one after the other, to a temporary file next to `path`, syncs it and renames it: `path` holds the
/// old bytes or all of the new ones. The temporary is removed on failure. Links are followed. Refuses a `path` that is
/// there and is not a regular file.
void replace_file(const std::string& path, std::span<const std::string_view> parts);

/// Writes a safetensors file as replace_file() does.
void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace rewy::tool
