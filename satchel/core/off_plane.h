// The off plane of a one-sided code of 2 bits (docs/theory.md 10): what makes values that the ReLU turns off right on average.
//
//   blocks of values   0 1 2 3 4 5 6 7 | 8 9 …     groups of 8 blocks; the last group may have fewer
//                            ▲               ▲     one block a group is drawn by chance
//   bytes   | key: a b 0 0 | slot of group 0 | slot of group 1 | …      uint32 × 4, then a bit a value of each group's drawn block
//
// In a drawn block the bit of an off value says t or the far end of its off side, rounded so that its mean is the value. It decodes to
// m + r·(v − m): v is what the bit says, m the channel's off mean, r the blocks of the group. Off values of all other blocks decode to m,
// so over all draws each decodes to itself on average. On values have bit 0. Bits stand at their value's place in the tensor modulo 8:
// eight values that start at a multiple of 8 share a byte, whatever block they are in.
#pragma once

#include "satchel/core/noise.h"
#include "satchel/core/side.h"

namespace satchel {

constexpr int64_t kOffGroup = 8;      // blocks
constexpr int64_t kOffKeyBytes = 16;  // before the slots

/// What draws the blocks. Any numbers are valid: a damaged key draws other blocks, never one that does not exist.
struct OffKey {
  uint32_t a, b;
};

SATCHEL_HD constexpr OffKey off_key(uint64_t seed) {
  const Words w = philox(seed, {0, 0, static_cast<uint32_t>(Stream::off_plane), 0});
  return {w.w[0], w.w[1]};
}

/// Blocks of a group, of so many in all.
SATCHEL_HD constexpr uint32_t off_group_blocks(int64_t group, int64_t blocks) {
  const int64_t rest = blocks - group * kOffGroup;
  return static_cast<uint32_t>(rest < kOffGroup ? rest : kOffGroup);
}

/// Which block of a group of `count` is drawn. (a·group + b) mod 2^32 makes any two groups' draws independent up to 2^30 groups.
SATCHEL_HD constexpr uint32_t off_draw(OffKey key, int64_t group, uint32_t count) {
  return static_cast<uint32_t>(static_cast<uint64_t>(key.a * static_cast<uint32_t>(group) + key.b) * count >> 32);
}

/// How many blocks a drawn block stands for; 0: it is not drawn.
SATCHEL_HD constexpr uint32_t off_weight(OffKey key, int64_t block, int64_t blocks) {
  const int64_t group = block / kOffGroup;
  const uint32_t count = off_group_blocks(group, blocks);
  return off_draw(key, group, count) == static_cast<uint32_t>(block % kOffGroup) ? count : 0;
}

/// The bit of x in a drawn block; x's own rounding noise, which its code 0 has no use for, decides.
SATCHEL_HD bool off_bit_of(float x, const Channel& c, Range r, uint32_t noise) {
  x = flush(x);
  if (is_on(x, c) || is_poisoned(r)) return false;
  const Stretch s = stretch_of(false, c, r);
  return fabsf(x - s.from) > uniform_of(noise) * s.length;
}

/// What an off value of a drawn block decodes to; the block is not poisoned.
SATCHEL_HD float off_value_of(bool bit, uint32_t weight, const Channel& c, Range r) {
  const Stretch s = stretch_of(false, c, r);
  const float v = bit ? (s.up ? s.from + s.length : s.from - s.length) : s.from, mean = off_value(c);
  if (!is_finite(mean)) return mean;
  return flush(fmaf(static_cast<float>(weight), flush(v) - mean, mean));
}

}  // namespace satchel
