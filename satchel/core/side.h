// The side code of one number (theory.md 10): which side of the ReLU's threshold, and an unbiased level on it.
//
//   one_sided, 2 bits     code   0      1      2        3         T = 2: off | t  m  far
//                              off mean  t  .38·len   far end
//   one_sided, 3 bits     code 0, 1 = off side {far, t}; 2..7 = six levels of the on side
//   relu,      2 or 3     code 0 = exactly 0; the others are levels of [max(0, low), high]
//   both,      sign + b   codes below 2^b = off side from its far end to t; the rest = on side from t to its far end
//
// A block's header holds low (rounded down) and high (rounded up). Whether a value is on is decided by fma(γ, x, β) > 0 alone.
// No division: thresholds are scaled to the side instead. Bytes do not depend on FTZ or DAZ while values stay above 2^−100.
#pragma once

#include "satchel/core/code.h"

namespace satchel {

/// What a channel's ReLU looks like in terms of x. Kept as fp32 copies made at forward.
struct Channel {
  float threshold;  // t = −β/γ; unused when γ = 0
  float gamma, beta;
  float off_mean;  // mean of the channel's off values; read where the off side has a single code
};
static_assert(sizeof(Channel) == 16);

SATCHEL_HD Channel relu_channel() { return {0.0f, 1.0f, 0.0f, 0.0f}; }

struct Range {
  float low, high;  // high = NaN: the block held NaN, infinity or an overflowing range
};

SATCHEL_HD bool is_poisoned(Range r) { return !is_finite(r.high); }

SATCHEL_HD Range make_range(float least, float most, bool finite, HeaderType type) {
  const float low = type == HeaderType::bf16 ? from_bf16(bf16_down(least)) : least;
  const float high = type == HeaderType::bf16 ? from_bf16(bf16_up(most)) : most;
  if (!finite || !is_finite(low) || !is_finite(high) || !is_finite(high - low)) return {0.0f, float_of(kCanonicalNaN)};
  return {low, flush(high)};
}

SATCHEL_HD Range load_range(const void* headers, HeaderType type, int64_t block) {
  const Header h = load_header(headers, type, block);
  return {h.low, h.step};
}

SATCHEL_HD void store_range(void* headers, HeaderType type, int64_t block, Range r) { store_header(headers, type, block, {r.low, r.high}); }

SATCHEL_HD bool is_on(float x, const Channel& c) { return fmaf(c.gamma, x, c.beta) > 0.0f; }

/// The stretch [from, from ± length] that a value's side covers.
struct Stretch {
  float from, length;  // length ≥ 0
  bool up;             // values lie above `from`
  bool is_long;        // longer than 0.8 of the block's range
};

SATCHEL_HD Stretch stretch_of(bool on, const Channel& c, Range r) {
  const bool flat = c.gamma == 0.0f;  // the whole range is one side
  const bool up = flat || (on != (c.gamma < 0.0f));
  const float from = flat ? r.low : fminf(fmaxf(c.threshold, r.low), r.high);
  const float length = up ? r.high - from : from - r.low;
  return {from, length, up, length > 0.8f * (r.high - r.low)};
}

/// (noise + ½)/2^16, exactly: 128 + noise/2^16 less 128 − 2^−17.
SATCHEL_HD float uniform_of(uint32_t noise) { return float_of(0x43000000u | noise) - 127.99999237060547f; }

/// Stochastic rounding of distance d on [0, length] to `count` levels: how many of the marks, each moved towards the next by u,
/// lie below d. Nearest for noise = 2^15.
SATCHEL_HD uint32_t side_level(float d, float length, const float* levels, int count, uint32_t noise) {
  const float u = uniform_of(noise);
  float mark = 0.0f;
  uint32_t level = 0;
  for (int i = 1; i < count; ++i) {
    const float next = levels[i] * length;
    level += d > fmaf(u, next - mark, mark) ? 1u : 0u;
    mark = next;
  }
  return level;
}

SATCHEL_HD uint32_t side_code_of(float x, const Channel& c, Range r, const SideTable& table, uint32_t noise) {
  x = flush(x);
  const bool on = is_on(x, c);
  if (!on && table.off == 1) return 0;
  const Stretch s = stretch_of(on, c, r);
  const float d = fabsf(x - s.from);  // rounding of t may put x a hair beyond it: then it is that hair
  const float* levels = on ? (s.is_long ? table.on_long : table.on_short) : (s.is_long ? table.off_long : table.off_short);
  const uint32_t level = side_level(d, s.length, levels, on ? table.on : table.off, noise);
  return on ? static_cast<uint32_t>(table.off) + level : static_cast<uint32_t>(table.off) - 1 - level;
}

/// The code of x in a poisoned block. Its values decode to NaN, but the codes still tell the ReLU's gradient which of them passed; NaN
/// passes, as it does through torch's ReLU.
SATCHEL_HD uint32_t poisoned_code_of(float x, const Channel& c, const SideTable& table) {
  return fmaf(c.gamma, flush(x), c.beta) <= 0.0f ? 0u : static_cast<uint32_t>(table.off);
}

/// What the off side's only code stands for. A mean that is not finite shows as NaN, as a poisoned block does.
SATCHEL_HD float off_value(const Channel& c) { return is_finite(c.off_mean) ? flush(c.off_mean) : float_of(kCanonicalNaN); }

SATCHEL_HD float side_value_of(uint32_t code, const Channel& c, Range r, const SideTable& table) {
  if (is_poisoned(r)) return float_of(kCanonicalNaN);
  const bool on = code >= static_cast<uint32_t>(table.off);
  if (!on && table.off == 1) return off_value(c);
  const Stretch s = stretch_of(on, c, r);
  const float* levels = on ? (s.is_long ? table.on_long : table.on_short) : (s.is_long ? table.off_long : table.off_short);
  const uint32_t level = on ? code - static_cast<uint32_t>(table.off) : static_cast<uint32_t>(table.off) - 1 - code;
  return flush(fmaf(levels[level], s.up ? s.length : -s.length, s.from));
}

}  // namespace satchel
