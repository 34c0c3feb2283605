#include "satchel/data/npy.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>

#include "satchel/core/error.h"
#include "satchel/data/printable.h"
#include "satchel/tensor/output.h"

namespace satchel {
namespace {

constexpr const char* kOp = "npy";
constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kPreamble = 8;                   // magic, major, minor
constexpr size_t kMaxHeader = size_t{64} * 1024;  // numpy itself stops at 10,000
constexpr size_t kMaxDimensions = 64;             // as numpy 2
constexpr std::string_view kDescrs[] = {"<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1"};

/// Who reads which file, for errors: `[npy] x.npy: shape (byte 61): rule, got value`.
struct Origin {
  const char* op;
  const std::string& name;
};

[[noreturn]] void refuse(const Origin& origin, const char* field, size_t at, const std::string& rule, const std::string& got) {
  const std::string place = origin.name + ": " + field + " (byte " + std::to_string(at) + "): ";
  fail(origin.op, place + rule, got.empty() ? std::string("nothing") : got);
}

/// The Python dict of a header, read left to right.
class DictReader {
 public:
  DictReader(std::string_view text, size_t offset, const Origin& origin) : text_(text), offset_(offset), origin_(origin) {}

  void read(NpyHeader& header) {
    bool seen[3] = {};
    expect('{', "header");
    while (!accept('}')) {
      const std::string key = string("key");
      expect(':', "key");
      const int which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : -1;
      if (which < 0) stop("key", "must be descr, fortran_order or shape", printable(key));
      if (seen[which]) stop("key", "must stand once", printable(key));
      seen[which] = true;
      if (which == 0) header.descr = string("descr");
      if (which == 1) header.fortran_order = boolean();
      if (which == 2) header.shape = tuple();
      if (!accept(',') && peek() != '}') stop("header", "must have ',' or '}' here", rest());
    }
    if (peek() != '\0' || at_ < text_.size()) stop("header", "must end after its dict", rest());
    if (!(seen[0] && seen[1] && seen[2])) stop("header", "must have descr, fortran_order and shape", printable(text_));
  }

 private:
  [[noreturn]] void stop(const char* field, const char* rule, const std::string& got) { refuse(origin_, field, offset_ + at_, rule, got); }
  std::string rest() const { return printable(text_.substr(std::min(at_, text_.size()))); }

  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c, const char* field) {
    if (at_ < text_.size() && accept(c)) return;
    stop(field, (std::string("must have '") + c + "' here").c_str(), rest());
  }
  std::string string(const char* field) {
    const char quote = peek();
    if (quote != '\'' && quote != '"') stop(field, "must be one text in quotes", rest());
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) stop(field, "must have a closing quote", rest());
    const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return std::string(inside);
  }
  bool boolean() {
    peek();
    for (const std::string_view word : {std::string_view("True"), std::string_view("False")}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return word == "True";
    }
    stop("fortran_order", "must be True or False", rest());
  }
  int64_t number() {
    if (peek() < '0' || peek() > '9') stop("shape", "must hold whole numbers from 0 on", rest());
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const int digit = text_[at_] - '0';
      if (value > (std::numeric_limits<int64_t>::max() - digit) / 10) stop("shape", "must fit into 63 bits", rest());
      value = value * 10 + digit;
    }
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote 3L
    return value;
  }
  std::vector<int64_t> tuple() {
    std::vector<int64_t> shape;
    expect('(', "shape");
    while (!accept(')')) {
      if (shape.size() == kMaxDimensions) stop("shape", "must have at most 64 dimensions", rest());
      shape.push_back(number());
      if (!accept(',') && peek() != ')') stop("shape", "must have ',' or ')' here", rest());
    }
    return shape;
  }

  std::string_view text_;
  size_t offset_;
  const Origin& origin_;
  size_t at_ = 0;
};

/// Bytes of all values; refuses shapes whose strides would overflow, even where a dimension is 0.
uint64_t payload_bytes(const NpyHeader& header, const Origin& origin, size_t at) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t bytes = header.item_bytes();
  bool empty = false;
  for (const int64_t size : header.shape) {
    empty |= size == 0;
    if (size > 1 && bytes > kMost / size) refuse(origin, "shape", at, "must give less than 2^63 bytes", std::to_string(size) + " in it");
    bytes *= std::max<int64_t>(size, 1);
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

/// Bytes before the dict (10 or 12) and bytes of the dict.
struct Extent {
  size_t start, length;
};

Extent header_extent(std::span<const std::byte> front, const Origin& origin) {
  const auto byte = [&](size_t i) { return std::to_integer<uint32_t>(front[i]); };
  const std::string_view text(reinterpret_cast<const char*>(front.data()), front.size());
  if (text.substr(0, kMagic.size()) != kMagic) refuse(origin, "magic", 0, "must be \\x93NUMPY", printable(text.substr(0, kMagic.size())));
  if (front.size() < kPreamble) refuse(origin, "version", kMagic.size(), "must be there", "end of file");
  const uint32_t major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0) {
    refuse(origin, "version", kMagic.size(), "must be 1.0, 2.0 or 3.0", std::to_string(major) + "." + std::to_string(minor));
  }
  const size_t start = major == 1 ? 10 : 12;
  if (front.size() < start) refuse(origin, "header length", kPreamble, "must be there", "end of file");
  const uint32_t wide = major == 1 ? 0 : byte(10) << 16 | byte(11) << 24;
  const size_t length = byte(8) | byte(9) << 8 | wide;
  if (length > kMaxHeader) refuse(origin, "header length", kPreamble, "must be at most 65536", std::to_string(length));
  return {start, length};
}

}  // namespace

