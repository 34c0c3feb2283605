#include "satchel/data/npz.h"

#include <cmath>
#include <random>

#include "files.h"

namespace satchel {
namespace {

using namespace testing_files;

// numpy.savez_compressed(path, a=numpy.arange(3, dtype="<i4")), numpy 2.4: sizes in zip64 fields, as numpy always writes them.
constexpr const char* kNumpyFile =
    "504b03042d00000008000000210002ecbda9ffffffffffffffff05001400612e6e7079010010008c000000000000004c000000000000009bec17ea1b10c9c850"
    "c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91ac63a9a3a0ab50a14002e062060046226"
    "200600504b01022d032d00000008000000210002ecbda94c0000008c000000050000000000000000000000800100000000612e6e7079504b0506000000000100"
    "010033000000830000000000";

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

/// Writes `value` into the first local (PK 3 4) and the first central header (PK 1 2) of a zip file.
std::string patched(std::string zip, size_t local, size_t central, uint32_t value, size_t bytes) {
  const size_t at[] = {zip.find("PK\x03\x04") + local, zip.find("PK\x01\x02") + central};
  for (const size_t place : at) std::memcpy(zip.data() + place, &value, bytes);
  return zip;
}

class NpzFile : public ::testing::Test {
 protected:
  std::string good(bool deflate = true) {
    write_npz(path, {{"a", npy(std::vector<int32_t>{0, 1, 2})}}, deflate);
    return slurp(path);
  }
  std::string error() {
    return error_of([&] { EXPECT_EQ(Npz(path).integers("a", {3}), (std::vector<int64_t>{0, 1, 2})); }, scratch);
  }
  std::string error(const std::string& bytes) {
    spill(path, bytes);
    return error();
  }
  std::string array_error(const std::string& array) {
    write_npz(path, {{"a", array}});
    return error();
  }

  Scratch scratch;
  std::string path = scratch.path("t.npz");
};

TEST_F(NpzFile, ReadsNumpysOwn) { EXPECT_EQ(error(from_hex(kNumpyFile)), "accepted"); }

TEST_F(NpzFile, ReadsEveryTypeStoredOrDeflated) {
  const std::string half("\x00\x3c\x00\xc0", 4);  // 1 and −2 in fp16
  for (const bool deflate : {false, true}) {
    write_npz(path,
              {{"i1", npy(std::vector<int8_t>{-1, 2})},
               {"i2", npy(std::vector<int16_t>{-1, 2})},
               {"i8", npy(std::vector<int64_t>{-1, 2})},
               {"u1", npy(std::vector<uint8_t>{255, 2})},
               {"u4", npy(std::vector<uint32_t>{4294967295u, 2})},
               {"b1", npy_text("|b1", "(2,)", std::string("\x01\x00", 2))},
               {"f2", npy_text("<f2", "(2,)", half)},
               {"f4", npy(std::vector<float>{0.5f, -2})},
               {"f8", npy(std::vector<double>{0.25, 1e30})},
               {"none", npy(std::vector<float>{})},
               {"by_columns", npy_text("<i4", "(2, 3)", bytes_of(std::vector<int32_t>{1, 4, 2, 5, 3, 6}), true)}},
              deflate);
    const Npz file(path);
    EXPECT_EQ(file.integers("i1", {2}), (std::vector<int64_t>{-1, 2}));
    EXPECT_EQ(file.integers("i2", {2}), (std::vector<int64_t>{-1, 2}));
    EXPECT_EQ(file.integers("i8", {kAny}), (std::vector<int64_t>{-1, 2}));
    EXPECT_EQ(file.integers("u1", {2}), (std::vector<int64_t>{255, 2}));
    EXPECT_EQ(file.integers("u4", {2}), (std::vector<int64_t>{4294967295, 2}));
    EXPECT_EQ(file.integers("b1", {2}), (std::vector<int64_t>{1, 0}));
    EXPECT_EQ(file.floats("f2", {2}), (std::vector<float>{1, -2}));
    EXPECT_EQ(file.floats("f4", {2}), (std::vector<float>{0.5f, -2}));
    EXPECT_EQ(file.floats("f8", {2}), (std::vector<float>{0.25f, 1e30f}));
    EXPECT_EQ(file.floats("i1", {2}), (std::vector<float>{-1, 2}));
    EXPECT_TRUE(file.floats("none", {0}).empty());
    EXPECT_EQ(file.integers("by_columns", {2, 3}), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(file.header("by_columns").shape, (std::vector<int64_t>{2, 3}));
    EXPECT_FALSE(file.has("i4"));
  }
}

TEST_F(NpzFile, TextScalars) {
  write_npz(path, {{"s", npy_text("|S3", "()", "csr")}, {"u", npy_text("<U3", "()", std::string("c\0\0\0s\0\0\0c\0\0\0", 12))}});
  EXPECT_EQ(Npz(path).text("s"), "csr");
  EXPECT_EQ(Npz(path).text("u"), "csc");
}

// Every prefix lacks at least the last byte of the zip directory's end.
TEST_F(NpzFile, NoPrefixIsAccepted) {
  for (const std::string& whole : {good(true), good(false), from_hex(kNumpyFile)}) {
    for (size_t length = 0; length < whole.size(); ++length) {
      EXPECT_TRUE(error(whole.substr(0, length)).starts_with("[load] t.npz")) << length;
    }
    EXPECT_EQ(error(whole), "accepted");
  }
}

// A CRC covers the values: what is accepted has the right ones (error() compares them).
TEST_F(NpzFile, NoChangedByteGivesWrongValues) {
  for (const std::string& whole : {good(true), good(false), from_hex(kNumpyFile)}) {
    int refused = 0;
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const int flip : {0x01, 0x80}) {
        std::string bad = whole;
        bad[at] = static_cast<char>(bad[at] ^ flip);
        refused += error(bad) == "accepted" ? 0 : 1;
      }
    }
    EXPECT_GT(refused, 0);
  }
}

TEST_F(NpzFile, RandomBytesAreRefused) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string bytes(random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_NE(error(bytes), "accepted");
  }
}

