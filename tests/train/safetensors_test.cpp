#include "satchel/train/safetensors.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "satchel/core/error.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;
using test::slurp;
using test::spill;

/// A folder of its own, gone at the end.
class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "safetensorsXXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    for (const std::string& name : names()) ::unlink((folder_ + "/" + name).c_str());
    EXPECT_EQ(::rmdir(folder_.c_str()), 0);
  }
  std::string path() const { return folder_ + "/a.safetensors"; }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    DIR* folder = ::opendir(folder_.c_str());
    while (const dirent* entry = ::readdir(folder)) {
      if (entry->d_name[0] != '.') out.emplace_back(entry->d_name);
    }
    ::closedir(folder);
    return out;
  }
  std::string folder_;
};

template <class T>
StoredTensor tensor(const std::string& name, StoredType type, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {name, type, std::move(shape), {bytes.begin(), bytes.end()}};
}

TensorFile sample() {
  TensorFile file;
  file.tensors.push_back(tensor<uint8_t>("z.mask", StoredType::u8, {3}, {1, 0, 255}));
  file.tensors.push_back(tensor<float>("layer.weight", StoredType::f32, {2, 3}, {1, -2, 0.5f, NAN, INFINITY, 0}));
  file.tensors.push_back(tensor<int64_t>("step", StoredType::i64, {}, {-7}));
  file.tensors.push_back(tensor<uint16_t>("half", StoredType::bf16, {1, 2}, {0x3f80, 0x7fc0}));
  file.tensors.push_back(tensor<float>("none", StoredType::f32, {0, 4}, {}));
  file.tensors.push_back(tensor<double>("a \"quoted\" name, ü", StoredType::f64, {1}, {3.25}));
  file.metadata = {{"epoch", "3"}, {"options", "{\"lr\": 0.01}\n"}, {"", ""}};
  return file;
}

std::string file_of(const std::string& json, const std::string& values) {
  const uint64_t length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json + values;
}

std::string error_in(const std::string& json, uint64_t data_bytes) {
  return error_of([&] { parse_safetensors_header(json, data_bytes, "f"); });
}

/// One tensor "a" with these fields.
std::string one(const std::string& fields) { return "{\"a\":{" + fields + "}}"; }
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return one("\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
}

TEST_F(Safetensors, WrittenIsReadAgain) {
  write_safetensors(path(), sample());
  EXPECT_EQ(read_safetensors(path()), sample());  // bytes are compared, so NaN equals itself
  EXPECT_EQ(names(), std::vector<std::string>{"a.safetensors"});
  TensorFile less;
  less.metadata = {{"k", "v"}};
  write_safetensors(path(), less);  // over the old one
  EXPECT_EQ(read_safetensors(path()), less);
  write_safetensors(path(), {});
  EXPECT_EQ(read_safetensors(path()), TensorFile{});
  EXPECT_EQ(slurp(path()), file_of("{}      ", ""));
}

TEST_F(Safetensors, EveryType) {
  TensorFile file;
  for (int t = 0; t <= static_cast<int>(StoredType::f64); ++t) {
    const auto type = static_cast<StoredType>(t);
    file.tensors.push_back(tensor<uint8_t>(name_of(type), type, {1}, std::vector<uint8_t>(static_cast<size_t>(size_of(type)), 1)));
  }
  write_safetensors(path(), file);
  EXPECT_EQ(read_safetensors(path()), file);
}

