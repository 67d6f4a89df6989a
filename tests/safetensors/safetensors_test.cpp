// The safetensors reader refuses every kind of bad header with one line; the writer leaves whole files or none.
#include "safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace rewy::tool {
namespace {

namespace fs = std::filesystem;
using ::testing::Test;

std::string le64(std::uint64_t n) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &n, 8);
  return out;
}

std::string file_of(const std::string& header, std::size_t data_bytes = 0) {
  return le64(header.size()) + header + std::string(data_bytes, 'x');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, std::uint64_t begin,
                  std::uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

/// A float of 4 bytes, the smallest useful tensor.
std::string one(const std::string& name, std::uint64_t begin = 0) {
  return entry(name, "F32", "[1]", begin, begin + 4);
}

std::span<const std::byte> as_bytes(const std::string& s) {
  return std::as_bytes(std::span(s));
}

/// The reason a file is refused for; "accepted" if it is not. Every message is checked to be one short printable line.
std::string reason(const std::string& file) {
  try {
    SafetensorsReader::parse(as_bytes(file), "in.safetensors");
  } catch (const FileError& error) {
    const std::string what = error.what();
    EXPECT_EQ(what, "in.safetensors: " + error.reason());
    EXPECT_EQ(error.path(), "in.safetensors");
    EXPECT_LT(what.size(), 300u);
    EXPECT_TRUE(std::all_of(what.begin(), what.end(), [](char c) { return c >= 0x20 && c < 0x7f; })) << what;
    return error.reason();
  }
  return "accepted";
}

#define EXPECT_REASON(file, part) EXPECT_PRED_FORMAT2(::testing::IsSubstring, part, reason(file))

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

/// A fresh directory, removed afterwards.
class SafetensorsFiles : public Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "rewy-safetensors-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  std::string put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(dir_)) names.push_back(e.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string open_reason(const std::string& p) {
    try {
      SafetensorsReader::open(p);
    } catch (const FileError& error) {
      return error.reason();
    }
    return "accepted";
  }

  fs::path dir_;
};

// ---- Length of the header ------------------------------------------------------------------------------------------

TEST(SafetensorsBad, EmptyFile) {
  EXPECT_REASON("", "truncated: 0 bytes");
}
TEST(SafetensorsBad, ShorterThanTheLengthField) {
  EXPECT_REASON("1234567", "truncated: 7 bytes");
}
TEST(SafetensorsBad, HeaderLengthPastTheEnd) {
  EXPECT_REASON(le64(3) + "{}", "truncated: header of 3 bytes, 2 are left");
}
TEST(SafetensorsBad, OversizedHeader) {
  EXPECT_REASON(le64(kMaxHeaderBytes + 1) + "{}", "header of 100000001 bytes, the limit is 100000000");
}
TEST(SafetensorsBad, HeaderLengthThatWouldOverflow) {
  EXPECT_REASON(le64(~std::uint64_t{0}) + "{}", "the limit is");
}
TEST(SafetensorsBad, EmptyHeader) {
  EXPECT_REASON(file_of(""), "header is empty");
}

// ---- JSON ----------------------------------------------------------------------------------------------------------

