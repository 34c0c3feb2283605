#include "satchel/core/distribution.h"

#include <algorithm>
#include <cmath>

#include "satchel/core/error.h"
#include "satchel/core/normal.h"

namespace satchel {
namespace {

constexpr const char* kOp = "distribution";

void check_bins(int bins) {
  if (bins < 1) fail(kOp, "a histogram must have 1 bin or more", bins);
}

void check_levels(std::span<const double> levels) {
  if (levels.size() < 2) fail(kOp, "a variance needs at least 2 levels", levels.size());
  if (!std::ranges::is_sorted(levels) || levels.front() != 0 || levels.back() != static_cast<double>(levels.size() - 1))
    fail(kOp, "levels must rise from 0 to their number − 1", levels.back());
}

/// p·ln(p/m), which is 0 for p = 0.
double divergence_term(double p, double m) { return p > 0 ? p * std::log(p / m) : 0; }

}  // namespace

NormalisedBlocks normalise_blocks(std::span<const float> x, int64_t span, int64_t block) {
  if (block < 1) fail(kOp, "a block must have 1 value or more", block);
  if (span < 1) fail(kOp, "a span must have 1 value or more", span);
  NormalisedBlocks all;
  all.block = block;
  const auto count = static_cast<int64_t>(x.size());
  all.values.reserve(x.size());
  for (int64_t first = 0; first < count; first += span) {
    const int64_t end = std::min(first + span, count);
    for (int64_t at = first; at + block <= end; at += block) {
      const auto values = x.subspan(static_cast<size_t>(at), static_cast<size_t>(block));
      if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); })) {
        ++all.nonfinite;
        continue;
      }
      const auto [low, high] = std::ranges::minmax(values);
      const double range = double{high} - double{low};
      if (range == 0) {
        ++all.constant;
        continue;
      }
      ++all.blocks;
      for (const float v : values) all.values.push_back(static_cast<float>((double{v} - double{low}) / range));
    }
  }
  return all;
}

std::vector<double> histogram(std::span<const float> values, int bins) {
  check_bins(bins);
  if (values.empty()) return {};
  std::vector<int64_t> counts(static_cast<size_t>(bins), 0);
  for (const float v : values) ++counts[static_cast<size_t>(std::clamp(static_cast<int>(v * static_cast<float>(bins)), 0, bins - 1))];
  std::vector<double> shares;
  for (const int64_t n : counts) shares.push_back(static_cast<double>(n) / static_cast<double>(values.size()));
  return shares;
}

std::vector<double> uniform_shares(int bins) {
  check_bins(bins);
  return std::vector<double>(static_cast<size_t>(bins), 1.0 / bins);
}

std::vector<double> clipped_normal_shares(int bins, double block) {
  check_bins(bins);
  if (!(block >= 3)) fail(kOp, "a clipped normal must have blocks of 3 values or more", block);
  const Normal n = clipped_normal(1, block);
  std::vector<double> shares;
  for (int i = 0; i < bins; ++i) {
    const double below = (static_cast<double>(i) / bins - n.mu) / n.sigma, above = (static_cast<double>(i + 1) / bins - n.mu) / n.sigma;
    shares.push_back(Phi(above) - Phi(below));
  }
  shares.front() += 1 / block;
  shares.back() += 1 / block;
  return shares;
}

double jensen_shannon(std::span<const double> p, std::span<const double> q) {
  if (p.size() != q.size()) fail(kOp, "histograms must have equal bins", p.size());
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double middle = (p[i] + q[i]) / 2;
    sum += (divergence_term(p[i], middle) + divergence_term(q[i], middle)) / 2;
  }
  return std::max(sum, 0.0);
}

double rounding_variance(std::span<const float> values, std::span<const double> levels) {
  check_levels(levels);
  if (values.empty()) return 0;
  const double top = levels.back();
  double sum = 0;
  for (const float v : values) {
    const double y = top * double{v};
    const auto next = std::ranges::upper_bound(levels.subspan(1, levels.size() - 2), y);
    const double high = next == levels.end() - 1 ? top : *next, low = *(next - 1);
    sum += (y - low) * (high - y);
  }
  return sum / static_cast<double>(values.size());
}

double uniform_variance(std::span<const double> levels) {
  check_levels(levels);
  double sum = 0;  // ∫ (y − l)(h − y) dy = (h − l)³/6
  for (size_t i = 1; i < levels.size(); ++i) sum += std::pow(levels[i] - levels[i - 1], 3) / 6;
  return sum / levels.back();
}

std::vector<double> even_levels(int count) {
  if (count < 2) fail(kOp, "levels must be 2 or more", count);
  std::vector<double> levels(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) levels[static_cast<size_t>(i)] = i;
  return levels;
}

}  // namespace satchel
