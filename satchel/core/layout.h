// Bytes of a packed tensor.
//
//   codes   | value 0 | value 1 | …        one little-endian bit stream, b bits a value: 8 values are b whole bytes
//           byte 0 at 2 bits:  76 54 32 10   (bit 0 right)
//                               3  2  1  0   value
//   headers | low step | low step | …      one a block, bf16 (4 bytes) or fp32 (8), after the codes, 16-byte aligned
//   means   | bf16 | bf16 | …              low-pass only: window averages, after the headers
//   channels| t γ β off-mean | …           side codes with a threshold a channel only: fp32, after the headers
//   plane   | key | slot | slot | …        one-sided codes of 2 bits with off=sampled only (off_plane.h), after the channels
//
// Bits per value: b + 32/G with bf16 headers (+ 16/size^k for low-pass, + 1/8 for the off plane).
#pragma once

#include <cstdint>

#include "satchel/core/code.h"
#include "satchel/core/noise.h"
#include "satchel/core/off_plane.h"
#include "satchel/core/side.h"

namespace satchel {

constexpr int64_t kAlign = 16;

SATCHEL_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

/// a / b for a ≥ 0, b > 0: in 32 bits where both fit, which takes a GPU a quarter of the instructions.
SATCHEL_HD constexpr int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

SATCHEL_HD constexpr int64_t align_up(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Which values share a header: blocks of `block` values that start anew every `span` values (tails are shorter blocks).
struct Grid {
  int64_t values = 0;
  int64_t block = 256;
  int64_t span = 0;  // a multiple of which blocks start anew; `values` where they never do

  /// Block b is values [b·block, (b + 1)·block), but for the last.
  SATCHEL_HD constexpr bool is_straight() const { return span == values || span % block == 0; }
  SATCHEL_HD constexpr int64_t per_span() const { return ceil_div(span, block); }
  SATCHEL_HD constexpr int64_t blocks() const { return values == 0 ? 0 : values / span * per_span() + ceil_div(values % span, block); }
  SATCHEL_HD constexpr int64_t block_of(int64_t value) const {
    if (span == values) return quotient(value, block);
    const int64_t s = quotient(value, span);
    return s * per_span() + quotient(value - s * span, block);
  }
  SATCHEL_HD constexpr int64_t begin(int64_t b) const {
    if (span == values) return b * block;
    const int64_t s = quotient(b, per_span());
    return s * span + (b - s * per_span()) * block;
  }
  SATCHEL_HD constexpr int64_t end(int64_t b) const {
    const int64_t first = begin(b);
    const int64_t stop = span == values ? values : (quotient(first, span) + 1) * span;
    const int64_t last = stop - first < block ? stop : first + block;
    return last < values ? last : values;
  }
};

SATCHEL_HD constexpr int64_t code_bytes(int64_t values, int bits) { return values / 8 * bits + ceil_div(values % 8 * bits, 8); }

/// Bytes of one slot of the off plane: a bit a value of a block, which begins inside a byte where blocks are no multiples of 8.
SATCHEL_HD constexpr int64_t off_slot_bytes(const Grid& grid) {
  const bool aligned = grid.block % 8 == 0 && (grid.span == grid.values || grid.span % 8 == 0);
  return ceil_div(grid.block, 8) + (aligned ? 0 : 1);
}

constexpr int64_t off_plane_bytes(const Grid& grid) {
  return grid.values == 0 ? 0 : kOffKeyBytes + ceil_div(grid.blocks(), kOffGroup) * off_slot_bytes(grid);
}

/// Where the parts of a packed tensor stand, and how many bytes it has in all.
struct Layout {
  int64_t codes = 0, headers = 0, means = 0, channels = 0, plane = 0, total = 0;
};

/// The one function that gives the packed size: `windows` low-pass averages, `channel_count` channels (0 where there are none), an off
/// plane or none.
constexpr Layout layout_of(const Grid& grid, int bits, HeaderType header, int64_t windows = 0, int64_t channel_count = 0,
                           bool off_plane = false) {
  Layout at;
  at.headers = align_up(code_bytes(grid.values, bits));
  const int64_t after = at.headers + grid.blocks() * header_bytes(header);
  at.means = at.channels = windows + channel_count > 0 ? align_up(after) : after;
  at.plane = at.total = at.means + windows * 2 + channel_count * static_cast<int64_t>(sizeof(Channel));
  if (off_plane) {
    at.plane = align_up(at.total);
    at.total = at.plane + off_plane_bytes(grid);
  }
  return at;
}

// 256 values at 2 bits: 64 bytes of codes and one header; 5 values at 3 bits: 15 bits in 2 bytes.
static_assert(layout_of({256, 256, 256}, 2, HeaderType::bf16).total == 64 + 4);
// 16 blocks of 256 values, one channel: 1/8 bit a value and a key more.
static_assert(layout_of({4096, 256, 4096}, 2, HeaderType::bf16, 0, 1, true).total == 1024 + 64 + 16 + 16 + 4096 / 64);
static_assert(code_bytes(5, 3) == 2 && code_bytes(8, 3) == 3 && code_bytes(0, 8) == 0);
// Blocks start anew with every span: 300 + 300 values in blocks of 256 are four blocks.
static_assert(Grid{600, 256, 300}.blocks() == 4 && Grid{600, 256, 300}.begin(2) == 300 && Grid{600, 256, 300}.end(1) == 300);
static_assert(Grid{600, 256, 300}.block_of(299) == 1 && Grid{600, 256, 300}.block_of(300) == 2);

SATCHEL_HD void put_code(uint8_t* codes, int bits, int64_t i, uint32_t code) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit & 7);
  codes[bit >> 3] = static_cast<uint8_t>(codes[bit >> 3] | (code << shift));
  if (shift + bits > 8) codes[(bit >> 3) + 1] = static_cast<uint8_t>(codes[(bit >> 3) + 1] | (code >> (8 - shift)));
}

SATCHEL_HD uint32_t get_code(const uint8_t* codes, int bits, int64_t i) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit & 7);
  uint32_t word = codes[bit >> 3];
  if (shift + bits > 8) word |= static_cast<uint32_t>(codes[(bit >> 3) + 1]) << 8;
  return (word >> shift) & ((1u << bits) - 1);
}

}  // namespace satchel