TEST(SafetensorsBad, NotJson) {
  EXPECT_REASON(file_of("{hello}"), "header is not JSON at byte");
}
TEST(SafetensorsBad, CutJson) {
  EXPECT_REASON(file_of("{\"a\":"), "header is not JSON at byte");
}
TEST(SafetensorsBad, TextAfterTheObject) {
  EXPECT_REASON(file_of("{} {}"), "header is not JSON at byte");
}
TEST(SafetensorsBad, Comment) {
  EXPECT_REASON(file_of("{/**/}"), "header is not JSON at byte");
}
TEST(SafetensorsBad, ZeroByteHidesTheRest) {
  EXPECT_REASON(file_of(std::string("{}\0{", 4)), "header is not JSON at byte 3 (a zero byte)");
}
TEST(SafetensorsBad, ByteOrderMark) {
  EXPECT_REASON(file_of("\xef\xbb\xbf{}"), "must begin with '{'");
}
TEST(SafetensorsBad, SpaceBeforeTheObject) {
  EXPECT_REASON(file_of(" {}"), "must begin with '{'");
}
TEST(SafetensorsBad, List) {
  EXPECT_REASON(file_of("[1,2]"), "not a JSON object");
}
TEST(SafetensorsBad, Number) {
  EXPECT_REASON(file_of("12"), "not a JSON object");
}
TEST(SafetensorsBad, InvalidUtf8InAName) {
  EXPECT_REASON(file_of("{\"a\xff\":1}"), "header is not UTF-8 at byte 4");
}
TEST(SafetensorsBad, OverlongUtf8) {
  EXPECT_REASON(file_of("{\"\xc0\x80\":1}"), "header is not UTF-8");
}
TEST(SafetensorsBad, LoneSurrogateEscape) {
  EXPECT_REASON(file_of("{\"\\ud800\":1}"), "header is not JSON");
}
TEST(SafetensorsBad, NestedObjectsBomb) {
  std::string bomb;
  for (int i = 0; i < 1'000'000; ++i) bomb += "{\"a\":";
  EXPECT_REASON(file_of(bomb), "unknown field 'a'");
}
TEST(SafetensorsBad, NestedListsBomb) {
  EXPECT_REASON(file_of("{\"a\":{\"shape\":" + std::string(1'000'000, '[')), "must be a list of integers, got a list");
  EXPECT_REASON(file_of("{\"a\":" + std::string(1'000'000, '[')), "tensor 'a' must be an object, got a list");
}
TEST(SafetensorsBad, DuplicateName) {
  EXPECT_REASON(file_of("{" + one("a") + "," + one("a") + "}", 4), "tensor 'a' is there twice");
}
TEST(SafetensorsBad, DuplicateNameSpeltDifferently) {
  EXPECT_REASON(file_of("{" + one("a") + "," + one("\\u0061") + "}", 4), "tensor 'a' is there twice");
}
TEST(SafetensorsBad, DuplicateMetadata) {
  EXPECT_REASON(file_of("{\"__metadata__\":{},\"__metadata__\":{}}"), "'__metadata__' is there twice");
}
TEST(SafetensorsBad, DuplicateMetadataKey) {
  EXPECT_REASON(file_of(R"({"__metadata__":{"op":"kda","op":"gdn"}})"), "metadata key 'op' is there twice");
}
TEST(SafetensorsBad, DuplicateField) {
  EXPECT_REASON(file_of(R"({"a":{"shape":[1],"shape":[2]}})"), "tensor 'a' has the field 'shape' twice");
}

// ---- Types of fields -----------------------------------------------------------------------------------------------

