// The header of a packed file, parsed without torch: whatever the bytes are, it is read or refused, under the sanitizers too.
#include "satchel/tensor/file_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "satchel/core/error.h"
#include "satchel/kernels/codec_layout.h"
#include "tests/support.h"

namespace satchel {
namespace {

using Bytes = std::vector<uint8_t>;

enum Field : size_t { kBits, kBlock, kSide = 6, kTransform, kP0, kChannels = 12, kInner, kHasSeed, kSeed, kPayload, kRank, kShape };

FileHeader header_of(const char* spec, const std::vector<int64_t>& shape, int64_t channels = 0, int64_t inner = 1) {
  FileHeader h;
  h.spec = parse_spec(spec);
  h.shape = shape;
  h.strides = contiguous_strides(shape);
  h.channels = channels;
  h.inner = inner;
  h.has_seed = true;
  h.seed = ~uint64_t{6};
  h.payload = plan_of(shape, h.dtype, h.spec, channels, inner, "test").at.total;
  return h;
}

/// Those of the tests: every coding, every kind of shape.
std::vector<FileHeader> headers() {
  return {header_of("bits=2,block=16", {3, 16}),
          header_of("exact", {3, 16}),
          header_of("blockwise,rows=64,hadamard=yes", {5, 4, 32}),
          header_of("division", {2, 3, 9, 10}),
          header_of("side=one", {2, 3, 4}, 3, 4),
          header_of("bits=32", {}),
          header_of("actnn", {0, 3})};
}

/// The checksum made right again, so that what it guards is parsed.
Bytes sealed(Bytes bytes) {
  const Bytes sum = checksum(std::span(bytes).first(bytes.size() - 4));
  std::copy(sum.begin(), sum.end(), bytes.end() - 4);
  return bytes;
}

Bytes with_number(Bytes bytes, size_t index, int64_t value) {
  for (size_t i = 0; i < 8; ++i) bytes[kFileStart + 8 * index + i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
  return sealed(std::move(bytes));
}

std::string error_of(const Bytes& bytes) {
  return test::error_of([&] { parse_header(bytes); });
}

/// What is accepted must be what unpack() can read.
void expect_sane(const FileHeader& h) {
  EXPECT_NO_THROW(validate(h.spec, "test"));
  EXPECT_EQ(h.payload, plan_of(h.shape, h.dtype, h.spec, h.channels, h.inner, "test").at.total);
  EXPECT_GE(h.payload, 0);
  EXPECT_NO_THROW(check_strides(h.shape, h.strides, "test"));
  EXPECT_LE(static_cast<int64_t>(h.shape.size()), kMaxRank);
}

TEST(FileFormat, WrittenIsReadAgain) {
  for (const FileHeader& h : headers()) {
    const Bytes bytes = format_header(h);
    ASSERT_EQ(header_length(std::span(bytes).first(kFileStart)), bytes.size());
    const FileHeader back = parse_header(bytes);
    EXPECT_EQ(back.spec, h.spec);
    EXPECT_EQ(back.dtype, h.dtype);
    EXPECT_EQ(back.channels, h.channels);
    EXPECT_EQ(back.inner, h.inner);
    EXPECT_EQ(back.has_seed, h.has_seed);
    EXPECT_EQ(back.seed, h.seed);
    EXPECT_EQ(back.payload, h.payload);
    EXPECT_EQ(back.shape, h.shape);
    EXPECT_EQ(back.strides, h.strides);
  }
}

// docs/format.md in bytes.
TEST(FileFormat, StandsAsTheDocsDrawIt) {
  const Bytes bytes = format_header(header_of("bits=2,block=16", {3, 16}));
  EXPECT_EQ(std::string(bytes.begin(), bytes.begin() + 8), "SATCHELP");
  EXPECT_EQ(bytes[8], kFileVersion);
  EXPECT_EQ(bytes.size(), 16u + 88 + 48 + 8 + 2 * 8 + 2 * 8 + 4);
  EXPECT_EQ(bytes[12] + 256 * bytes[13], 88 + 48 + 8 + 2 * 8 + 2 * 8);
  EXPECT_EQ(bytes[16 + 8], 16);             // block
  EXPECT_EQ(bytes[16 + 88 + 32], 0xf9);     // lowest byte of the seed, ~6
  EXPECT_EQ(bytes[16 + 88 + 40], 16 + 12);  // payload: 12 bytes of codes, three headers
  EXPECT_EQ(bytes[16 + 88 + 48], 2);        // rank
  EXPECT_EQ(checksum(Bytes{'1', '2', '3', '4', '5', '6', '7', '8', '9'}), (Bytes{0x26, 0x39, 0xf4, 0xcb}));  // CRC-32's own check value
}

TEST(FileFormat, EveryTruncationIsRefused) {
  for (const FileHeader& h : headers()) {
    const Bytes whole = format_header(h);
    for (size_t keep = 0; keep < whole.size(); ++keep) {
      const Bytes cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(keep));  // its own memory: ASan sees a read beyond
      EXPECT_NE(error_of(cut).find("truncated"), std::string::npos) << keep << ": " << error_of(cut);
    }
  }
}

TEST(FileFormat, EveryFlippedByteIsRefused) {
  for (const FileHeader& h : headers()) {
    const Bytes whole = format_header(h);
    for (size_t i = 0; i < whole.size(); ++i) {
      for (const int flip : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
        Bytes bad = whole;
        bad[i] = static_cast<uint8_t>(bad[i] ^ flip);
        EXPECT_THROW(parse_header(bad), Error) << "byte " << i << " ^ " << flip;
      }
    }
  }
}

// Bytes changed and the checksum made right again: an author with bad intent rather than a bad disk.
TEST(FileFormat, ChangedNumbersNeverCrash) {
  std::mt19937_64 random(5);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> absurd = {0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 256, kMost, kMost - 1, kLeast, kLeast + 1};
  for (int shift = 10; shift < 64; ++shift) {
    const auto power = static_cast<int64_t>(uint64_t{1} << shift);
    absurd.insert(absurd.end(), {power, power - (shift < 63 ? 1 : 0), shift < 63 ? -power : power});
  }
  for (const FileHeader& h : headers()) {
    const Bytes whole = format_header(h);
    const size_t numbers = (whole.size() - kFileStart - 4) / 8;
    const auto attempt = [](const Bytes& bytes) {
      try {
        expect_sane(parse_header(bytes));
      } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()).rfind("[read_packed] ", 0), 0u) << e.what();
      }
    };
    for (size_t i = 0; i < numbers; ++i) {
      for (const int64_t value : absurd) attempt(with_number(whole, i, value));
    }
    for (int trial = 0; trial < 3000; ++trial) {
      Bytes bytes = whole;
      for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
        bytes = with_number(std::move(bytes), random() % numbers, absurd[random() % absurd.size()]);
      }
      attempt(bytes);
      bytes = whole;
      for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
      attempt(sealed(std::move(bytes)));
    }
  }
}

