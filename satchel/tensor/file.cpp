#include "satchel/tensor/file.h"

#include <ATen/ops/empty.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/file_format.h"
#include "satchel/tensor/output.h"
#include "satchel/tensor/pack.h"

// No std::filesystem here: libtorch.so exports an older one under the same names, and some of its functions crash.

namespace satchel {
namespace {

/// A file beside `path` that becomes it in one step, or is gone.
class Replacement {
 public:
  explicit Replacement(const std::string& path)
      : path_(path), temporary_(path + ".tmp." + std::to_string(::getpid())), out_(temporary_, std::ios::binary) {
    if (!out_) fail("write_packed", std::string("file must be writable (") + std::strerror(errno) + ")", "'" + path + "'");
  }
  ~Replacement() {
    if (!done_) std::remove(temporary_.c_str());
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(std::span<const uint8_t> bytes) {
    out_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  void finish() {
    out_.close();
    if (!out_ || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
      fail("write_packed", std::string("file must be writable to its end (") + std::strerror(errno) + ")", "'" + path_ + "'");
    }
    done_ = true;
  }

 private:
  std::string path_, temporary_;
  std::ofstream out_;
  bool done_ = false;
};

std::span<const uint8_t> bytes_of(const at::Tensor& t) {
  return {static_cast<const uint8_t*>(t.const_data_ptr()), static_cast<size_t>(t.numel())};
}

/// As many bytes as there are, at most `count`.
size_t read_some(std::ifstream& in, void* to, size_t count) {
  in.read(static_cast<char*>(to), static_cast<std::streamsize>(count));
  return static_cast<size_t>(in.gcount());
}

FileHeader read_header(std::ifstream& in) {
  std::vector<uint8_t> bytes(kFileStart);
  bytes.resize(read_some(in, bytes.data(), bytes.size()));
  const size_t whole = header_length(bytes);
  bytes.resize(whole);
  bytes.resize(kFileStart + read_some(in, bytes.data() + kFileStart, whole - kFileStart));
  return parse_header(bytes);
}

at::Tensor read_payload(std::ifstream& in, int64_t count, int64_t available) {
  constexpr const char* op = "read_packed";
  if (available < count) {
    fail(op, "file is truncated in its payload of " + std::to_string(count) + " bytes", available);
  }
  at::Tensor bytes = at::empty({count}, at::kByte);
  uint8_t sum[4];
  if (read_some(in, bytes.data_ptr(), static_cast<size_t>(count)) != static_cast<size_t>(count)) {
    fail(op, "file must be readable to its end");
  }
  if (const size_t got = read_some(in, sum, 4); got != 4) fail(op, "file is truncated in its last checksum", got);
  if (checksum(bytes_of(bytes)) != std::vector<uint8_t>(sum, sum + 4)) {
    fail(op, "payload checksum does not match: the file was altered");
  }
  if (available != count + 4) fail(op, "nothing may follow the payload", std::to_string(available - count - 4) + " bytes");
  return bytes;
}

}  // namespace

void write_packed(const Packed& packed, const std::string& path) {
  constexpr const char* op = "write_packed";
  check_packed(packed, op);
  check_replaceable(path, op);
  if (static_cast<int64_t>(packed.shape.size()) > kMaxRank) fail(op, "a file holds at most 64 dimensions", packed.shape.size());
  if (packed.seed.defined()) check_seed(packed.seed, packed.bytes.device(), op);
  const at::Tensor bytes = packed.bytes.to(at::kCPU);
  FileHeader header{packed.spec, dtype_of(packed.dtype), packed.channels, packed.inner,  packed.seed.defined(),
                    0,           bytes.numel(),          packed.shape,    packed.strides};
  if (packed.seed.defined()) header.seed = seed_value(packed.seed.to(at::kCPU));
  Replacement file(path);
  file.write(format_header(header));
  file.write(bytes_of(bytes));
  file.write(checksum(bytes_of(bytes)));
  file.finish();
}

Packed read_packed(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail("read_packed", "file must exist", "'" + path + "'");
  if (!S_ISREG(about.st_mode)) fail("read_packed", "path must be a file", "'" + path + "'");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("read_packed", "file must be readable", "'" + path + "'");
  const FileHeader h = read_header(in);
  const int64_t available = about.st_size - static_cast<int64_t>(in.tellg());
  Packed packed{{}, {}, h.shape, h.strides, scalar_type_of(h.dtype), h.spec, h.channels, h.inner};
  packed.bytes = read_payload(in, h.payload, available);
  if (h.has_seed) packed.seed = seed_tensor(h.seed, at::kCPU);
  return packed;
}

}  // namespace satchel