TEST(SafetensorsBad, TensorIsNotAnObject) {
  EXPECT_REASON(file_of(R"({"a":1})"), "tensor 'a' must be an object, got a number");
  EXPECT_REASON(file_of(R"({"a":null})"), "tensor 'a' must be an object, got null");
  EXPECT_REASON(file_of(R"({"a":"x"})"), "tensor 'a' must be an object, got a string");
}
TEST(SafetensorsBad, MetadataIsNotAnObject) {
  EXPECT_REASON(file_of(R"({"__metadata__":["op"]})"), "'__metadata__' must be an object, got a list");
}
TEST(SafetensorsBad, MetadataValueIsNotAString) {
  EXPECT_REASON(file_of(R"({"__metadata__":{"scale":0.5}})"), "metadata 'scale' must be a string, got a number");
  EXPECT_REASON(file_of(R"({"__metadata__":{"x":{}}})"), "metadata 'x' must be a string, got an object");
  EXPECT_REASON(file_of(R"({"__metadata__":{"x":true}})"), "metadata 'x' must be a string, got a boolean");
}
TEST(SafetensorsBad, DtypeIsNotAString) {
  EXPECT_REASON(file_of(R"({"a":{"dtype":32}})"), "dtype of tensor 'a' must be a string, got a number");
  EXPECT_REASON(file_of(R"({"a":{"dtype":["F32"]}})"), "dtype of tensor 'a' must be a string, got a list");
}
TEST(SafetensorsBad, ShapeIsNotAList) {
  EXPECT_REASON(file_of(R"({"a":{"shape":4}})"), "shape of tensor 'a' must be a list, got a number");
  EXPECT_REASON(file_of(R"({"a":{"shape":{}}})"), "shape of tensor 'a' must be a list, got an object");
}
TEST(SafetensorsBad, ShapeOfStrings) {
  EXPECT_REASON(file_of(R"({"a":{"shape":["1"]}})"), "must be a list of integers, got a string");
}
TEST(SafetensorsBad, FractionalExtent) {
  EXPECT_REASON(file_of(R"({"a":{"shape":[1.5]}})"), "must be a list of integers, got a number that is not an int64");
}
TEST(SafetensorsBad, OffsetsAreNotTwoNumbers) {
  EXPECT_REASON(file_of(R"({"a":{"data_offsets":[0]}})"), "data_offsets of tensor 'a' must be two numbers, got 1");
  EXPECT_REASON(file_of(R"({"a":{"data_offsets":[0,4,8]}})"), "data_offsets of tensor 'a' must be two numbers, got 3");
}
TEST(SafetensorsBad, MissingField) {
  EXPECT_REASON(file_of(R"({"a":{}})"), "tensor 'a' has no field 'dtype'");
  EXPECT_REASON(file_of(R"({"a":{"dtype":"F32"}})"), "tensor 'a' has no field 'shape'");
  EXPECT_REASON(file_of(R"({"a":{"dtype":"F32","shape":[]}})"), "tensor 'a' has no field 'data_offsets'");
}
TEST(SafetensorsBad, UnknownField) {
  EXPECT_REASON(file_of(R"({"a":{"strides":[1]}})"), "tensor 'a' has an unknown field 'strides'");
}

// ---- Numbers -------------------------------------------------------------------------------------------------------

TEST(SafetensorsBad, NegativeExtent) {
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[-1]", 0, 4) + "}", 4), "shape of tensor 'a' has a negative number");
}
TEST(SafetensorsBad, NegativeOffset) {
  EXPECT_REASON(file_of(R"({"a":{"data_offsets":[-4,0]}})"), "data_offsets of tensor 'a' has a negative number");
}
TEST(SafetensorsBad, ExtentPastInt64) {
  EXPECT_REASON(file_of(R"({"a":{"shape":[9223372036854775808]}})"), "past 2^63 - 1");
  EXPECT_REASON(file_of(R"({"a":{"shape":[18446744073709551616]}})"), "not an int64");
  EXPECT_REASON(file_of(R"({"a":{"shape":[1e999]}})"), "header is not JSON");
}
TEST(SafetensorsBad, OffsetPastInt64) {
  EXPECT_REASON(file_of(R"({"a":{"data_offsets":[0,18446744073709551615]}})"), "past 2^63 - 1");
}
TEST(SafetensorsBad, ShapeProductOverflows) {
  // 2^62 * 4 elements: 0 modulo 2^64.
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[4611686018427387904,4]", 0, 0) + "}"), "its shape overflows");
}
TEST(SafetensorsBad, ShapeProductOverflowsBehindAZero) {
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[0,4611686018427387904,4]", 0, 0) + "}"), "its shape overflows");
}
TEST(SafetensorsBad, ShapeOverflowsInBytes) {
  EXPECT_REASON(file_of("{" + entry("a", "F64", "[2305843009213693952]", 0, 0) + "}"), "its shape overflows");
}
TEST(SafetensorsBad, OffsetsGoBack) {
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[1]", 4, 0) + "}", 4), "data_offsets [4, 0) go back");
}
TEST(SafetensorsBad, DataShorterThanTheOffsets) {
  EXPECT_REASON(file_of("{" + one("a") + "}", 3), "truncated: data_offsets [0, 4), the file has 3 bytes of data");
}
TEST(SafetensorsBad, SizeIsNotThatOfTheShape) {
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[3]", 0, 8) + "}", 8), "need 12 bytes, data_offsets [0, 8) have 8");
  EXPECT_REASON(file_of("{" + entry("a", "U8", "[3]", 0, 8) + "}", 8), "need 3 bytes");
  EXPECT_REASON(file_of("{" + entry("a", "F32", "[0]", 0, 4) + "}", 4), "need 0 bytes");
}
TEST(SafetensorsBad, ElementsDoNotFillBytes) {
  EXPECT_REASON(file_of("{" + entry("a", "F4", "[3]", 0, 2) + "}", 2), "do not fill whole bytes");
}