TEST(FileFormat, AbsurdCountsAreRefused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Bytes plain = format_header(header_of("bits=2,block=16", {3, 16}));
  EXPECT_NE(error_of(with_number(plain, kRank, kMost)).find("rank must fit"), std::string::npos);
  EXPECT_NE(error_of(with_number(plain, kRank, int64_t{1} << 61)).find("rank must fit"), std::string::npos);  // times 8 is 0
  EXPECT_NE(error_of(with_number(plain, kRank, 3)).find("rank must fit"), std::string::npos);
  EXPECT_NE(error_of(with_number(plain, kPayload, kMost)).find("payload must be 28 bytes"), std::string::npos);
  EXPECT_NE(error_of(with_number(plain, kShape, kMost)).find("at most 2^56 values"), std::string::npos);
  EXPECT_NE(error_of(with_number(plain, kBlock, std::numeric_limits<int64_t>::min())).find("block"), std::string::npos);

  Bytes length = plain;  // of the header
  for (const int64_t bytes : {int64_t{0}, int64_t{8}, int64_t{143}, int64_t{145}, int64_t{1} << 31, int64_t{0xffffffff}}) {
    for (size_t i = 0; i < 4; ++i) length[12 + i] = static_cast<uint8_t>(bytes >> (8 * i));
    EXPECT_NE(error_of(length).find("header length"), std::string::npos) << bytes;
  }

  FileHeader deep = header_of("bits=2", std::vector<int64_t>(64, 1));
  expect_sane(parse_header(format_header(deep)));
  deep.shape.push_back(1);
  deep.strides.push_back(1);
  EXPECT_NE(error_of(format_header(deep)).find("header length"), std::string::npos);
}

// No values, so nothing bounds the other numbers but their own rules: products of them must not overflow.
TEST(FileFormat, AbsurdCountsOfEmptyTensors) {
  const int64_t big = int64_t{1} << 62;
  for (const char* spec : {"bits=2", "division", "exact,project=1", "actnn", "bits=32,block=map", "side=relu", "lowpass=1,bits=32"}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{0, 1, big, big, big}, {big, big, 0}, {big, 0, big, 4}}) {
      FileHeader h = header_of("bits=2", {0});
      h.spec = parse_spec(spec);
      h.shape = shape;
      h.strides = contiguous_strides(shape);
      for (int64_t& stride : h.strides) stride = std::max<int64_t>(stride, 0);
      const Bytes bytes = format_header(h);
      if (error_of(bytes) == "accepted") expect_sane(parse_header(bytes));
    }
  }
  const Bytes side = format_header(header_of("side=one", {0, 3}, 3));
  expect_sane(parse_header(side));
  for (const int shift : {57, 59, 60, 61, 62}) {
    const Bytes bytes = with_number(with_number(side, kChannels, int64_t{1} << shift), kPayload, 0);
    EXPECT_NE(error_of(bytes).find("channels must fit"), std::string::npos) << shift << ": " << error_of(bytes);
  }
}

}  // namespace
}  // namespace satchel
