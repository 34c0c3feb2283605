// fp16 and bf16 by integer arithmetic, so that every machine rounds alike (theory.md 13).
#pragma once

#include <cmath>
#include <cstdint>

#include "satchel/core/portable.h"

namespace satchel {

enum class DType : uint8_t { f32, f16, bf16 };

SATCHEL_HD constexpr int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }
constexpr const char* name_of(DType type) { return type == DType::f32 ? "f32" : type == DType::f16 ? "f16" : "bf16"; }

constexpr uint32_t kCanonicalNaN = 0x7fc00000u;
constexpr float kSmallestNormal = 0x1p-126f;

SATCHEL_HD uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
SATCHEL_HD float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// Finite or not by exponent bits; a comparison would depend on compiler flags.
SATCHEL_HD bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

/// Subnormals and −0 become +0 by an integer test, whatever FTZ and DAZ say.
SATCHEL_HD float flush(float x) { return (bits_of(x) & 0x7f800000u) == 0 ? 0.0f : x; }

/// A sum of finite numbers that overflowed becomes the largest finite number of its sign; NaN stays NaN.
SATCHEL_HD float bounded(float x) { return (bits_of(x) & 0x7fffffffu) == 0x7f800000u ? float_of(bits_of(x) - 1u) : x; }

/// The largest bf16 not above x (x finite); −inf when there is none.
SATCHEL_HD uint16_t bf16_down(float x) {
  uint32_t b = bits_of(x);
  if ((b >> 31) != 0 && (b & 0xffffu) != 0) b += 0x10000u;
  return static_cast<uint16_t>(b >> 16);
}

/// The smallest bf16 not below x (x finite); +inf when there is none.
SATCHEL_HD uint16_t bf16_up(float x) {
  uint32_t b = bits_of(x);
  if ((b >> 31) == 0 && (b & 0xffffu) != 0) b += 0x10000u;
  return static_cast<uint16_t>(b >> 16);
}

SATCHEL_HD float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

/// Nearest even; finite values saturate at the largest finite bf16, NaN is the canonical one.
SATCHEL_HD uint16_t to_bf16(float x) {
  uint32_t b = bits_of(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  if ((b & 0x7fffffffu) == 0x7f800000u) return static_cast<uint16_t>(b >> 16);
  const uint16_t h = static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  return (h & 0x7fffu) == 0x7f80u ? static_cast<uint16_t>(h - 1) : h;
}

SATCHEL_HD float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // A subnormal half is its integer times 2^-24; normal halves only need a new exponent.
  const float magnitude = rest < 0x400u ? static_cast<float>(rest) * 0x1p-24f : float_of((rest << 13) + 0x38000000u);
  return float_of(sign | bits_of(magnitude));
}

/// Nearest even; finite values saturate at 65504, NaN is the canonical one.
SATCHEL_HD uint16_t to_f16(float x) {
  const uint32_t b = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((b >> 16) & 0x8000u);
  const uint32_t rest = b & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7e00;
  if (rest == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (rest >= 0x477fe000u) return static_cast<uint16_t>(sign | 0x7bffu);  // 65504 and above
  if (rest >= 0x38800000u) {                                              // normal halves
    const uint32_t h = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    return static_cast<uint16_t>(sign | h);
  }
  const uint32_t exponent = rest >> 23;
  if (exponent < 102) return sign;  // below half of the smallest subnormal half
  const uint32_t mantissa = (rest & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126 - exponent;
  const uint32_t half = 1u << (shift - 1), odd = (mantissa >> shift) & 1u;
  return static_cast<uint16_t>(sign | ((mantissa + half - 1 + odd) >> shift));
}

SATCHEL_HD float load(const void* x, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(x)[i];
  const uint16_t h = static_cast<const uint16_t*>(x)[i];
  return type == DType::f16 ? from_f16(h) : from_bf16(h);
}

SATCHEL_HD void store(void* x, DType type, int64_t i, float value) {
  if (type == DType::f32) {
    static_cast<float*>(x)[i] = value;
  } else {
    static_cast<uint16_t*>(x)[i] = type == DType::f16 ? to_f16(value) : to_bf16(value);
  }
}

}  // namespace satchel