int64_t NpyHeader::values() const {
  int64_t product = 1;
  for (const int64_t size : shape) product = size == 0 ? 0 : product * size;
  return product;
}

std::vector<int64_t> NpyHeader::strides() const {
  std::vector<int64_t> out(shape.size());
  int64_t stride = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    const size_t d = fortran_order ? i : shape.size() - 1 - i;
    out[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  return out;
}

NpyHeader parse_npy_header(std::span<const std::byte> front, uint64_t file_bytes, const std::string& name, const char* op) {
  const Origin origin{op, name};
  const Extent dict = header_extent(front, origin);
  if (front.size() - dict.start < dict.length) {
    refuse(origin, "header", dict.start, "must have " + std::to_string(dict.length) + " bytes", std::to_string(front.size() - dict.start));
  }
  NpyHeader header;
  header.data_offset = static_cast<int64_t>(dict.start + dict.length);
  DictReader({reinterpret_cast<const char*>(front.data()) + dict.start, dict.length}, dict.start, origin).read(header);
  if (header.descr.ends_with('O')) {
    refuse(origin, "descr", dict.start, "must be numbers (pickled Python objects are never loaded)", printable(header.descr));
  }
  if (header.descr.starts_with('>')) refuse(origin, "descr", dict.start, "must be little-endian", printable(header.descr));
  if (std::find(std::begin(kDescrs), std::end(kDescrs), header.descr) == std::end(kDescrs)) {
    refuse(origin, "descr", dict.start, "must be a float, integer or boolean type (bfloat16 has none in .npy: save float32)",
           printable(header.descr));
  }
  const uint64_t expected = payload_bytes(header, origin, dict.start), there = file_bytes - static_cast<uint64_t>(header.data_offset);
  if (there != expected) {
    refuse(origin, "values", static_cast<size_t>(header.data_offset),
           "must have " + std::to_string(expected) + " bytes, as descr and shape say", std::to_string(there));
  }
  return header;
}

NpyArray read_npy(const std::string& path, const char* op) {
  const Origin origin{op, path};
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail(op, "file must exist", path);
  if (!S_ISREG(about.st_mode)) fail(op, "path must be a file", path);
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(op, "file must be readable", path);
  const auto bytes = static_cast<uint64_t>(about.st_size);
  std::vector<std::byte> front(std::min<uint64_t>(bytes, 12));
  file.read(reinterpret_cast<char*>(front.data()), static_cast<std::streamsize>(front.size()));
  const Extent dict = header_extent(front, origin);
  const size_t had = front.size();
  front.resize(std::min<uint64_t>(bytes, std::max(had, dict.start + dict.length)));
  file.read(reinterpret_cast<char*>(front.data()) + had, static_cast<std::streamsize>(front.size() - had));
  if (!file) fail(op, "file must be readable", path);
  NpyArray array;
  static_cast<NpyHeader&>(array) = parse_npy_header(front, bytes, path, op);
  array.data.resize(bytes - static_cast<uint64_t>(array.data_offset));
  file.seekg(array.data_offset);
  file.read(reinterpret_cast<char*>(array.data.data()), static_cast<std::streamsize>(array.data.size()));
  if (!file) fail(op, "file must be readable to its end", path);
  return array;
}

void write_npy(const std::string& path, const std::string& descr, std::span<const int64_t> shape, const void* data) {
  if (std::find(std::begin(kDescrs), std::end(kDescrs), descr) == std::end(kDescrs)) fail(kOp, "descr must be a known type", descr);
  NpyHeader header;
  header.descr = descr;
  header.shape.assign(shape.begin(), shape.end());
  if (shape.size() > kMaxDimensions) fail(kOp, "shape must have at most 64 dimensions", shape.size());
  for (const int64_t size : shape) {
    if (size < 0) fail(kOp, "sizes must not be negative", size);
  }
  const uint64_t bytes = payload_bytes(header, {kOp, path}, kPreamble + 2);
  check_replaceable(path, kOp);
  std::string dict = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (";
  for (const int64_t size : shape) dict += std::to_string(size) + ", ";
  dict.resize(dict.size() - (shape.size() > 1 ? 2 : shape.size()));  // (3, 4) (3,) ()
  dict += "), }";
  dict.append(63 - (10 + dict.size()) % 64, ' ');  // values start on a multiple of 64
  dict += '\n';
  const char front[10] = {
      '\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(dict.size() & 0xff), static_cast<char>(dict.size() >> 8)};

  const std::string temporary = path + ".part" + std::to_string(getpid());
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  if (!file) fail(kOp, std::string("output must be writable (") + std::strerror(errno) + ")", path);
  file.write(front, sizeof front).write(dict.data(), static_cast<std::streamsize>(dict.size()));
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return;
  const std::string why = std::strerror(errno);
  std::remove(temporary.c_str());
  fail(kOp, "output must be writable to its end (" + why + ")", path);
}

}  // namespace satchel
