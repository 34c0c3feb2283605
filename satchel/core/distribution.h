// How the values of blocks lie between their minimum and maximum, beside the two models of it: uniform, and the clipped normal of
// docs/theory.md 2. Numbers only; `satchel analyse` shows them of a model's activations.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace satchel {

/// The normalised values (x − min)/(max − min) of whole blocks, each on [0, 1]; times 2^b − 1 they are what codes of b bits round.
struct NormalisedBlocks {
  int64_t block = 0;
  std::vector<float> values;
  int64_t blocks = 0;     // of which the values are
  int64_t constant = 0;   // blocks without a range: nothing to round, left out
  int64_t nonfinite = 0;  // blocks with NaN or infinity, left out
};

/// Blocks of `block` consecutive values, which start anew every `span` values; what is left of a span is no whole block, and left out.
NormalisedBlocks normalise_blocks(std::span<const float> x, int64_t span, int64_t block);

/// The share of values (on [0, 1]) in each of `bins` equal bins; the last one has 1 itself. Empty where there are no values.
std::vector<double> histogram(std::span<const float> values, int bins);

/// The shares of both models. The clipped normal of blocks of so many values has 1/block more in the first and in the last bin; block 3 or
/// more.
std::vector<double> uniform_shares(int bins);
std::vector<double> clipped_normal_shares(int bins, double block);

/// Jensen–Shannon divergence of two histograms, in nats: 0 where they are equal, ln 2 where they have no bin in common.
double jensen_shannon(std::span<const double> p, std::span<const double> q);

/// Mean of (y − l)·(h − y) over values y = (count of levels − 1)·value between neighbouring levels l and h: what stochastic rounding adds
/// to a value in the mean, in steps², on these very values. `levels` rise from 0 to count − 1.
double rounding_variance(std::span<const float> values, std::span<const double> levels);

/// The same of values that are uniform on the levels' range. Of the clipped normal: expected_variance() of core/levels.h.
double uniform_variance(std::span<const double> levels);

/// 0, 1, … count − 1.
std::vector<double> even_levels(int count);

}  // namespace satchel
