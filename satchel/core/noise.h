// Noise is a pure function of (seed, stream, element): no generator state, no thread ids.
//
//   Philox4x32 with 7 rounds; key = seed, counter = (group lo, group hi, stream, 0)
//   one call gives 8 noises of 16 bits, for the elements 8·group … 8·group + 7:
//
//     word      0        1        2        3
//     bits   lo  hi   lo  hi   lo  hi   lo  hi
//     element 0   1    2   3    4   5    6   7
#pragma once

#include <cstdint>

#include "satchel/core/portable.h"

namespace satchel {

/// One noise never serves two purposes: rounding and dropout from one u would correlate (theory.md 1).
enum class Stream : uint32_t { rounding = 0, dropout = 1, projection = 2, seeds = 3, off_plane = 4 };

struct Words {
  uint32_t w[4];
};

constexpr int kNoiseRounds = 7;
constexpr int64_t kGroup = 8;  // elements that share one Philox call, and the bytes of one code stream step
constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

SATCHEL_HD constexpr Words philox(uint64_t key, Words c) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kNoiseRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c.w[0], p1 = static_cast<uint64_t>(kPhiloxM1) * c.w[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c.w[1] ^ k0, static_cast<uint32_t>(p1), static_cast<uint32_t>(p0 >> 32) ^ c.w[3] ^ k1,
         static_cast<uint32_t>(p0)};
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c;
}

SATCHEL_HD constexpr Words noise_group(uint64_t seed, Stream stream, uint64_t group) {
  return philox(seed, {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), static_cast<uint32_t>(stream), 0});
}

/// The 16-bit noise of element `slot` (0..7) of a group.
SATCHEL_HD constexpr uint32_t noise_of(const Words& words, int slot) { return (words.w[slot >> 1] >> ((slot & 1) * 16)) & 0xffffu; }

SATCHEL_HD constexpr uint32_t noise(uint64_t seed, Stream stream, uint64_t element) {
  return noise_of(noise_group(seed, stream, element / kGroup), static_cast<int>(element % kGroup));
}

/// Every save of every step has its own seed, or the errors of two layers correlate.
SATCHEL_HD constexpr uint64_t derive_seed(uint64_t run, uint64_t step, uint32_t rank, uint32_t save) {
  const Words a = philox(
      run, {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), static_cast<uint32_t>(Stream::seeds) | (rank << 8), save});
  return static_cast<uint64_t>(a.w[1]) << 32 | a.w[0];
}

}  // namespace satchel