// ---- Layout of the data --------------------------------------------------------------------------------------------

TEST(SafetensorsBad, Overlap) {
  EXPECT_REASON(file_of("{" + entry("a", "BF16", "[4]", 0, 8) + "," + entry("b", "BF16", "[4]", 4, 12) + "}", 12),
                "tensors 'a' and 'b' overlap");
}
TEST(SafetensorsBad, SameBytesTwice) {
  EXPECT_REASON(file_of("{" + one("a") + "," + one("b") + "}", 4), "tensors 'a' and 'b' overlap");
}
TEST(SafetensorsBad, Hole) {
  EXPECT_REASON(file_of("{" + one("a") + "," + one("b", 8) + "}", 12), "hole of 4 bytes before tensor 'b'");
}
TEST(SafetensorsBad, HoleAtTheStart) {
  EXPECT_REASON(file_of("{" + one("a", 4) + "}", 8), "hole of 4 bytes before tensor 'a'");
}
TEST(SafetensorsBad, TrailingData) {
  EXPECT_REASON(file_of("{" + one("a") + "}", 5), "1 bytes after the last tensor");
  EXPECT_REASON(file_of("{}", 1), "1 bytes after the last tensor");
}
TEST(SafetensorsBad, Misaligned) {
  EXPECT_REASON(file_of("{" + entry("a", "U8", "[1]", 0, 1) + "," + entry("b", "F32", "[1]", 1, 5) + "}", 5),
                "tensor 'b': misaligned: starts at byte 1 with elements of 4 bytes");
}

// ---- Messages ------------------------------------------------------------------------------------------------------

TEST(SafetensorsBad, NamesAreEscaped) {
  EXPECT_REASON(file_of("{\"\\n\\u001b[31m\\u00e9\":1}"), "'\\x0a\\x1b[31m\\xc3\\xa9'");
}
TEST(SafetensorsBad, LongNamesAreCut) {
  EXPECT_REASON(file_of("{\"" + std::string(5000, 'n') + "\":1}"), std::string(80, 'n') + "...' must be");
}
// Found by fuzzing: the cut counted bytes before they were escaped, and an escape is four characters long.
TEST(SafetensorsBad, LongNamesAreCutAfterEscaping) {
  std::string control;
  for (int i = 0; i < 200; ++i) control += "\\u007f";
  EXPECT_REASON(file_of("{\"" + control + "\":{\"" + control + "\":1}}"), "has an unknown field '\\x7f");
}
TEST(SafetensorsBad, PathsAreOneLine) {
  try {
    SafetensorsReader::parse({}, "two\nlines");
    FAIL();
  } catch (const FileError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    EXPECT_EQ(error.path(), "two\nlines");
  }
}

// ---- Accepted ------------------------------------------------------------------------------------------------------

