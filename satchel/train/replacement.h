// A file that is replaced whole or not at all: written under a temporary name beside it, which becomes the file's own in one step.
// Torch-free. Private to this room and tools.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace satchel {

/// An open file; closed when it goes.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags);
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  bool close();

  /// Each moves all bytes, or says that it could not; errno tells why.
  bool write(const void* data, size_t count);
  bool read(void* data, size_t count, uint64_t place);

 private:
  int fd_;
};

/// The temporary file is FILE.tmp.HOST.PID.N. Its process may die while it writes: the next Replacement of FILE on that host removes what
/// dead processes left.
class Replacement {
 public:
  /// Throws `[op] path: output must be writable (why), got 'path'`, here and below.
  Replacement(const std::string& path, const char* op);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(const void* data, size_t count);
  /// The bytes reach the disk, then the name.
  void finish();

 private:
  [[noreturn]] void stop() const;

  const char* op_;
  std::string path_, temporary_;
  Descriptor out_;
  bool there_ = false;  // the temporary file
};

}  // namespace satchel
