// Named tensors and texts in one file, in the safetensors layout that Python and numpy read. Torch-free; files are untrusted.
//
//   | length of header: u64 | header: JSON, padded with spaces to a multiple of 8 | values |          little-endian
//   header  {"__metadata__":{"epoch":"3"},"layer.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}
//
// Offsets count from the end of the header, and together they cover the values without hole or overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace satchel {

enum class StoredType : uint8_t { boolean, u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32, f64 };

/// As the header spells it: "F32".
const char* name_of(StoredType type);
int64_t size_of(StoredType type);

/// Values in rows, little-endian.
struct StoredTensor {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
  bool operator==(const StoredTensor&) const = default;
};

struct TensorFile {
  std::vector<StoredTensor> tensors;  // in the header's order
  std::map<std::string, std::string> metadata;

  /// Null where there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  bool operator==(const TensorFile&) const = default;
};

/// Writes through a temporary file beside `path`, which reaches the disk before it takes the name: whole or not at all. Replaces
/// plain files only. Larger items come first among the values, so that every tensor is aligned.
void write_safetensors(const std::string& path, const TensorFile& file);

/// Throws `[checkpoint] FILE: rule, got value` unless the file is whole and every field fits.
TensorFile read_safetensors(const std::string& path);

/// A tensor as the header has it.
struct StoredEntry {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;
};
struct StoredHeader {
  std::vector<StoredEntry> entries;
  std::map<std::string, std::string> metadata;
};

/// Checks the JSON of a header before `data_bytes` bytes of values; `file` is for errors.
StoredHeader parse_safetensors_header(std::string_view json, uint64_t data_bytes, const std::string& file);

}  // namespace satchel