TEST_F(NpzFile, EncryptedAndUnknownMethods) {
  EXPECT_EQ(error(patched(good(), 8, 10, 12, 2)), "[load] t.npz: a must be stored or deflated, got zip method 12");
  EXPECT_EQ(error(patched(good(), 8, 10, 77, 2)), "[load] t.npz: a must be stored or deflated, got zip method 77");
  EXPECT_EQ(error(patched(good(), 6, 8, 1, 2)), "[load] t.npz: a must not be encrypted, got zip encryption 1");
}

// Offsets of the sizes in zip headers: packed 18 and 20, unpacked 22 and 24.
TEST_F(NpzFile, DeclaredSizesMustBeTrue) {
  const auto bytes = static_cast<uint32_t>(npy(std::vector<int32_t>{0, 1, 2}).size());
  EXPECT_TRUE(holds(error(patched(good(), 22, 24, 0xfffffff0u, 4)), "t.npz: a must have a size that its")) << error();
  EXPECT_TRUE(holds(error(patched(good(), 22, 24, bytes + 4, 4)), "t.npz: a must unpack to the size and checksum it declares, got its end"))
      << error();
  EXPECT_TRUE(holds(error(patched(good(), 22, 24, bytes - 4, 4)), "as descr and shape say, got 8")) << error();
  EXPECT_TRUE(holds(error(patched(good(false), 22, 24, bytes + 4, 4)), "[load] t.npz")) << error();
  EXPECT_TRUE(holds(error(patched(good(), 14, 16, 0, 4)), "t.npz: a must unpack to the size and checksum it declares")) << error();
}

