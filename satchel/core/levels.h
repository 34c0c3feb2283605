// Where the codes of a block sit between its low end and its high end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "satchel/core/kinds.h"
#include "satchel/core/spec.h"

namespace satchel {

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

SideTable side_table(int bits, Side side, Levels levels, int64_t block);

}  // namespace satchel
