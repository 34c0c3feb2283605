// .npz files (numpy.savez): zip archives of .npy files, each read when it is asked for. Untrusted: what an entry declares, what its
// header says and what it unpacks to must agree. Private.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "satchel/data/npy.h"
#include "satchel/data/numbers.h"

struct zip;

namespace satchel {

class Npz {
 public:
  explicit Npz(const std::string& path);

  const std::string& path() const { return path_; }
  std::string field(const std::string& name) const { return path_ + ": " + name; }
  bool has(const std::string& name) const { return entries_.contains(name); }
  std::string names() const;  // for errors

  NpyHeader header(const std::string& name) const;
  /// The shape is checked before the values are unpacked; kAny: any size.
  std::vector<int64_t> integers(const std::string& name, std::initializer_list<int64_t> shape) const;
  std::vector<float> floats(const std::string& name, std::initializer_list<int64_t> shape) const;
  /// A scalar of text (scipy's `format`), at most 64 characters.
  std::string text(const std::string& name) const;

 private:
  struct Entry {
    uint64_t index = 0, bytes = 0, packed_bytes = 0;
    uint16_t method = 0, encryption = 0;
  };
  struct Close {
    void operator()(zip* archive) const;
  };
  class Stream;

  const Entry& entry(const std::string& name) const;
  NpyArray array(const std::string& name, std::initializer_list<int64_t> shape) const;

  std::string path_;
  std::unique_ptr<zip, Close> archive_;
  std::map<std::string, Entry> entries_;  // arrays by name, without ".npy"
};

}  // namespace satchel
