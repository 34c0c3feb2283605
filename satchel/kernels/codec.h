// What every backend computes, as plain values: no tensor, no stream, no thread.
#pragma once

#include <cstdint>

#include "satchel/core/layout.h"
#include "satchel/core/projection.h"

namespace satchel {

/// Block code of one tensor.
struct BlockCode {
  Grid grid;
  HeaderType header = HeaderType::bf16;
  Rounding rounding = Rounding::stochastic;
  LevelTable levels;  // holds the bits
};

/// Fewer than 2^35 values in rows of `width` that start `pitch` values apart: a part of each row of a wider tensor. Both are multiples of
/// 8, and the first row's address is one of 16 bytes. Width 0: no gaps.
struct RowsWithGaps {
  int64_t width = 0, pitch = 0;
};

/// The off plane of a side code (core/off_plane.h). A grid may be a part of the tensor's: the plane is the whole tensor's.
struct OffPlane {
  uint8_t* bytes = nullptr;  // null: off values decode to their channel's mean
  int64_t blocks = 0;        // of the tensor
  int64_t slot = 0;          // bytes a group
  int64_t first_block = 0;   // the grid's first, counted in the tensor; it starts at a multiple of 8 values
};

/// Side code of one tensor. Value i belongs to channel i / inner % channels.
struct SideCode {
  Grid grid;
  HeaderType header = HeaderType::bf16;
  Rounding rounding = Rounding::stochastic;
  SideTable table;
  int64_t channels = 1;
  int64_t inner = 1;
  OffPlane plane = {};
};

/// Where the bit of value i of a block stands in the off plane.
SATCHEL_HD constexpr int64_t off_byte(const SideCode& code, int64_t block, int64_t i) {
  return kOffKeyBytes + (code.plane.first_block + block) / kOffGroup * code.plane.slot + i / 8 - code.grid.begin(block) / 8;
}
SATCHEL_HD constexpr uint32_t off_weight(const SideCode& code, OffKey key, int64_t block) {
  return off_weight(key, code.plane.first_block + block, code.plane.blocks);
}
/// The key that encode() has put there.
SATCHEL_HD OffKey stored_key(const SideCode& code) {
  const uint32_t* at = reinterpret_cast<const uint32_t*>(code.plane.bytes);
  return {at[0], at[1]};
}

/// Where a one-sided or ReLU code of 2 bits has samples of 3 bits: bits 0 and 1 of all codes stand where those of 2 bits do, bit 2 of the
/// chosen samples' codes in a plane of its own, eight a byte, a sample after the other.
struct ExtraBitView {
  SideTable table;                 // of 3 bits
  const int32_t* slots = nullptr;  // a sample's place in the plane, −1: it has 2 bits; null: all have
  uint8_t* plane = nullptr;
  int64_t sample = 0;  // values, a multiple of the block
};

/// Maps of depth × height × width values; windows of at most `size` a side, cut off at the far edges.
struct LowPassShape {
  int64_t maps = 0;
  int64_t depth = 1, height = 1, width = 1;
  int size = 8;

  SATCHEL_HD constexpr int64_t map_values() const { return depth * height * width; }
  SATCHEL_HD constexpr int64_t windows() const { return ceil_div(depth, size) * ceil_div(height, size) * ceil_div(width, size); }
};

}  // namespace satchel
