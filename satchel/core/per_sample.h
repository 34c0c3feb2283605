// Bytes of a tensor whose samples have bits of their own, 1 to 8, allocated under a budget (docs/theory.md 5).
//
//   codes   | sample 0        | sample 1   | …   sample n: a bit stream as core/layout.h has it, b_n bits a value, from byte
//             unit·b_0          unit·b_1         unit·(b_0 + … + b_{n−1}) on; unit = an eighth of its values, up to 16 bytes
//   headers | low step | low step | …            one a block; blocks start anew with every sample
//   entries | 28 b_0 + … + b_{n−1} | 4 b_n | …   32 bits a sample
//
// Bits per value: mean + 32/G with bf16 headers, + 32 a sample. All sizes follow from the budget Σ b_n, which is known before the bits
// are. Each value is coded as core/code.h says, on even levels; value v of sample n draws the noise of element 8·groups·n + v.
#pragma once

#include <cmath>
#include <cstdint>

#include "satchel/core/layout.h"

namespace satchel {

constexpr int kLeastSampleBits = 1, kMostSampleBits = 8;  // bits
constexpr int64_t kMostSamples = int64_t{1} << 25;        // 8 bits each still fit an entry's 28
constexpr int kEntryBits = 4;                             // of an entry, for the bits
constexpr int kRangeLanes = 32;                           // partial sums of a sample's squared ranges

struct PerSampleCode {
  int64_t samples = 0;
  int64_t values = 0;  // a sample
  int64_t block = 256;
  int64_t budget = 0;  // Σ b_n
  HeaderType header = HeaderType::bf16;
  Rounding rounding = Rounding::stochastic;

  SATCHEL_HD constexpr int64_t groups() const { return ceil_div(values, kGroup); }     // a sample
  SATCHEL_HD constexpr int64_t blocks() const { return ceil_div(values, block); }      // a sample
  SATCHEL_HD constexpr int64_t unit() const { return align_up(ceil_div(values, 8)); }  // bytes of a bit of all values of a sample
  SATCHEL_HD constexpr int64_t headers_at() const { return unit() * budget; }
  SATCHEL_HD constexpr int64_t entries_at() const { return headers_at() + samples * blocks() * header_bytes(header); }
  SATCHEL_HD constexpr int64_t total() const { return entries_at() + samples * 4; }
};

// Four samples of 256 values with 8 bits in all: 32 bytes a bit, four headers and four entries.
static_assert(PerSampleCode{4, 256, 256, 8}.total() == 32 * 8 + 4 * 4 + 4 * 4);
// 300 values are 38 bytes a bit, 48 with what aligns them, and two blocks.
static_assert(PerSampleCode{1, 300, 256, 2}.unit() == 48 && PerSampleCode{1, 300, 256, 2}.total() == 96 + 2 * 4 + 4);

/// ⌊mean·samples⌋, from 1 to 8 bits a sample.
inline int64_t per_sample_budget(int64_t samples, double mean_bits) {
  const double bits = std::floor(mean_bits * static_cast<double>(samples));
  const double least = static_cast<double>(samples) * kLeastSampleBits, most = static_cast<double>(samples) * kMostSampleBits;
  return static_cast<int64_t>(bits < least ? least : bits > most ? most : bits);
}

SATCHEL_HD constexpr uint32_t make_entry(uint32_t before, uint32_t bits) { return before << kEntryBits | bits; }
SATCHEL_HD constexpr int entry_bits(uint32_t entry) { return static_cast<int>(entry & ((1u << kEntryBits) - 1)); }
SATCHEL_HD constexpr int64_t entry_before(uint32_t entry) { return entry >> kEntryBits; }

/// What a bit more than `bits` (1 to 7) takes off C/(2^b − 1)², for C = 1.
SATCHEL_HD constexpr double bit_gain(int bits) {
  const double top = (1 << bits) - 1, next = (2 << bits) - 1;
  return 1.0 / (top * top) - 1.0 / (next * next);
}

/// C_n of one sample. A poisoned or senseless one counts for nothing: its error is not of the bits.
SATCHEL_HD double per_sample_sensitivity(double squares, float weight) {
  const double c = squares * static_cast<double>(weight);
  return c > 0 && c < 1e300 ? c : 0.0;
}

/// (most − least)² of one block, in double: no overflow, nothing subnormal. 0 for a poisoned block.
SATCHEL_HD double squared_range(Range r) {
  const double length = is_poisoned(r) ? 0.0 : static_cast<double>(r.high) - static_cast<double>(r.low);
  return length * length;
}

/// The header of a block from its extremes, once the bits are known.
SATCHEL_HD Header per_sample_header(Range r, int bits, HeaderType type) {
  return make_header(r.low, r.high, !is_poisoned(r), (1 << bits) - 1, type);
}

}  // namespace satchel
