#include "satchel/data/npy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "satchel/core/error.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::slurp;
using test::spill;

std::string scratch(const std::string& name) { return testing::TempDir() + "npy" + std::to_string(getpid()) + name; }

std::string file_of(int major, const std::string& dict, const std::string& values) {
  std::string out = "\x93NUMPY";
  out += static_cast<char>(major);
  out += '\0';
  const size_t digits = major == 1 ? 2 : 4;
  for (size_t i = 0; i < digits; ++i) out += static_cast<char>(dict.size() >> (8 * i) & 0xff);
  return out + dict + values;
}

std::string dict_of(const std::string& descr, const std::string& shape, const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

NpyHeader parse(const std::string& bytes) {
  return parse_npy_header(std::as_bytes(std::span(bytes.data(), bytes.size())), bytes.size(), "t.npy");
}

std::string error_of(const std::string& bytes) {
  return test::error_of([&] { parse(bytes); });
}

TEST(Npy, WrittenIsReadAgain) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {1}, {7}, {2, 3}, {0, 5}, {2, 3, 4, 5}};
  for (const auto& shape : shapes) {
    NpyHeader sizes;
    sizes.shape = shape;
    std::vector<float> values(static_cast<size_t>(sizes.values()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) + 0.5f;
    const std::string path = scratch("round.npy");
    write_npy(path, "<f4", shape, values.data());
    const NpyArray back = read_npy(path);
    EXPECT_EQ(back.shape, shape);
    EXPECT_EQ(back.descr, "<f4");
    EXPECT_FALSE(back.fortran_order);
    EXPECT_EQ(back.data_offset % 64, 0);
    ASSERT_EQ(back.data.size(), values.size() * 4);
    EXPECT_TRUE(values.empty() || std::memcmp(back.data.data(), values.data(), back.data.size()) == 0);
    std::filesystem::remove(path);
  }
}

TEST(Npy, EveryVersionAndOrder) {
  for (const int major : {1, 2, 3}) {
    const NpyHeader c = parse(file_of(major, dict_of("<f2", "(3, 4)"), std::string(24, 'x')));
    EXPECT_EQ(c.shape, (std::vector<int64_t>{3, 4}));
    EXPECT_EQ(c.strides(), (std::vector<int64_t>{4, 1}));
    EXPECT_EQ(c.kind(), 'f');
    EXPECT_EQ(c.item_bytes(), 2);
    const NpyHeader f = parse(file_of(major, dict_of("<i8", "(3, 4)", "True"), std::string(96, 'x')));
    EXPECT_EQ(f.strides(), (std::vector<int64_t>{1, 3}));
  }
  EXPECT_EQ(parse(file_of(1, "{\"shape\":(3L,),\"descr\":\"<f4\",\"fortran_order\":False}", std::string(12, 'x'))).values(), 3);
}

// Layout of the file: 10 bytes of preamble, the dict, then the values.
TEST(Npy, ErrorsNameFileFieldAndPosition) {
  EXPECT_EQ(error_of("PK\x03\x04zipfile"), "[npy] t.npy: magic (byte 0): must be \\x93NUMPY, got 'PK\\x03\\x04zi'");
  EXPECT_EQ(error_of(file_of(4, dict_of("<f4", "(1,)"), "xxxx")), "[npy] t.npy: version (byte 6): must be 1.0, 2.0 or 3.0, got 4.0");
  EXPECT_EQ(error_of(file_of(1, dict_of(">f4", "(1,)"), "xxxx")), "[npy] t.npy: descr (byte 10): must be little-endian, got '>f4'");
  EXPECT_NE(error_of(file_of(1, dict_of("<V2", "(1,)"), "xx")).find("bfloat16"), std::string::npos);
  EXPECT_NE(error_of(file_of(1, dict_of("<c8", "(1,)"), "xxxxxxxx")).find("descr"), std::string::npos);
  EXPECT_NE(error_of(file_of(1, dict_of("<f4", "(-1,)"), "")).find("shape (byte 61): must hold whole numbers"), std::string::npos);
  EXPECT_NE(error_of(file_of(1, dict_of("<f4", "(3,)"), std::string(11, 'x'))).find("must have 12 bytes, as descr and shape say, got 11"),
            std::string::npos);
  EXPECT_NE(error_of(file_of(1, dict_of("<f4", "(3,)"), std::string(13, 'x'))).find("got 13"), std::string::npos);
}

TEST(Npy, ShapesThatOverflowAreRefused) {
  for (const char* shape : {"(9223372036854775807,)", "(4294967296, 4294967296)", "(0, 4294967296, 4294967296)", "(99999999999999999999,)",
                            "(3037000500, 3037000500)"}) {
    EXPECT_NE(error_of(file_of(1, dict_of("<f4", shape), "")).find("shape"), std::string::npos) << shape;
  }
  std::string deep = "(";
  for (int i = 0; i < 65; ++i) deep += "1,";
  EXPECT_NE(error_of(file_of(1, dict_of("<f4", deep + ")"), "xxxx")).find("at most 64 dimensions"), std::string::npos);
}

