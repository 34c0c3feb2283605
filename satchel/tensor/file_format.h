// The file of a Packed, version 2. Every number is little-endian. No torch: the parser is fuzzed on its own.
//
//   magic "SATCHELP" 8 | version u32 | length of what follows up to the checksum u32
//   bits block per_sample levels rounding header side transform p0 p1 p2   i64 each (SpecNumbers)
//   dtype i64 | channels i64 | inner i64 | has seed i64 | seed i64 | payload bytes i64
//   rank i64 | sizes i64 … | strides i64 …
//   CRC-32 of everything so far u32
//   payload | CRC-32 of the payload u32
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "satchel/core/number.h"
#include "satchel/core/spec.h"

namespace satchel {

constexpr uint32_t kFileVersion = 2;  // 1 had no off plane: no side 4; all else is the same
constexpr size_t kFileStart = 16;     // magic, version, length
constexpr int64_t kMaxRank = 64;

struct FileHeader {
  CodecSpec spec;
  DType dtype = DType::f32;
  int64_t channels = 0, inner = 1;
  bool has_seed = false;
  uint64_t seed = 0;
  int64_t payload = 0;
  std::vector<int64_t> shape, strides;
};

/// The header's bytes, its checksum included.
std::vector<uint8_t> format_header(const FileHeader& header);

/// Bytes of the whole header, from its first kFileStart bytes (or fewer, where the file is shorter).
size_t header_length(std::span<const uint8_t> start);

/// The header of `bytes`, all of header_length() of them; throws with what is wrong. What it returns describes a payload
/// that unpack() can read safely, whatever the payload holds.
FileHeader parse_header(std::span<const uint8_t> bytes);

/// CRC-32 as four little-endian bytes.
std::vector<uint8_t> checksum(std::span<const uint8_t> bytes);

}  // namespace satchel