TEST(SafetensorsGood, NoTensors) {
  EXPECT_EQ(reason(file_of("{}")), "accepted");
}
TEST(SafetensorsGood, PaddedHeader) {
  EXPECT_EQ(reason(file_of("{}      ")), "accepted");
}
TEST(SafetensorsGood, TensorWithoutElements) {
  const std::string file = file_of("{" + entry("a", "F32", "[1,0,3]", 0, 0) + "," + one("b") + "}", 4);
  const auto read = SafetensorsReader::parse(as_bytes(file));
  ASSERT_NE(read.find("a"), nullptr);
  EXPECT_TRUE(read.find("a")->supported());
  EXPECT_TRUE(read.find("a")->data.empty());
}
TEST(SafetensorsGood, SupportedElementTypes) {
  const std::pair<const char*, DType> types[] = {{"F64", DType::kF64}, {"F32", DType::kF32}, {"BF16", DType::kBF16},
                                                 {"F16", DType::kF16}, {"I32", DType::kI32}, {"I64", DType::kI64}};
  for (const auto& [name, dtype] : types) {
    const std::string file = file_of("{" + entry("a", name, "[3]", 0, 3 * size_of(dtype)) + "}", 3 * size_of(dtype));
    const auto read = SafetensorsReader::parse(as_bytes(file));
    EXPECT_EQ(read.find("a")->dtype, dtype) << name;
    EXPECT_TRUE(read.find("a")->supported()) << name;
  }
}
TEST(SafetensorsGood, OtherElementTypesAreListed) {
  const std::string file =
      file_of("{" + entry("a", "U8", "[3]", 0, 3) + "," + entry("b", "Z\\n9", "[7]", 3, 5) + "}", 5);
  const auto read = SafetensorsReader::parse(as_bytes(file));
  EXPECT_EQ(read.find("a")->unsupported, "element type U8");
  EXPECT_EQ(read.find("b")->unsupported, "element type Z\\x0a9");
  EXPECT_EQ(read.find("b")->data.size(), 2u);
}
TEST(SafetensorsGood, OtherRanksAreListed) {
  const std::string file =
      file_of("{" + entry("a", "F32", "[]", 0, 4) + "," + entry("b", "F32", "[1,1,1,1,1]", 4, 8) + "}", 8);
  const auto read = SafetensorsReader::parse(as_bytes(file));
  EXPECT_EQ(read.find("a")->unsupported, "rank 0");
  EXPECT_EQ(read.find("b")->unsupported, "rank 5");
  EXPECT_EQ(read.find("b")->shape.size(), 5u);
}
TEST(SafetensorsGood, OrderOfTheHeaderIsFree) {
  const std::string file = file_of("{" + one("b", 4) + ",\"__metadata__\":{\"op\":\"kda\"}," + one("a") + "}", 8);
  const auto read = SafetensorsReader::parse(as_bytes(file));
  ASSERT_EQ(read.tensors().size(), 2u);
  EXPECT_EQ(read.tensors()[0].name, "a");
  EXPECT_EQ(read.find("b")->data.data() - read.find("a")->data.data(), 4);
  EXPECT_EQ(read.find("c"), nullptr);
  EXPECT_EQ(read.metadata().at("op"), "kda");
}

// ---- Files ---------------------------------------------------------------------------------------------------------

TEST_F(SafetensorsFiles, RoundTrip) {
  const double d[] = {1.5, -2.0};
  const float f[] = {1, 2, 3, 4, 5, 6};
  const std::uint16_t h[] = {1, 2, 3};
  const std::int64_t offsets[] = {0, 3, 7};
  const std::vector<TensorToWrite> tensors{{"h \"\\\n", DType::kBF16, {3}, h},
                                           {"f", DType::kF32, {1, 2, 3}, f},
                                           {"none", DType::kF64, {0, 5}, nullptr},
                                           {"d", DType::kF64, {2}, d},
                                           {"offsets", DType::kI64, {3}, offsets}};
  const std::map<std::string, std::string> metadata{{"op", "kda"}, {"note", "\xc3\xa9\n\"x\""}};
  write_safetensors(path("out"), tensors, metadata);
  EXPECT_EQ(listing(), std::vector<std::string>{"out"});

  const auto read = SafetensorsReader::open(path("out"));
  EXPECT_EQ(read.metadata(), metadata);
  ASSERT_EQ(read.tensors().size(), tensors.size());
  for (const TensorToWrite& t : tensors) {
    const SafetensorsTensor* r = read.find(t.name);
    ASSERT_NE(r, nullptr) << t.name;
    EXPECT_EQ(r->dtype, t.dtype);
    EXPECT_EQ(r->shape, t.shape);
    EXPECT_TRUE(r->supported());
    if (!r->data.empty()) {
      EXPECT_EQ(std::memcmp(r->data.data(), t.data, r->data.size()), 0) << t.name;
    }
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(r->data.data()) % size_of(t.dtype), 0u) << t.name;
  }
}

