// Drives the safetensors reader with arbitrary bytes. README.md has the command.
//
// Either FileError with one line, or a file whose every tensor is what the header says and which survives the writer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../tools/safetensors.h"

using rewy::tool::FileError;
using rewy::tool::SafetensorsLayout;
using rewy::tool::SafetensorsReader;
using rewy::tool::SafetensorsTensor;
using rewy::tool::TensorToWrite;

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property violated: %s\n", what);
  std::abort();
}

std::span<const std::byte> as_bytes(const std::string& s) {
  return std::as_bytes(std::span(s));
}

void check_tensor(const SafetensorsTensor& t, std::span<const std::byte> file) {
  expect(t.data.data() >= file.data() && t.data.data() + t.data.size() <= file.data() + file.size(), "data in bounds");
  if (!t.dtype) {
    expect(!t.supported(), "an unknown element type is unsupported");
    return;
  }
  std::uint64_t bytes = size_of(*t.dtype);
  for (const std::int64_t n : t.shape) {
    expect(n >= 0, "extents are not negative");
    bytes *= static_cast<std::uint64_t>(n);
  }
  expect(bytes == t.data.size(), "size is that of the shape");
  expect(t.supported() == (!t.shape.empty() && t.shape.size() <= 4), "ranks 1 to 4 are supported");
}

void check_round_trip(const SafetensorsReader& read) {
  std::vector<TensorToWrite> tensors;
  for (const SafetensorsTensor& t : read.tensors()) {
    if (t.dtype) tensors.push_back({t.name, *t.dtype, t.shape, t.data.data()});
  }
  const SafetensorsLayout layout = rewy::tool::safetensors_layout(tensors, read.metadata());
  std::string file = layout.head;
  for (const std::size_t i : layout.order) {
    const auto data = read.find(tensors[i].name)->data;
    file.append(reinterpret_cast<const char*>(data.data()), data.size());
  }
  const auto again = SafetensorsReader::parse(as_bytes(file));
  expect(again.metadata() == read.metadata(), "metadata survive");
  expect(again.tensors().size() == tensors.size(), "all tensors survive");
  for (const SafetensorsTensor& t : again.tensors()) {
    const SafetensorsTensor* before = read.find(t.name);
    expect(before != nullptr && before->dtype == t.dtype && before->shape == t.shape, "description survives");
    expect(std::ranges::equal(before->data, t.data), "data survive");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  try {
    const auto read = SafetensorsReader::parse(file);
    for (const SafetensorsTensor& t : read.tensors()) {
      check_tensor(t, file);
      expect(read.find(t.name) == &t, "a listed tensor is found by its name");
    }
    check_round_trip(read);
  } catch (const FileError& error) {
    for (const char c : std::string(error.what())) expect(c >= 0x20 && c < 0x7f, "the message is one printable line");
    expect(std::strlen(error.what()) < 300, "the message is short");
  }
  return 0;
}

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

/// Most changes of a file's length break the header's length field and end the test there. So the header and the data
/// are mutated apart and the field is set to match; one time in eight the bytes are mutated as they are.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  std::minstd_rand random(seed);
  std::uint64_t length = 0;
  if (size >= 8) std::memcpy(&length, data, 8);
  if (size < 8 || length > size - 8 || random() % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::vector<std::uint8_t> header(data + 8, data + 8 + length);
  std::vector<std::uint8_t> rest(data + 8 + length, data + size);
  const bool mutate_header = random() % 8 != 0;
  std::vector<std::uint8_t>& part = mutate_header ? header : rest;
  const std::size_t room = max_size - 8 - (mutate_header ? rest.size() : header.size());
  const std::size_t part_size = part.size();
  part.resize(std::max(room, part_size));
  part.resize(LLVMFuzzerMutate(part.data(), part_size, part.size()));
  length = header.size();
  if (8 + header.size() + rest.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, &length, 8);
  std::copy(header.begin(), header.end(), data + 8);
  std::copy(rest.begin(), rest.end(), data + 8 + header.size());
  return 8 + header.size() + rest.size();
}