TEST_F(Safetensors, BytesAreTheLayout) {
  TensorFile file;
  file.tensors.push_back(tensor<uint8_t>("b", StoredType::u8, {1}, {9}));
  file.tensors.push_back(tensor<uint16_t>("h", StoredType::u16, {2}, {0x0102, 0x0304}));
  file.metadata = {{"k", "v"}};
  write_safetensors(path(), file);
  std::string json =
      R"({"__metadata__":{"k":"v"},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"h":{"dtype":"U16","shape":[2],"data_offsets":[0,4]}})";
  json.append((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(slurp(path()), file_of(json, std::string("\x02\x01\x04\x03\x09", 5)));
}

TEST_F(Safetensors, ValuesAreAligned) {
  write_safetensors(path(), sample());
  const std::string bytes = slurp(path());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  const StoredHeader header = parse_safetensors_header(std::string_view(bytes).substr(8, length), bytes.size() - 8 - length, "f");
  for (const StoredEntry& entry : header.entries) EXPECT_EQ(entry.begin % static_cast<uint64_t>(size_of(entry.type)), 0u) << entry.name;
}

TEST_F(Safetensors, FoundByName) {
  const TensorFile file = sample();
  ASSERT_NE(file.find("step"), nullptr);
  EXPECT_EQ(file.find("step")->type, StoredType::i64);
  EXPECT_EQ(file.find("steps"), nullptr);
}

TEST_F(Safetensors, TruncatedAnywhereIsRefused) {
  write_safetensors(path(), sample());
  const std::string whole = slurp(path());
  for (size_t length = 0; length < whole.size(); ++length) {
    spill(path(), whole.substr(0, length));
    EXPECT_EQ(error_of([&] { read_safetensors(path()); }).find("[checkpoint] " + path() + ": "), 0u) << length;
  }
  spill(path(), whole + '\0');
  EXPECT_NE(error_of([&] { read_safetensors(path()); }).find("tensors must cover the"), std::string::npos);
}

TEST_F(Safetensors, DamagedBytesAreRefusedOrRead) {
  write_safetensors(path(), sample());
  const std::string whole = slurp(path());
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const int flip : {1, 2, 0x10, 0x40, 0x80, 0xff}) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      spill(path(), damaged);
      const std::string error = error_of([&] { read_safetensors(path()); });
      // Another length never leaves a readable file: the JSON must end where the header ends, and the values cover the rest.
      EXPECT_TRUE(i >= 8 || error != "accepted") << i;
      EXPECT_TRUE(error == "accepted" || error.starts_with("[checkpoint] " + path() + ": ")) << error;
    }
  }
}

TEST_F(Safetensors, RandomHeadersNeverCrash) {
  // Pieces of real headers in random order reach deeper than random bytes.
  const std::string pieces[] = {"{",
                                "}",
                                "[",
                                "]",
                                ":",
                                ",",
                                "\"a\"",
                                "\"__metadata__\"",
                                "\"dtype\"",
                                "\"F32\"",
                                "\"shape\"",
                                "\"data_offsets\"",
                                "0",
                                "4",
                                "-1",
                                "1e9",
                                "18446744073709551615",
                                "null",
                                "true",
                                one("F32", "[1]", "[0,4]")};
  std::mt19937 random(1);
  for (int run = 0; run < 20000; ++run) {
    std::string json = "{";
    for (uint32_t n = random() % 20; n > 0; --n) json += pieces[random() % std::size(pieces)];
    const std::string error = error_in(json, 4);
    EXPECT_TRUE(error == "accepted" || error.starts_with("[checkpoint] f: ")) << error;
  }
}

TEST_F(Safetensors, HeaderLengthIsChecked) {
  const auto error_at = [&](uint64_t length) {
    std::string bytes = file_of("{}", "");
    std::memcpy(bytes.data(), &length, 8);
    spill(path(), bytes);
    return error_of([&] { read_safetensors(path()); });
  };
  const std::string front = "[checkpoint] " + path() + ": ";
  EXPECT_EQ(error_at(2), "accepted");
  EXPECT_EQ(error_at(3), front + "header must lie within the file's 10 bytes, got 3");
  EXPECT_EQ(error_at(100'000'000), front + "header must lie within the file's 10 bytes, got 100000000");
  EXPECT_EQ(error_at(100'000'001), front + "header must be at most 100000000 bytes, got 100000001");
  EXPECT_EQ(error_at(~uint64_t{0}), front + "header must be at most 100000000 bytes, got 18446744073709551615");
  EXPECT_EQ(error_at(0), front + "header must begin with '{', got ''");
}

