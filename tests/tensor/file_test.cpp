// Packed to and from a file: everything comes back, and nothing altered does.
#include "satchel/tensor/file.h"

#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <fstream>
#include <limits>
#include <tuple>

#include "reference.h"
#include "tests/support.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;

using Bytes = std::vector<uint8_t>;

class File : public testing::Test {
 protected:
  File() { ::mkdir(folder_.c_str(), 0700); }
  ~File() override {
    std::remove(path_.c_str());
    EXPECT_EQ(::rmdir(folder_.c_str()), 0) << "a temporary file was left";
  }

  Bytes written(const Packed& packed) {
    write_packed(packed, path_);
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  Packed read(const Bytes& bytes) {
    std::ofstream(path_, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return read_packed(path_);
  }
  std::function<void()> reading(const Bytes& bytes) {
    return [this, bytes] { read(bytes); };
  }

  std::string folder_ = testing::TempDir() + "satchel_file_test_" + std::to_string(::getpid());
  std::string path_ = folder_ + "/packed";
};

class FileOf : public File, public testing::WithParamInterface<const char*> {};

void put(Bytes& bytes, size_t at, uint64_t value, size_t count) {
  for (size_t i = 0; i < count; ++i) bytes[at + i] = static_cast<uint8_t>(value >> (8 * i));
}

size_t header_size(const Bytes& bytes) { return 16 + bytes[12] + 256u * bytes[13] + 4; }

/// Number `index` of the header changed and the header's checksum made right again.
Bytes altered(Bytes bytes, size_t index, int64_t value) {
  const size_t end = header_size(bytes) - 4;
  put(bytes, 16 + 8 * index, static_cast<uint64_t>(value), 8);
  put(bytes, end, crc32(0, bytes.data(), static_cast<uInt>(end)), 4);
  return bytes;
}

enum Field : size_t {
  kBits,
  kBlock,
  kSample,
  kLevels,
  kRounding,
  kHeader,
  kSide,
  kTransform,
  kP0,
  kP1,
  kP2,
  kDtype,
  kChannels,
  kInner,
  kHasSeed,
  kSeed,
  kPayload,
  kRank,
  kShape
};

class FileEverythingComesBack : public FileOf {};

TEST_P(FileEverythingComesBack, BySpec) {
  const char* const text = GetParam();
  for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {0, 3}, {5, 6, 4, 8}}) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const Packed packed = pack(normal(shape, 1, type), parse_spec(text), ~uint64_t{5});
      write_packed(packed, path_);
      const Packed back = read_packed(path_);
      EXPECT_TRUE(reference::same(back.bytes, packed.bytes));
      EXPECT_EQ(back.spec, packed.spec);
      EXPECT_EQ(back.shape, packed.shape);
      EXPECT_EQ(back.strides, packed.strides);
      EXPECT_EQ(back.dtype, packed.dtype);
      EXPECT_EQ(back.seed.defined(), packed.seed.defined());
      EXPECT_TRUE(reference::same(unpack(back), unpack(packed))) << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, FileEverythingComesBack,
                         testing::Values("bits=2", "exact", "blockwise,rows=64,hadamard=yes", "division", "actnn", "bits=32,block=map",
                                         "side=one", "bits=3,side=relu", "bits=8,header=f32,round=nearest"),
                         test::kCaseName);

TEST_F(File, ChannelsLastComesBack) {
  const at::Tensor last = normal({2, 3, 4, 5}, 2).contiguous(at::MemoryFormat::ChannelsLast);
  write_packed(pack_side(last, parse_spec("side=one"), seed_tensor(1, at::kCPU), at::ones({3}), at::zeros({3})), path_);
  EXPECT_EQ(read_packed(path_).inner, 1);
  EXPECT_EQ(unpack(read_packed(path_)).strides(), last.strides());
}

class FileEveryFlippedByteIsRefused : public FileOf {};

TEST_P(FileEveryFlippedByteIsRefused, BySpec) {
  const char* const text = GetParam();
  const Bytes good = written(pack(normal({3, 16}, 3), parse_spec(text), 4));
  for (size_t i = 0; i < good.size(); ++i) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      Bytes bad = good;
      bad[i] ^= flip;
      EXPECT_THROW(read(bad), Error) << "byte " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, FileEveryFlippedByteIsRefused, testing::Values("bits=2,block=16", "exact"), test::kCaseName);