// Headers that fit each other's lie: the directory and the .npy header agree on 400 values, the stream has 3.
TEST_F(NpzFile, BombsAreRefused) {
  std::string honest = npy_text("<i4", "(400,)", bytes_of(std::vector<int32_t>{0, 1, 2}));
  write_npz(path, {{"a", honest}});
  const std::string lying = patched(slurp(path), 22, 24, static_cast<uint32_t>(honest.size() + 397 * 4), 4);
  spill(path, lying);
  EXPECT_TRUE(holds(error_of([&] { Npz(path).integers("a", {400}); }, scratch), "t.npz: a must unpack to")) << error();
  // The other way round: a megabyte of zeros behind a directory and a header that say three values.
  honest = npy(std::vector<int32_t>{0, 1, 2});
  write_npz(path, {{"a", honest + std::string(1 << 20, '\0')}});
  EXPECT_TRUE(holds(error(patched(slurp(path), 22, 24, static_cast<uint32_t>(honest.size()), 4)), "t.npz: a must unpack to")) << error();
}

TEST_F(NpzFile, ArraysThatAreNotNumbers) {
  EXPECT_EQ(array_error(npy_text("|O", "(3,)", "pickle")),
            "[load] t.npz: a: descr (byte 10): must be numbers (pickled Python objects are never loaded), got '|O'");
  EXPECT_TRUE(holds(array_error(npy_text(">i4", "(3,)", std::string(12, 'x'))), "t.npz: a: descr (byte 10): must be little-endian"));
  EXPECT_EQ(array_error("no array at all"), "[load] t.npz: a: magic (byte 0): must be \\x93NUMPY, got 'no arr'");
  EXPECT_TRUE(holds(array_error(npy_text("<i4", "(4294967296, 4294967296)", "")), "t.npz: a: shape"));
  EXPECT_EQ(array_error(npy(std::vector<float>{0, 1, 2})), "[load] t.npz: a must be whole numbers, got <f4");
  EXPECT_EQ(array_error(npy(std::vector<int32_t>{0, 1})), "[load] t.npz: a must have shape (3), got (2)");
  EXPECT_EQ(array_error(npy(std::vector<uint64_t>{0, 1, uint64_t{1} << 63})),
            "[load] t.npz: a must fit into 63 bits, got 9223372036854775808 at position 2");
}

TEST_F(NpzFile, FloatsMustBeFinite) {
  const auto error_in = [&](const std::string& array) {
    write_npz(path, {{"a", array}});
    return error_of([&] { Npz(path).floats("a", {2, 2}); }, scratch);
  };
  EXPECT_EQ(error_in(npy(std::vector<float>{1, 2, 3, NAN}, "(2, 2)")),
            "[load] t.npz: a must be finite numbers of 32 bits, got nan at row 1, column 1");
  EXPECT_TRUE(holds(error_in(npy(std::vector<float>{1, -INFINITY, 3, 4}, "(2, 2)")), "got -inf at row 0, column 1"));
  EXPECT_TRUE(holds(error_in(npy(std::vector<double>{1, 2, 1e39, 4}, "(2, 2)")), "at row 1, column 0"));
  EXPECT_EQ(error_in(npy(std::vector<double>{1, 2, 3e38, 4}, "(2, 2)")), "accepted");
}

TEST_F(NpzFile, MissingAndDoubleNames) {
  write_npz(path, {{"b", npy(std::vector<int32_t>{1})}, {"c", npy(std::vector<int32_t>{1})}});
  EXPECT_EQ(error(), "[load] t.npz: a must be there, got 'b', 'c'");
  std::string twice = slurp(path);
  for (size_t at = twice.find("c.npy"); at != std::string::npos; at = twice.find("c.npy")) twice[at] = 'b';
  const std::string refused = error_of([&] { spill(path, twice), Npz(path).integers("b", {1}); }, scratch);
  EXPECT_TRUE(holds(refused, "got 'b' twice") || holds(refused, "got a directory that does not fit its entries"))
      << refused;  // as libzip sees it
  EXPECT_EQ(error_of([&] { Npz(scratch.path("none.npz")); }, scratch), "[load] file must exist, got none.npz");
  EXPECT_EQ(error_of([&] { Npz(scratch.make_folder("folder.npz")); }, scratch), "[load] path must be a file, got folder.npz");
}

}  // namespace
}  // namespace satchel