TEST_F(Safetensors, FilesOfOtherKindsAreNamed) {
  const std::string front = "[checkpoint] " + path() +
                            ": file must be a safetensors file (the length of its header in 8 bytes, then the header, which begins with "
                            "'{'), got ";
  const std::string tail(40, 'x');
  for (const auto& [bytes, kind] : std::map<std::string, std::string>{
           {"PK\x03\x04" + tail, "a zip archive, as torch.save and numpy.savez write it"},
           {"\x93NUMPY\x01" + tail, "an .npy file"},
           {"SATCHELP" + tail, "a packed tensor of satchel pack"},
           {"\x1f\x8b\x08" + tail, "a gzip file"},
           {"", "an empty file"},
           {"{}", "the bytes '{}'"},
           {"hello, world: a text", "the bytes 'hello, world: a '"},
           {std::string("\x02\0\0\0\0\0\0\0[]", 10), "the bytes '\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00[]'"}}) {
    spill(path(), bytes);
    EXPECT_EQ(error_of([&] { read_safetensors(path()); }), front + kind);
  }
}

TEST_F(Safetensors, JsonIsChecked) {
  EXPECT_EQ(error_in("", 0), "[checkpoint] f: header must begin with '{', got ''");
  EXPECT_EQ(error_in("[]", 0), "[checkpoint] f: header must begin with '{', got '['");
  EXPECT_EQ(error_in("{\"a\":", 0).find("[checkpoint] f: header must be JSON, got an error at byte"), 0u);
  EXPECT_EQ(error_in("{} x", 0), "[checkpoint] f: header must be JSON, got an error at byte 4 of it");
  EXPECT_EQ(error_in("{\"\xff\":1}", 0).find("[checkpoint] f: header must be JSON"), 0u);
  EXPECT_EQ(error_in("{}  \n", 0), "accepted");
  EXPECT_EQ(error_in("{\"a\":1}", 0), "[checkpoint] f: entry 'a' must be an object, got 1");
  EXPECT_EQ(error_in("{\"a\":[1]}", 0), "[checkpoint] f: entry 'a' must be an object, got an array");
  EXPECT_EQ(error_in("{\"__metadata__\":{\"k\":1}}", 0), "[checkpoint] f: metadata 'k' must be text, got 1");
  EXPECT_EQ(error_in("{\"__metadata__\":{\"k\":{}}}", 0), "[checkpoint] f: metadata 'k' must be text, got an object");
  EXPECT_EQ(error_in("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0), "[checkpoint] f: names must stand once, got 'k'");
  EXPECT_EQ(error_in("{\"__metadata__\":{},\"__metadata__\":{}}", 0), "[checkpoint] f: names must stand once, got '__metadata__'");
  // A million open brackets: refused at the first that does not belong.
  EXPECT_EQ(error_in("{\"a\":" + std::string(1000000, '['), 0), "[checkpoint] f: entry 'a' must be an object, got an array");
}

TEST_F(Safetensors, FieldsAreChecked) {
  const std::string a = "[checkpoint] f: tensor 'a': ";
  EXPECT_EQ(error_in(one("F32", "[1]", "[0,4]"), 4), "accepted");
  EXPECT_EQ(error_in(one(""), 0), a + "dtype, shape and data_offsets must be there, got 0 of them");
  EXPECT_EQ(error_in(one("\"dtype\":\"F32\",\"shape\":[]"), 4), a + "dtype, shape and data_offsets must be there, got 2 of them");
  EXPECT_EQ(error_in(one("\"more\":1"), 0), a + "fields must be dtype, shape and data_offsets, got 'more'");
  EXPECT_EQ(error_in(one("\"dtype\":\"F32\",\"dtype\":\"F32\""), 0), a + "names must stand once, got 'dtype'");
  EXPECT_EQ(error_in(one("F33", "[1]", "[0,4]"), 4), a + "dtype must be a known one, got 'F33'");
  EXPECT_EQ(error_in(one("\"dtype\":5"), 0), a + "dtype must be text, got 5");
  EXPECT_EQ(error_in(one("F32", "1", "[0,4]"), 4), a + "shape must be an array, got 1");
  EXPECT_EQ(error_in(one("F32", "[-1]", "[0,4]"), 4), a + "shape must hold whole numbers from 0 on, got -1");
  EXPECT_EQ(error_in(one("F32", "[1.0]", "[0,4]"), 4), a + "shape must hold whole numbers from 0 on, got 1.0");
  EXPECT_EQ(error_in(one("F32", "[[1]]", "[0,4]"), 4), a + "shape must hold whole numbers from 0 on, got an array");
  EXPECT_EQ(error_in(one("F32", "[9223372036854775808]", "[0,4]"), 4), a + "numbers must be below 2^63, got 9223372036854775808");
  EXPECT_EQ(error_in(one("F32", "[4294967296,4294967296]", "[0,0]"), 0), a + "shape must give less than 2^63 bytes, got 4294967296 in it");
  EXPECT_EQ(error_in(one("F32", "[0,4294967296,4294967296]", "[0,0]"), 0),
            a + "shape must give less than 2^63 bytes, got 4294967296 in it");
  std::string ones = "[1";
  for (int i = 1; i < 64; ++i) ones += ",1";
  EXPECT_EQ(error_in(one("F32", ones + "]", "[0,4]"), 4), "accepted");
  EXPECT_EQ(error_in(one("F32", ones + ",1]", "[0,4]"), 4), a + "shape must have at most 64 dimensions, got more");
}

TEST_F(Safetensors, OffsetsAreChecked) {
  const std::string a = "[checkpoint] f: tensor 'a': ";
  EXPECT_EQ(error_in(one("F32", "[1]", "[0]"), 4), a + "data_offsets must hold two numbers, got 1");
  EXPECT_EQ(error_in(one("F32", "[1]", "[0,4,8]"), 8), a + "data_offsets must hold two numbers, got more");
  EXPECT_EQ(error_in(one("F32", "[1]", "[0,-4]"), 4), a + "data_offsets must hold whole numbers from 0 on, got -4");
  EXPECT_EQ(error_in(one("F32", "[1]", "[4,0]"), 4), a + "data_offsets must rise within the 4 bytes of values, got 4 and 0");
  EXPECT_EQ(error_in(one("F32", "[2]", "[0,8]"), 4), a + "data_offsets must rise within the 4 bytes of values, got 0 and 8");
  EXPECT_EQ(error_in(one("F32", "[2]", "[0,4]"), 4), a + "data_offsets must hold 8 bytes, as dtype and shape say, got 4");
  EXPECT_EQ(error_in(one("F64", "[]", "[0,4]"), 4), a + "data_offsets must hold 8 bytes, as dtype and shape say, got 4");
  EXPECT_EQ(error_in(one("F32", "[1]", "[4,8]"), 8), a + "values must begin where others end, at 0, got 4");
  EXPECT_EQ(error_in(one("F32", "[1]", "[0,4]"), 5), "[checkpoint] f: tensors must cover the 5 bytes of values, got 4");
  const auto two = [](const std::string& first, const std::string& second) {
    const std::string field = R"({"dtype":"U8","shape":[4],"data_offsets":)";
    return "{\"a\":" + field + first + "},\"b\":" + field + second + "}}";
  };
  EXPECT_EQ(error_in(two("[4,8]", "[0,4]"), 8), "accepted");
  EXPECT_EQ(error_in(two("[0,4]", "[2,6]"), 6), "[checkpoint] f: tensor 'b': values must begin where others end, at 4, got 2");
  EXPECT_EQ(error_in(two("[0,4]", "[0,4]"), 4), "[checkpoint] f: tensor 'b': values must begin where others end, at 4, got 0");
  EXPECT_EQ(error_in(two("[0,4]", "[5,9]"), 9), "[checkpoint] f: tensor 'b': values must begin where others end, at 4, got 5");
  EXPECT_EQ(error_in("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{}}", 0),
            "[checkpoint] f: names must stand once, got 'a'");
}

TEST_F(Safetensors, WritesOnlyWhatCanBeRead) {
  const auto error_with = [&](StoredTensor second) {
    TensorFile file;
    file.tensors = {tensor<uint8_t>("b", StoredType::u8, {1}, {9}), std::move(second)};
    return error_of([&] { write_safetensors(path(), file); });
  };
  const std::string front = "[checkpoint] " + path() + ": ";
  EXPECT_EQ(error_with(tensor<float>("b", StoredType::f32, {1}, {1})), front + "names must stand once, got 'b'");
  EXPECT_EQ(error_with(tensor<float>("c", StoredType::f32, {2}, {1})),
            front + "tensor 'c': data_offsets must hold 8 bytes, as dtype and shape say, got 4");
  EXPECT_EQ(error_with(tensor<float>("c", StoredType::f32, {-1}, {})),
            front + "tensor 'c': shape must hold whole numbers from 0 on, got -1");
  EXPECT_EQ(error_with(tensor<float>("__metadata__", StoredType::f32, {0}, {})),
            front + "a tensor must have another name, got __metadata__");
  EXPECT_EQ(error_with(tensor<float>("\xff", StoredType::f32, {0}, {})).find(front + "names and metadata must be UTF-8, got"), 0u);
  EXPECT_TRUE(names().empty());  // nothing was left behind
}

TEST_F(Safetensors, ReplacesPlainFilesOnly) {
  const std::string link = folder_ + "/link", target = folder_ + "/target";
  spill(target, "precious");
  ASSERT_EQ(::symlink(target.c_str(), link.c_str()), 0);
  const std::string rule = "[checkpoint] output must be a plain file, where there is one already, and no link, got '";
  EXPECT_EQ(error_of([&] { write_safetensors(link, sample()); }), rule + link + "'");
  EXPECT_EQ(error_of([&] { write_safetensors("/dev/null", sample()); }), rule + "/dev/null'");
  EXPECT_EQ(error_of([&] { write_safetensors(folder_, sample()); }), rule + folder_ + "'");
  EXPECT_EQ(slurp(target), "precious");
  EXPECT_EQ(error_of([&] { write_safetensors("", sample()); }), "[checkpoint] output must have a name, got ''");
  const std::string nowhere = folder_ + "/no/a";
  EXPECT_EQ(error_of([&] { write_safetensors(nowhere, sample()); }),
            "[checkpoint] " + nowhere + ": output must be writable (No such file or directory), got '" + nowhere + "'");
}

TEST_F(Safetensors, ReadsFilesOnly) {
  EXPECT_EQ(error_of([&] { read_safetensors(path()); }),
            "[checkpoint] " + path() + ": file must exist (No such file or directory), got '" + path() + "'");
  EXPECT_EQ(error_of([&] { read_safetensors(folder_); }), "[checkpoint] " + folder_ + ": path must be a file, got '" + folder_ + "'");
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);  // would wait for a writer
  EXPECT_EQ(error_of([&] { read_safetensors(path()); }), "[checkpoint] " + path() + ": path must be a file, got '" + path() + "'");
}

TEST_F(Safetensors, WhatADeadProcessLeftGoes) {
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(dead, nullptr, 0), dead);
  char host[256] = {};
  ASSERT_EQ(::gethostname(host, sizeof host - 1), 0);
  const std::string file = path(), start = file + ".tmp.";
  const std::string gone = start + host + "." + std::to_string(dead) + ".0", older = start + std::to_string(dead) + ".3";
  const std::string alive = start + host + "." + std::to_string(::getppid()) + ".0",
                    elsewhere = start + "x" + host + "." + std::to_string(dead) + ".0", other = start + "notes";
  for (const std::string& name : {gone, older, alive, elsewhere, other}) std::ofstream(name) << "half a file";
  write_safetensors(file, {});
  const auto exists = [](const std::string& name) { return ::access(name.c_str(), F_OK) == 0; };
  EXPECT_FALSE(exists(gone));
  EXPECT_FALSE(exists(older)) << "as earlier versions name them";
  for (const std::string& name : {alive, elsewhere, other, file}) {
    EXPECT_TRUE(exists(name)) << name;
    ::unlink(name.c_str());
  }
}

}  // namespace
}  // namespace satchel