TEST_F(SafetensorsFiles, HeaderIsPaddedAndTensorsAreOrdered) {
  const double zeros[4] = {};
  const std::vector<TensorToWrite> tensors{{"a", DType::kF16, {1}, zeros},
                                           {"c", DType::kF64, {1}, zeros},
                                           {"b", DType::kF64, {1}, zeros},
                                           {"d", DType::kF32, {1}, zeros}};
  const SafetensorsLayout layout = safetensors_layout(tensors, {});
  EXPECT_EQ(layout.head.size() % 8, 0u);
  EXPECT_EQ(layout.order, (std::vector<std::size_t>{2, 1, 3, 0}));
}

TEST_F(SafetensorsFiles, DataAreAlignedWhateverTheHeadersLength) {
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const auto file = file_of("{" + entry("a", "F64", "[1]", 0, 8) + "}" + std::string(padding, ' '), 8);
    const auto read = SafetensorsReader::open(put("in", file));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read.find("a")->data.data()) % 64, 0u);
    EXPECT_EQ(std::memcmp(read.find("a")->data.data(), "xxxxxxxx", 8), 0);
  }
}

TEST_F(SafetensorsFiles, TheReaderCanBeMoved) {
  auto read = SafetensorsReader::open(put("in", file_of("{" + one("a") + "}", 4)));
  const std::byte* before = read.find("a")->data.data();
  const SafetensorsReader moved = std::move(read);
  EXPECT_EQ(moved.find("a")->data.data(), before);
}

TEST_F(SafetensorsFiles, RefusesWhatIsNotARegularFile) {
  EXPECT_EQ(open_reason(path("missing")), "cannot open: No such file or directory");
  EXPECT_EQ(open_reason(dir_.string()), "not a regular file");
  EXPECT_EQ(open_reason("/dev/zero"), "not a regular file");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(open_reason(path("pipe")), "not a regular file");
}

TEST_F(SafetensorsFiles, EveryTruncationOfAFileIsRefused) {
  const float f[] = {1, 2};
  const std::vector<TensorToWrite> tensors{{"a", DType::kF32, {2}, f}};
  write_safetensors(path("whole"), tensors, {{"op", "kda"}});
  const std::string whole = read_file(path("whole"));
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_PRED_FORMAT2(::testing::IsSubstring, "truncated", open_reason(put("part", whole.substr(0, n)))) << n;
  }
}

// The header is judged before memory for the data is asked for: this sparse file would need 8 TB.
TEST_F(SafetensorsFiles, HugeSparseFile) {
  put("huge", le64(2) + "{}");
  if (::truncate(path("huge").c_str(), off_t{1} << 43) != 0) GTEST_SKIP() << "no files of this size here";
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "bytes after the last tensor", open_reason(path("huge")));
}

TEST_F(SafetensorsFiles, WriterReplacesAFileAndKeepsItsPermissions) {
  put("out", "old");
  fs::permissions(path("out"), fs::perms(0640));
  write_safetensors(path("out"), {});
  EXPECT_EQ(open_reason(path("out")), "accepted");
  EXPECT_EQ(fs::status(path("out")).permissions(), fs::perms(0640));
}

TEST_F(SafetensorsFiles, WriterFollowsALink) {
  put("real", "old");
  fs::create_symlink("real", path("link"));
  write_safetensors(path("link"), {});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(open_reason(path("real")), "accepted");
}

