#include "satchel/core/levels.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "satchel/core/error.h"
#include "satchel/core/normal.h"

namespace satchel {
namespace {

constexpr double kSideLength = 2.8;  // σ, theory.md 10
constexpr double kGrain = 4096.0;    // levels are multiples of 2^−12

/// Moments of the normal on the segment [a, c].
struct Segment {
  double mass;  // ∫ f
  double rise;  // ∫ (y − a) f
  double fall;  // ∫ (c − y) f
  double cost;  // ∫ (y − a)(c − y) f, the variance of stochastic rounding
};

Segment segment_of(Normal n, double a, double c) {
  const double A = (a - n.mu) / n.sigma, C = (c - n.mu) / n.sigma;
  const double mass = A > 0 ? Phi(-A) - Phi(-C) : Phi(C) - Phi(A);
  const double drop = phi(A) - phi(C);
  Segment s;
  s.mass = mass;
  s.rise = n.sigma * drop + (n.mu - a) * mass;
  s.fall = (c - n.mu) * mass - n.sigma * drop;
  s.cost = -n.sigma * n.sigma * (mass + A * phi(A) - C * phi(C)) + n.sigma * (a + c - 2 * n.mu) * drop + (n.mu - a) * (c - n.mu) * mass;
  return s;
}

double total_cost(Normal n, std::span<const double> levels) {
  double sum = 0;
  for (size_t i = 1; i < levels.size(); ++i) sum += segment_of(n, levels[i - 1], levels[i]).cost;
  return sum;
}

/// Start for Newton: fine quantisation puts levels as dense as f^⅓, which is the normal with σ·√3.
std::vector<double> dense_levels(Normal n, double end, int count) {
  const double wide = n.sigma * std::numbers::sqrt3;
  const double below = Phi(-n.mu / wide), above = Phi((end - n.mu) / wide);
  std::vector<double> levels(count);
  for (int i = 1; i + 1 < count; ++i) levels[i] = n.mu + wide * inverse_Phi(below + (above - below) * i / (count - 1));
  levels[count - 1] = end;
  return levels;
}

/// Newton's step for the inner levels towards rise(left segment) = fall(right segment), a tridiagonal system.
std::vector<double> newton_step(Normal n, const std::vector<double>& levels) {
  const size_t inner = levels.size() - 2;
  std::vector<double> step(inner), ratio(inner);
  Segment left = segment_of(n, levels[0], levels[1]);
  for (size_t i = 0; i < inner; ++i) {
    const Segment right = segment_of(n, levels[i + 1], levels[i + 2]);
    const double density = phi((levels[i + 1] - n.mu) / n.sigma) / n.sigma;
    const double pivot = (levels[i + 2] - levels[i]) * density - (i > 0 ? left.mass * ratio[i - 1] : 0);
    ratio[i] = right.mass / pivot;
    step[i] = (right.fall - left.rise + (i > 0 ? left.mass * step[i - 1] : 0)) / pivot;
    left = right;
  }
  for (size_t i = inner - 1; i-- > 0;) step[i] += ratio[i] * step[i + 1];
  return step;
}

/// The `count` levels from 0 to `end` of least total cost.
std::vector<double> best_levels(Normal n, double end, int count) {
  std::vector<double> levels = dense_levels(n, end, count);
  if (count <= 2) return levels;
  double cost = total_cost(n, levels);
  for (int round = 0; round < 60; ++round) {
    const std::vector<double> step = newton_step(n, levels);
    std::vector<double> next = levels;
    double size = 1, moved = 0;
    for (int halving = 0; halving < 40; ++halving, size /= 2) {
      moved = 0;
      for (size_t i = 0; i < step.size(); ++i) {
        next[i + 1] = levels[i + 1] + size * step[i];
        moved = std::max(moved, std::abs(size * step[i]));
      }
      if (std::is_sorted(next.begin(), next.end()) && total_cost(n, next) <= cost * (1 + 1e-12)) break;
    }
    levels = next;
    cost = total_cost(n, levels);
    if (moved < 1e-13 * end) break;
  }
  return levels;
}

std::vector<double> even_levels(int count, double end) {
  std::vector<double> levels(count);
  for (int i = 0; i < count; ++i) levels[i] = end * i / (count - 1);
  return levels;
}

void fill_side(float* to, const std::vector<double>& levels) {
  for (size_t i = 0; i < levels.size(); ++i) {
    to[i] = static_cast<float>(std::round(levels[i] / levels.back() * kGrain) / kGrain);
  }
}

}  // namespace

std::vector<double> optimal_levels(int count, double block) {
  if (count < 2 || count > kMaxLevels) fail("levels", "a block has 2 to 16 optimal levels", count);
  if (!(block >= 1)) fail("levels", "a block has at least 1 value", block);
  const double top = count - 1;
  if (block < 3) return even_levels(count, top);
  std::vector<double> levels = best_levels(clipped_normal(top, block), top, count);
  for (int i = 0; i < count / 2; ++i) {
    levels[i] = (levels[i] + (top - levels[count - 1 - i])) / 2;
    levels[count - 1 - i] = top - levels[i];
  }
  if (count % 2 == 1) levels[count / 2] = top / 2;
  return levels;
}

double expected_variance(std::span<const double> levels, double block) {
  if (levels.size() < 2) fail("levels", "a variance needs at least 2 levels", levels.size());
  if (!(block >= 1)) fail("levels", "a block has at least 1 value", block);
  if (block <= 2) return 0;  // the block's own minimum and maximum
  return total_cost(clipped_normal(levels.back(), block), levels);
}

double paper_fit(double block) {
  return .83162565 + .02993653 * std::log(116.05528511 * block) + 1.225e-5 * block - .00171617 * std::sqrt(block);
}

std::vector<double> side_levels(int count) {
  if (count < 2 || count > kMaxSideLevels) fail("levels", "a side has 2 to 8 levels", count);
  std::vector<double> levels = best_levels({0, 1}, kSideLength, count);
  for (double& level : levels) level /= kSideLength;
  return levels;
}

double side_variance(std::span<const double> levels) {
  if (levels.size() < 2) fail("levels", "a variance needs at least 2 levels", levels.size());
  std::vector<double> scaled(levels.begin(), levels.end());
  for (double& level : scaled) level *= kSideLength;
  return total_cost({0, 1}, scaled) / (Phi(kSideLength) - 0.5);
}

double code_variance(const CodecSpec& spec) {
  if (spec.bits == kKeep) return 0;
  if (spec.side != Side::none) {
    const SideTable table = side_table(spec.bits, spec.side, spec.levels, spec.block);
    const std::vector<double> levels(table.on_short, table.on_short + table.on);
    return side_variance(levels);
  }
  const LevelTable table = level_table(spec.bits, spec.levels, spec.block);
  const int count = 1 << spec.bits;
  std::vector<double> levels = even_levels(count, count - 1);
  if (!table.even) levels.assign(table.at, table.at + count);
  const double block = std::max<double>(3, static_cast<double>(spec.block));
  const double sigma = clipped_normal(count - 1, block).sigma;
  return expected_variance(levels, block) / (sigma * sigma);
}

namespace {

/// Levels of a family on [0, count − 1] for blocks of so many values, and on a side, [0, 1] from the threshold outwards.
struct LevelFamily {
  std::vector<double> (*in_block)(int count, double block);
  std::vector<double> (*on_side)(int count);
};

/// As many values between any two neighbours, as NF4 has them (QLoRA), under the clipped normal of `block` values.
std::vector<double> quantiles_in_block(int count, double block) {
  const double top = count - 1;
  if (block < 3) return even_levels(count, top);
  const Normal n = clipped_normal(top, block);
  const double outside = Phi(-n.mu / n.sigma);
  std::vector<double> levels(static_cast<size_t>(count), 0.0);
  for (int i = 1; i < count - 1; ++i) levels[static_cast<size_t>(i)] = n.mu + n.sigma * inverse_Phi(outside + i / top * (1 - 2 * outside));
  levels.back() = top;
  return levels;
}

/// … and under the half normal of a side.
std::vector<double> quantiles_on_side(int count) {
  std::vector<double> levels(static_cast<size_t>(count), 0.0);
  const double mass = Phi(kSideLength) - 0.5;
  for (int i = 1; i < count; ++i) levels[static_cast<size_t>(i)] = inverse_Phi(0.5 + i * mass / (count - 1)) / kSideLength;
  return levels;
}

/// In the order of Levels.
constexpr LevelFamily kFamilies[] = {
    {[](int count, double) { return even_levels(count, count - 1); }, [](int count) { return even_levels(count, 1); }},
    {optimal_levels, side_levels},
    {quantiles_in_block, quantiles_on_side},
};
static_assert(std::size(kFamilies) == std::size(kLevelNames));

const LevelFamily& family_of(Levels levels) { return kFamilies[static_cast<size_t>(levels)]; }

}  // namespace

LevelTable level_table(int bits, Levels levels, int64_t block) {
  if (bits < 1 || bits > 8) fail("levels", "bits must be 1 to 8", bits);
  if (block < 1) fail("levels", "a block has at least 1 value", block);
  LevelTable table;
  table.bits = bits;
  table.even = levels == Levels::even || bits == 1 || bits > 4 || block < 3;
  if (table.even) return table;
  const int top = (1 << bits) - 1;
  const std::vector<double> exact = family_of(levels).in_block(top + 1, static_cast<double>(block));
  for (int i = 0; 2 * i < top; ++i) {  // the upper half mirrors the rounded lower half
    table.at[i] = static_cast<float>(std::round(exact[static_cast<size_t>(i)] * kGrain) / kGrain);
    table.at[top - i] = static_cast<float>(top) - table.at[i];
  }
  const auto slope = [&](int segment) { return 1 / (double{table.at[segment + 1]} - double{table.at[segment]}); };
  table.slope = static_cast<float>(slope(0));
  double base = 0;
  for (int p = 1; 2 * p < top; ++p) {
    table.bend[p] = static_cast<float>(slope(p) - slope(p - 1));
    base -= 65536.0 * table.at[p] * (slope(p) - slope(p - 1));
  }
  table.base = static_cast<float>(base);
  return table;
}

SideTable side_table(int bits, Side side, Levels levels, int64_t block) {
  if (side == Side::none) fail("levels", "a side table needs a side code", "side=none");
  if (bits < 2 || bits > (side == Side::both ? 4 : 3)) {
    fail("levels", side == Side::both ? "side code bits must be 2 to 4" : "side code bits must be 2 or 3", bits);
  }
  if (block < 1) fail("levels", "a block has at least 1 value", block);
  SideTable table;
  table.bits = bits;
  table.side = side;
  table.off = side == Side::both ? 1 << (bits - 1) : side == Side::relu || bits == 2 ? 1 : 2;
  table.on = (1 << bits) - table.off;
  const auto fill = [&](int count, float* usual, float* large) {
    if (count < 2) return;
    const LevelFamily& family = family_of(levels);
    const std::vector<double> half = family.on_side(count);
    fill_side(usual, half);
    // A ReLU's zeros make its side the whole range; what lies on it is a half normal all the same.
    fill_side(large, side == Side::relu ? half : family.in_block(count, static_cast<double>(block)));
  };
  fill(table.on, table.on_short, table.on_long);
  fill(table.off, table.off_short, table.off_long);
  return table;
}

}  // namespace satchel