TEST_F(File, EveryTruncationIsRefused) {
  const Bytes good = written(pack(normal({3, 16}, 5), parse_spec("exact"), 6));
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(read({good.begin(), good.begin() + static_cast<ptrdiff_t>(length)}), Error) << length;
  }
}

TEST_F(File, ErrorsNameWhatIsWrong) {
  const Bytes good = written(pack(normal({3, 16}, 7), parse_spec("bits=2,block=16"), 8));
  const size_t header = header_size(good);
  const auto cut = [&](size_t length) { return reading({good.begin(), good.begin() + static_cast<ptrdiff_t>(length)}); };
  Bytes bad = good;
  bad[0] = 'X';
  expect_error(reading(bad), "[read_packed] not a packed tensor");
  bad = good;
  bad[8] = 3;
  expect_error(reading(bad), "[read_packed] file version must be 1 to 2, got 3");
  expect_error(cut(10), "[read_packed] file is truncated in its first 16 bytes, got 10");
  expect_error(cut(header - 1), "[read_packed] file is truncated in its header of");
  expect_error(cut(header + 3), "[read_packed] file is truncated in its payload of 28 bytes, got 3");
  expect_error(cut(good.size() - 1), "[read_packed] file is truncated in its last checksum, got 3");
  bad = good;
  bad[40] ^= 1;
  expect_error(reading(bad), "[read_packed] header checksum does not match");
  bad = good;
  bad[header] ^= 1;
  expect_error(reading(bad), "[read_packed] payload checksum does not match");
  bad = good;
  bad.push_back(0);
  expect_error(reading(bad), "[read_packed] nothing may follow the payload, got 1 bytes");
  expect_error([&] { read_packed(folder_ + "/none"); }, "[read_packed] file must exist, got '");
  expect_error([&] { read_packed(folder_); }, "[read_packed] path must be a file");
  expect_error([&] { write_packed(pack(normal({3}, 1), CodecSpec{}, 1), folder_ + "/none/file"); },
               "[write_packed] file must be writable (No such file or directory), got '");
}

/// Files are renamed into place, which would replace a folder's entry of any kind.
TEST_F(File, NothingButPlainFilesIsReplaced) {
  const Packed packed = pack(normal({3}, 1), CodecSpec{}, 1);
  const std::string link = folder_ + "/link", pipe = folder_ + "/pipe";
  write_packed(packed, path_);
  ASSERT_EQ(::symlink(path_.c_str(), link.c_str()), 0);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {link, pipe, folder_, std::string("/dev/null"), std::string()}) {
    expect_error([&] { write_packed(packed, path); }, "[write_packed] output must");
  }
  EXPECT_NO_THROW(read_packed(link));
  EXPECT_EQ(::unlink(link.c_str()) + ::unlink(pipe.c_str()), 0);
}

TEST_F(File, WhatNoFileHoldsIsNotWritten) {
  Packed packed = pack(normal({3}, 1), CodecSpec{}, 1);
  packed.seed = at::empty({0}, at::kLong);  // unpack() does not look at it, a file would hold it
  expect_error([&] { write_packed(packed, path_); }, "[write_packed] seed must hold one value, got 0");
  Packed deep = pack(normal({1}, 1), CodecSpec{}, 1);
  deep.shape = deep.strides = std::vector<int64_t>(65, 1);
  expect_error([&] { write_packed(deep, path_); }, "[write_packed] a file holds at most 64 dimensions, got 65");
}

/// One number of a header that is changed, with its checksum made right.
struct Altered {
  std::string name;
  size_t field;
  int64_t value;
  const char* part;  // of the error
};

class FileAltered : public File, public testing::WithParamInterface<Altered> {};

TEST_P(FileAltered, NumberIsRefused) {
  const Altered& a = GetParam();
  const Bytes good = written(pack(normal({3, 16}, 9), parse_spec("bits=2,block=16"), 10));
  ASSERT_NO_THROW(read(altered(good, kBlock, 16)));
  expect_error(reading(altered(good, a.field, a.value)), std::string("[read_packed] ") + a.part);
}