TEST_F(SafetensorsFiles, WriterLeavesSpecialFilesAlone) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(write_safetensors(path("pipe"), {}), FileError);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_THROW(write_safetensors(dir_.string(), {}), FileError);
  EXPECT_EQ(listing(), std::vector<std::string>{"pipe"});
}

TEST_F(SafetensorsFiles, WriterNeedsTheDirectory) {
  EXPECT_THROW(write_safetensors(path("missing/out"), {}), FileError);
  EXPECT_TRUE(listing().empty());
}

// A limit on the size of files stands in for a full disk: the write fails half way.
TEST_F(SafetensorsFiles, FailedWriteLeavesTheOldFileAndNothingElse) {
  put("out", "old");
  const std::vector<float> f(1 << 16);
  const std::vector<TensorToWrite> tensors{{"a", DType::kF32, {1 << 16}, f.data()}};
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(write_safetensors(path("out"), tensors), FileError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_file(path("out")), "old");
  EXPECT_EQ(listing(), std::vector<std::string>{"out"});
}

TEST_F(SafetensorsFiles, WriterRefusesBadTensors) {
  const float f[] = {1};
  const auto refuses = [&](const std::vector<TensorToWrite>& tensors) {
    EXPECT_THROW(write_safetensors(path("out"), tensors), FileError);
  };
  refuses({{"a", DType::kF32, {1}, f}, {"a", DType::kF32, {1}, f}});
  refuses({{"__metadata__", DType::kF32, {1}, f}});
  refuses({{"\xff", DType::kF32, {1}, f}});
  refuses({{"a", DType::kF32, {-1}, f}});
  refuses({{"a", DType::kF32, {std::int64_t{1} << 62, 4}, f}});
  EXPECT_THROW(write_safetensors(path("out"), {}, {{"key", "\xff"}}), FileError);
  EXPECT_TRUE(listing().empty());
}

// ---- Committed files -----------------------------------------------------------------------------------------------

TEST(SafetensorsExamples, TheFourLayersRead) {
  for (const std::string op : {"deltanet", "gdn", "kda", "gdn2"}) {
    const auto read = SafetensorsReader::open(REWY_SOURCE_DIR "/examples/layers/" + op + ".safetensors");
    EXPECT_EQ(read.metadata().at("op"), op);
    EXPECT_NEAR(std::stod(read.metadata().at("scale")), 0.08838834764831845, 1e-15);
    for (const char* name : {"q", "k", "v", "do"}) {
      const SafetensorsTensor* t = read.find(name);
      ASSERT_NE(t, nullptr) << op << " " << name;
      EXPECT_EQ(t->dtype, DType::kBF16);
      EXPECT_EQ(t->shape, (std::vector<std::int64_t>{1, 600, 2, 128}));
    }
    EXPECT_EQ(read.find("g") != nullptr, op != "deltanet");
    EXPECT_EQ(read.find("beta") != nullptr, op != "gdn2");
    EXPECT_EQ(read.find("b") != nullptr && read.find("w") != nullptr, op == "gdn2");
    for (const SafetensorsTensor& t : read.tensors()) EXPECT_TRUE(t.supported()) << t.name;
  }
}

TEST(SafetensorsCorpus, EveryFileIsReadOrRefused) {
  int files = 0;
  for (const auto& e : fs::directory_iterator(REWY_SOURCE_DIR "/tests/fuzz/corpus")) {
    ++files;
    const std::string bytes = read_file(e.path());
    std::string parsed;
    std::string opened;
    try {
      SafetensorsReader::parse(as_bytes(bytes));
    } catch (const FileError& error) {
      parsed = error.reason();
    }
    try {
      SafetensorsReader::open(e.path().string());
    } catch (const FileError& error) {
      opened = error.reason();
    }
    EXPECT_EQ(parsed, opened) << e.path();
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace rewy::tool
