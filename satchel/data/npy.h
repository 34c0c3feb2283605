// .npy files (numpy.save). Untrusted input: every field is checked, and an error names file, field and position.
//
//   | \x93NUMPY | major minor | length: u16 (version 1) or u32 (2, 3) | header: a Python dict | values |
//   header  {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace satchel {

struct NpyHeader {
  std::string descr;           // little-endian or one byte: "<f4", "<i8", "|b1" …
  bool fortran_order = false;  // first dimension fastest
  std::vector<int64_t> shape;
  int64_t data_offset = 0;  // bytes before the first value

  char kind() const { return descr[1]; }                 // f, i, u, b
  int64_t item_bytes() const { return descr[2] - '0'; }  // 1, 2, 4, 8
  int64_t values() const;                                // product of the shape
  std::vector<int64_t> strides() const;                  // in values
};

struct NpyArray : NpyHeader {
  std::vector<std::byte> data;  // as they stand in the file
};

/// Reads floats (2, 4, 8 bytes), integers and booleans of versions 1 to 3; refuses big-endian, truncated and overlong files, and
/// pickled objects. Errors are `[op] …`.
NpyArray read_npy(const std::string& path, const char* op = "npy");

/// Header from the front of a file of `file_bytes` bytes; `name` and `op` are for errors. The front holds at least the header.
NpyHeader parse_npy_header(std::span<const std::byte> front, uint64_t file_bytes, const std::string& name, const char* op = "npy");

/// Writes C-ordered values as version 1.0 through a temporary file beside `path`: whole or not at all. Replaces plain files only.
void write_npy(const std::string& path, const std::string& descr, std::span<const int64_t> shape, const void* data);

}  // namespace satchel