constexpr int64_t kBig = int64_t{1} << 40, kMost = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(, FileAltered,
                         testing::ValuesIn(std::vector<Altered>{
                             {"bits 9", kBits, 9, "bits must be 1 to 8"},
                             {"bits 0", kBits, 0, "bits must be 1 to 32"},
                             {"bits 3", kBits, 3, "payload must be"},
                             {"block 0", kBlock, 0, "block"},
                             {"block 8", kBlock, 8, "payload must be"},
                             {"sample 2", kSample, 2, "per_sample must be 0 or 1, got 2"},
                             {"levels 3", kLevels, 3, "levels must be 0 to 2, got 3"},
                             {"rounding -1", kRounding, -1, "rounding must be"},
                             {"header 7", kHeader, 7, "header must be"},
                             {"header 1", kHeader, 1, "payload must be"},
                             {"side 5", kSide, 5, "side must be"},
                             {"side 4", kSide, 4, "payload must be"},
                             {"side 1", kSide, 1, "payload must be"},
                             {"transform 3", kTransform, 3, "transform must be"},
                             {"transform 1", kTransform, 1, "ratio must be"},
                             {"p2 5", kP2, 5, "hadamard must be 0 or 1, got 5"},
                             {"dtype 3", kDtype, 3, "dtype must be 0 to 2"},
                             {"channels 1", kChannels, 1, "channels need"},
                             {"channels -1", kChannels, -1, "channels must not be negative"},
                             {"inner 0", kInner, 0, "inner must be 1"},
                             {"inner most", kInner, kMost, "inner must fit"},
                             {"hasseed 2", kHasSeed, 2, "has seed must be"},
                             {"payload 27", kPayload, 27, "payload must be 28 bytes"},
                             {"payload -1", kPayload, -1, "payload must be"},
                             {"rank 1", kRank, 1, "rank must fit"},
                             {"rank -1", kRank, -1, "rank must fit"},
                             {"rank most", kRank, kMost, "rank must fit"},
                             {"shape -3", kShape, -3, "sizes must not be negative, got -3"},
                             {"shape 4", kShape, 4, "payload must be"},
                             {"shape most", kShape, kMost, "a tensor may have at most"},
                             {"shape big", kShape, kBig, "payload must be"},
                             {"shape_2 17", kShape + 2, 17, "strides must fill memory"},
                             {"shape_2 -16", kShape + 2, -16, "strides must not be negative"},
                         }),
                         test::kCaseName);

TEST_F(File, AlteredNumbersThatNeedEachOtherAreRefused) {
  const Bytes good = written(pack(normal({3, 16}, 9), parse_spec("bits=2,block=16"), 10));
  Bytes overflow = altered(altered(good, kShape, kBig), kShape + 1, kBig);
  expect_error(reading(overflow), "a tensor may have at most 2^56 values");
  const Bytes projected = written(pack(normal({3, 16}, 9), parse_spec("exact"), 10));
  expect_error(reading(altered(projected, kHasSeed, 0)), "a projected tensor must have a seed");
}

/// Version 1 had no off plane; all else is as it was.
TEST_F(File, FilesOfVersionOneAreRead) {
  const auto version_one = [](Bytes bytes) {
    bytes[8] = 1;
    return altered(bytes, kHasSeed, 0);  // for the checksum; no side code needs its seed
  };
  const at::Tensor x = normal({40, 16}, 13);
  const Packed mean = pack(x, parse_spec("side=one,off=mean"), 14);
  const Packed back = read(version_one(written(mean)));
  EXPECT_EQ(back.spec, mean.spec);
  EXPECT_TRUE(reference::same(unpack(back), unpack(mean)));
  expect_error(reading(version_one(written(pack(x, parse_spec("side=one"), 14)))),
               "[read_packed] side must be 0 to 3 in a file of version 1");
}

/// A payload of noise under a right checksum is another tensor, not a crash.
class FileAnyPayloadDecodes : public FileOf {};

TEST_P(FileAnyPayloadDecodes, BySpec) {
  const char* const text = GetParam();
  Packed packed = pack(normal({2, 3, 9, 10}, 11), parse_spec(text), 12);
  for (int trial = 0; trial < 20; ++trial) {
    packed.bytes = at::randint(256, {packed.bytes.numel()}, at::kByte);
    write_packed(packed, path_);
    EXPECT_EQ(unpack(read_packed(path_)).sizes(), at::IntArrayRef({2, 3, 9, 10}));
  }
}

INSTANTIATE_TEST_SUITE_P(, FileAnyPayloadDecodes,
                         testing::Values("bits=3", "bits=3,levels=quantile", "side=one", "division", "exact",
                                         "bits=4,side=both,header=f32"),
                         test::kCaseName);

}  // namespace
}  // namespace satchel
