// The numeric contract: code() and value() of one number (theory.md 1, 2, 13). Every kernel computes exactly this.
//
//   low  = least value rounded DOWN to the header's type         2^16·y = fma(x, scale, −low·scale) · inverse
//   step = (most − low) / B rounded UP to the header's type       code   = (rint(2^16·y on the levels) + noise) >> 16
//
// scale is a power of two that keeps every intermediate normal, so the bytes do not depend on FTZ or DAZ. Adding 16 bits of
// noise and dropping 16 bits is "round up with probability y − floor(y)"; nearest adds 2^15 instead.
// Compile with -ffp-contract=off / -fmad=false: only the fma written here may fuse.
#pragma once

#include <cmath>
#include <cstdint>

#include "satchel/core/kinds.h"
#include "satchel/core/number.h"

namespace satchel {

/// What a block stores. step = 0: all values are low. step = NaN: the block held NaN, infinity or an overflowing range.
struct Header {
  float low, step;
};

struct alignas(4) Bf16Header {  // | low 16 | step 16 |
  uint16_t low, step;
};
struct alignas(8) F32Header {  // | low 32 | step 32 |
  float low, step;
};
static_assert(sizeof(Bf16Header) == 4 && sizeof(F32Header) == 8);

constexpr uint32_t kNearestNoise = 1u << 15;

SATCHEL_HD constexpr int64_t header_bytes(HeaderType type) { return type == HeaderType::bf16 ? 4 : 8; }

SATCHEL_HD Header poisoned() { return {0.0f, float_of(kCanonicalNaN)}; }
SATCHEL_HD bool is_poisoned(Header h) { return !is_finite(h.step); }

/// Header of a block from its least and most value, both flushed and finite (`finite` false: some value was not).
SATCHEL_HD Header make_header(float least, float most, bool finite, int top, HeaderType type) {
  if (!finite) return poisoned();
  const float low = type == HeaderType::bf16 ? from_bf16(bf16_down(least)) : least;
  if (!is_finite(low)) return poisoned();
  // Small numbers are lifted by 2^64 so that no difference of them is subnormal.
  const bool small = fabsf(low) < 0x1p-40f && fabsf(most) < 0x1p-40f;
  const float lift = small ? 0x1p64f : 1.0f, back = small ? 0x1p-64f : 1.0f;
  const float span = most * lift - low * lift;
  if (!is_finite(span)) return poisoned();
  if (!(span > 0.0f)) return {low, 0.0f};
  const float b = static_cast<float>(top);
  float step = span / b;
  if (step < kSmallestNormal * lift) {
    step = kSmallestNormal;
  } else {
    step = step * back;
    if (type == HeaderType::bf16) {
      step = from_bf16(bf16_up(step));
    } else if (fmaf(step * lift, b, -span) < 0.0f) {
      step = float_of(bits_of(step) + 1);
    }
  }
  if (!is_finite(step) || !is_finite(fmaf(b, step, low))) return poisoned();
  return {low, step};
}

/// The scaled ruler that turns x into 2^16·y.
struct Ruler {
  float scale, offset, inverse;
};

SATCHEL_HD Ruler make_ruler(Header h) {
  if (is_poisoned(h) || h.step == 0.0f) return {0.0f, 0.0f, 0.0f};
  const float scale = h.step < 0x1p-64f ? 0x1p64f : h.step >= 0x1p64f ? 0x1p-64f : 1.0f;
  return {scale, -(h.low * scale), 65536.0f / (h.step * scale)};
}

/// 2^16·y of a finite x of the block.
SATCHEL_HD float position(float x, Ruler r) { return fmaf(flush(x), r.scale, r.offset) * r.inverse; }

/// code of one value from 2^16·y and 16 bits of noise.
SATCHEL_HD uint32_t code_of(float y16, const LevelTable& levels, uint32_t noise) {
  const int top = (1 << levels.bits) - 1;
  float c = fminf(y16, static_cast<float>(top) * 65536.0f);
  if (!levels.even) {
    const float y = c;
    c = fmaf(y, levels.slope, levels.base);
    for (int p = 1; p <= (top - 1) / 2; ++p) {
      c = fmaf(fminf(fmaxf(y, levels.at[p] * 65536.0f), levels.at[top - p] * 65536.0f), levels.bend[p], c);
    }
  }
  return (static_cast<uint32_t>(rintf(c)) + noise) >> 16;
}

/// The number a code stands for.
SATCHEL_HD float value_of(uint32_t code, Header h, const LevelTable& levels) {
  if (is_poisoned(h)) return float_of(kCanonicalNaN);
  return flush(fmaf(levels.even ? static_cast<float>(code) : levels.at[code], h.step, h.low));
}

/// A step that is not finite, whatever its bits, is the canonical NaN.
SATCHEL_HD Header load_header(const void* headers, HeaderType type, int64_t block) {
  if (type == HeaderType::f32) {
    const F32Header h = static_cast<const F32Header*>(headers)[block];
    return {h.low, is_finite(h.step) ? h.step : float_of(kCanonicalNaN)};
  }
  const Bf16Header h = static_cast<const Bf16Header*>(headers)[block];
  const float step = from_bf16(h.step);
  return {from_bf16(h.low), is_finite(step) ? step : float_of(kCanonicalNaN)};
}

/// The header's numbers are already of its type: storing loses nothing.
SATCHEL_HD void store_header(void* headers, HeaderType type, int64_t block, Header h) {
  if (type == HeaderType::f32) {
    static_cast<F32Header*>(headers)[block] = {h.low, h.step};
  } else {
    static_cast<Bf16Header*>(headers)[block] = {static_cast<uint16_t>(bits_of(h.low) >> 16), static_cast<uint16_t>(bits_of(h.step) >> 16)};
  }
}

}  // namespace satchel
