// Where the codes of a block sit between its low end and its high end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "satchel/core/spec.h"

namespace satchel {

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

/// `count` levels on [0, count − 1] that minimise the expected variance of stochastic rounding for the clipped normal of
/// `block` values (theory.md 2); to full precision. count 2 to 16, block 1 or more (below 3 the model is void: even levels).
std::vector<double> optimal_levels(int count, double block);

/// Expected variance of one value, in steps², of stochastic rounding to `levels` under the clipped normal of `block` values.
double expected_variance(std::span<const double> levels, double block);

/// The paper's fit of the inner 2-bit level, for comparison.
double paper_fit(double block);

/// `count` levels on [0, 1] for the half of a normal that starts at its threshold, 2.8 σ long (theory.md 10). count 2 to 8.
std::vector<double> side_levels(int count);

/// Expected variance of one value, in σ², of stochastic rounding to side levels under the half normal 2.8 σ long.
double side_variance(std::span<const double> levels);

/// Expected variance of one value, in σ² of the normal that the values follow, of stochastic rounding to a spec's levels; of a side code on
/// its passing side. `spec.block` is values. 0 where the spec keeps the values.
double code_variance(const CodecSpec& spec);

/// The table for a spec; `block` is the resolved number of values a block.
LevelTable level_table(int bits, Levels levels, int64_t block);

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

SideTable side_table(int bits, Side side, Levels levels, int64_t block);

}  // namespace satchel
