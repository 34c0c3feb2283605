// What the two directions of the channels_last low-pass share: four neighbouring channels of a pixel are read and written at once.
#pragma once

#include "satchel/kernels/cuda/low_pass_last.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {

constexpr int kWindow = 8;  // values a side

/// The number in a cell, subnormals flushed.
template <DType type>
__device__ inline float number_of(Cell<type> cell) {
  if constexpr (type == DType::f32) {
    return flush_signed(cell);
  } else {
    return flush_signed(type == DType::f16 ? from_f16(cell) : from_bf16(cell));
  }
}

__device__ inline float tree8(const float (&v)[8]) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

/// 1 + code / 2^bits of value j of 8: a code in the mantissa's first bits is a number without a conversion.
template <int bits>
__device__ inline float level_of(uint32_t eight, int j) {
  constexpr int kPlace = 23 - bits;
  const uint32_t there = j * bits <= kPlace ? eight << (kPlace - j * bits) : eight >> (j * bits - kPlace);
  return __uint_as_float((there & ((1u << bits) - 1) << kPlace) | 0x3f800000u);
}

/// Of usual size: make_ruler()'s scale is 1, a subnormal cannot be told from 0, and no value of the block is subnormal or overflows.
__device__ inline bool is_usual(const Header& h) { return h.step >= 0x1p-40f && h.step <= 0x1p60f && fabsf(h.low) <= 0x1p61f; }

/// Bits that the fused kernels of both layouts know. Others are rare: they take a copy, or a pass more.
inline bool has_usual_bits(const BlockCode& code) { return code.levels.bits == 2 || code.levels.bits == 4; }

/// Calls f with them as an integral constant.
template <class F>
void with_usual_bits(int bits, F&& f) {
  return bits == 2 ? f(std::integral_constant<int, 2>()) : f(std::integral_constant<int, 4>());
}

/// Both directions: planes in windows of 8, 2 or 4 bits, one block a map, channels in eights, 32-bit indices inside a sample.
inline bool fits_last(const LowPassShape& s, const BlockCode& code, int64_t channels, const void* x) {
  return is_aligned(x) && s.size == kWindow && s.depth == 1 && channels > 0 && channels % 8 == 0 && s.maps % channels == 0 &&
         code.levels.even && has_usual_bits(code) && code.grid.block == s.map_values() && code.grid.is_straight() &&
         s.map_values() < (int64_t{1} << 31) / channels && s.maps < int64_t{1} << 31;
}

}  // namespace satchel::cuda