TEST(Npy, HeaderGarbageIsRefused) {
  for (const char* dict :
       {"", "{", "}", "{}", "{'descr'", "{'descr':", "{'descr': '<f4", "{'descr': <f4}", "{'shape': (1", "{'shape': 1}", "[]",
        "{'descr': '<f4', 'fortran_order': False}", "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}", "{'descr': '<f4' 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x", "{'descr': '', 'fortran_order': False, 'shape': ()}",
        "{'descr': [('a','<f4')], 'fortran_order': False, 'shape': ()}"}) {
    EXPECT_NE(error_of(file_of(1, dict, "xxxx")), "accepted") << dict;
  }
  std::string zero = dict_of("<f4", "(1,)");
  zero[zero.size() - 2] = '\0';
  EXPECT_NE(error_of(file_of(1, zero, "xxxx")), "accepted");
}

TEST(Npy, EveryTruncationIsRefused) {
  const std::string path = scratch("cut.npy");
  for (const int major : {1, 2}) {
    const std::string whole = file_of(major, dict_of("<f4", "(2, 3)"), std::string(24, 'x'));
    for (size_t keep = 0; keep < whole.size(); ++keep) {
      spill(path, whole.substr(0, keep));
      EXPECT_THROW(read_npy(path), Error) << keep;
      EXPECT_NE(error_of(whole.substr(0, keep)), "accepted") << keep;
    }
    spill(path, whole + "x");
    EXPECT_THROW(read_npy(path), Error);
    spill(path, whole);
    EXPECT_EQ(read_npy(path).values(), 6);
  }
  std::filesystem::remove(path);
}

// Whatever a byte of the header becomes, the parser accepts or throws Error; what it accepts has as many bytes as it says.
TEST(Npy, ChangedBytesNeverCrash) {
  const std::string whole = file_of(1, dict_of("<f4", "(2, 3)"), std::string(24, 'x'));
  std::mt19937 random(7);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string changed = whole;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) changed[random() % (whole.size() - 24)] = static_cast<char>(random());
    try {
      const NpyHeader header = parse(changed);
      EXPECT_EQ(header.values() * header.item_bytes(), 24);
    } catch (const Error&) {
    }
  }
}

TEST(Npy, PathsThatCannotBe) {
  EXPECT_THROW(read_npy(scratch("missing.npy")), Error);
  EXPECT_THROW(read_npy(testing::TempDir()), Error);
  const float x = 1;
  EXPECT_THROW(write_npy(testing::TempDir(), "<f4", {}, &x), Error);
  EXPECT_THROW(write_npy("/nowhere/at/all.npy", "<f4", {}, &x), Error);
  EXPECT_THROW(write_npy(scratch("type.npy"), "<f3", {}, &x), Error);
  EXPECT_THROW(write_npy("", "<f4", {}, &x), Error);
}

// Renaming over a link would leave its target as it was and the link gone: /dev/stdout is one.
TEST(Npy, NothingButPlainFilesIsReplaced) {
  const std::string target = scratch("target"), link = scratch("link");
  const float x = 1;
  spill(target, "before");
  std::filesystem::create_symlink(target, link);
  EXPECT_THROW(write_npy(link, "<f4", {}, &x), Error);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(slurp(target), "before");
  std::filesystem::remove(target);
  EXPECT_THROW(write_npy(link, "<f4", {}, &x), Error);  // leads nowhere now
  EXPECT_FALSE(std::filesystem::exists(target));
  std::filesystem::remove(link);
  EXPECT_THROW(write_npy("/dev/null", "<f4", {}, &x), Error);
}

TEST(Npy, ShapesThatNoFileHasAreNotWritten) {
  const std::string path = scratch("shape.npy");
  const float x = 1;
  const int64_t half = int64_t{1} << 62;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{-1}, {half, half}, std::vector<int64_t>(65, 1)}) {
    EXPECT_THROW(write_npy(path, "<f4", shape, &x), Error);
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_FALSE(std::filesystem::exists(path + ".part" + std::to_string(getpid())));
  }
}

// The very bytes numpy 2 writes for np.arange(2, dtype=np.float32).
TEST(Npy, SameHeaderAsNumpy) {
  const std::string path = scratch("numpy.npy");
  const float values[] = {0, 1};
  write_npy(path, "<f4", std::vector<int64_t>{2}, values);
  const std::string expected =
      file_of(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + std::string(60, ' ') + "\n", std::string());
  EXPECT_EQ(slurp(path).substr(0, 128), expected);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace satchel
