// What kernels know of a code: its kinds, and the tables of its levels. No header of the standard library but <cstdint>: nvcc takes a
// second and a half for <string> alone, in every file.
#pragma once

#include <cstdint>

namespace satchel {

/// Where a block's codes sit. A family of levels is a name here and in core/spec.h, and a row of functions in core/levels.cpp.
enum class Levels : uint8_t { even, optimal, quantile };
enum class Rounding : uint8_t { stochastic, nearest };
enum class HeaderType : uint8_t { bf16, f32 };

/// Which values get levels (theory.md 10). `none` is the plain block code.
///   one_sided  the side of the threshold that passes gradients gets levels, the other one or two codes (2 or 3 bits)
///   relu       one_sided at threshold 0 for values that are zero or positive: code 0 is exactly 0 (2 or 3 bits)
///   both       side bit + levels on the value's own side, unbiased everywhere (2 to 4 bits)
enum class Side : uint8_t { none, one_sided, relu, both };

/// What a one-sided code of 2 bits, whose off side has a single code, knows of the values that the ReLU turns off. Read by no other code.
///   mean     they all decode to their channel's mean: a norm before the ReLU gets a biased gradient
///   sampled  one block of 8 has one bit more a value (core/off_plane.h): right on average, 1/8 bit a value
enum class Off : uint8_t { mean, sampled };

constexpr int kMaxLevels = 16;  // uneven levels exist for up to 4 bits
constexpr int kMaxSideLevels = 8;

/// The levels of a block code, ready for the kernels, symmetric: at[i] + at[B − i] = B. The map from y onto codes bends at every
/// level; pairs of bends that mirror each other are one clamp, so in 2^16ths
///   code = y·slope + base + Σ_p clamp(y, 2^16·at[p], 2^16·at[B − p])·bend[p],  p = 1 … (B − 1)/2.
struct LevelTable {
  int bits = 2;
  bool even = true;
  float at[kMaxLevels] = {};        // multiples of 2^−12; at[0] = 0, at[B] = B; unused when even
  float slope = 1;                  // of the outermost segments: 1 / at[1]
  float base = 0;                   // makes code 0 of y 0
  float bend[kMaxLevels / 2] = {};  // slope of segment p less that of segment p − 1
};

/// Levels of a side code, on [0, 1] measured from the threshold outwards.
struct SideTable {
  int bits = 2;
  Side side = Side::one_sided;
  int on = 3;                           // codes for the side that passes gradients
  int off = 1;                          // codes for the other
  float on_short[kMaxSideLevels] = {};  // for a side of usual length
  float on_long[kMaxSideLevels] = {};   // for a side longer than 0.8 of the block's range: section 2's levels
  float off_short[kMaxSideLevels] = {};
  float off_long[kMaxSideLevels] = {};
};

}  // namespace satchel
