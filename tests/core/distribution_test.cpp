#include "satchel/core/distribution.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "satchel/core/levels.h"
#include "satchel/core/noise.h"
#include "satchel/core/normal.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

/// Values of the clipped normal of `block` values on [0, 1], one at the middle of each of `count` equal shares of its mass: no noise.
std::vector<float> clipped_normal_values(double block, int count) {
  const Normal n = clipped_normal(1, block);
  std::vector<float> values;
  for (int i = 0; i < count; ++i)
    values.push_back(static_cast<float>(std::clamp(n.mu + n.sigma * inverse_Phi((i + 0.5) / count), 0.0, 1.0)));
  return values;
}

/// Independent standard normals, by Box and Muller from the library's counters.
std::vector<float> normals(int64_t count, uint64_t seed) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    const Words w = philox(seed, {static_cast<uint32_t>(i), 0, 0, 0});
    const double u = (w.w[0] + 0.5) * 0x1p-32, v = (w.w[1] + 0.5) * 0x1p-32;
    values.push_back(static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v)));
  }
  return values;
}

TEST(Distribution, SigmaOfTheory) {
  const struct {
    double block, sigma;
  } table[] = {{8, 1.3040}, {16, .9778}, {32, .8053}, {64, .6964}, {128, .6205}, {256, .5639}, {512, .5198}, {1024, .4843}, {2048, .4549}};
  for (const auto& row : table) {
    const Normal n = clipped_normal(3, row.block);
    EXPECT_EQ(n.mu, 1.5);
    EXPECT_NEAR(n.sigma, row.sigma, .5e-4) << row.block;
    EXPECT_NEAR(Phi(-n.mu / n.sigma), 1 / row.block, 1e-12) << row.block;
  }
}

// docs/theory.md 2: variances of the clipped normal, even and optimal, are what rounding does to values that follow it.
TEST(Distribution, RoundingOfClippedNormalValuesIsTheory) {
  const struct {
    double block, even, optimal;
  } table[] = {{8, .12579, .12503},   {16, .14694, .14424},  {32, .15734, .15140},   {64, .16233, .15206},  {128, .16471, .14933},
               {256, .16594, .14492}, {512, .16673, .13979}, {1024, .16746, .13446}, {2048, .16828, .12920}};
  for (const auto& row : table) {
    const std::vector<float> values = clipped_normal_values(row.block, 100000);
    EXPECT_NEAR(rounding_variance(values, even_levels(4)), row.even, 2e-5) << row.block;
    EXPECT_NEAR(rounding_variance(values, optimal_levels(4, row.block)), row.optimal, 2e-5) << row.block;
    EXPECT_NEAR(rounding_variance(values, optimal_levels(4, row.block)), expected_variance(optimal_levels(4, row.block), row.block), 1e-5);
  }
}

TEST(Distribution, RoundingOfUniformValues) {
  std::vector<float> values;
  for (int i = 0; i < 30000; ++i) values.push_back((static_cast<float>(i) + 0.5F) / 30000);
  for (const int bits : {1, 2, 3, 4, 8}) {
    const std::vector<double> even = even_levels(1 << bits);
    EXPECT_NEAR(uniform_variance(even), 1.0 / 6, 1e-12);
    EXPECT_NEAR(rounding_variance(values, even), 1.0 / 6, 1e-4);
  }
  const std::vector<double> best = optimal_levels(4, 256);
  EXPECT_NEAR(rounding_variance(values, best), uniform_variance(best), 1e-4);
  EXPECT_GT(uniform_variance(best), 1.0 / 6);  // optimal for another distribution
}

// Blocks of independent normals: the model holds where blocks are long. Its ends are fixed, those of a real block move with its values, so
// that short blocks differ: 5 % is the bound of long ones.
TEST(Distribution, NormalBlocksFollowTheModel) {
  const std::vector<float> x = normals(1 << 20, 7);
  for (const int64_t block : {64, 256, 1024}) {
    const NormalisedBlocks y = normalise_blocks(x, static_cast<int64_t>(x.size()), block);
    ASSERT_EQ(y.blocks, (1 << 20) / block);
    for (const int bits : {2, 3, 4}) {
      const std::vector<double> even = even_levels(1 << bits), best = optimal_levels(1 << bits, static_cast<double>(block));
      const double want = expected_variance(even, static_cast<double>(block)),
                   want_best = expected_variance(best, static_cast<double>(block));
      EXPECT_NEAR(rounding_variance(y.values, even) / want, 1, .05) << block << ' ' << bits;
      EXPECT_NEAR(rounding_variance(y.values, best) / want_best, 1, .05) << block << ' ' << bits;
    }
    const std::vector<double> shares = histogram(y.values, 60);
    const double normal = jensen_shannon(shares, clipped_normal_shares(60, static_cast<double>(block)));
    EXPECT_LT(normal, .1 * jensen_shannon(shares, uniform_shares(60))) << block;
  }
}

TEST(Distribution, BlocksAreNormalisedByTheirOwnEnds) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {1, 2, 3, /**/ 10, 30, 10, /**/ 5, /* next span */ 4, 4, 4, /**/ nan, 0, 1, /**/ 9};
  const NormalisedBlocks y = normalise_blocks(x, 7, 3);
  EXPECT_EQ(y.values, (std::vector<float>{0, .5, 1, 0, 1, 0}));
  EXPECT_EQ(y.blocks, 2);
  EXPECT_EQ(y.constant, 1);
  EXPECT_EQ(y.nonfinite, 1);
  const float huge = std::numeric_limits<float>::max();
  EXPECT_EQ(normalise_blocks(std::vector<float>{-huge, 0, huge}, 3, 3).values, (std::vector<float>{0, .5, 1}));
}

TEST(Distribution, Histograms) {
  EXPECT_EQ(histogram(std::vector<float>{0, .24F, .25F, .99F, 1}, 4), (std::vector<double>{.4, .2, 0, .4}));
  EXPECT_TRUE(histogram(std::vector<float>(), 4).empty());
  for (const double block : {3.0, 16.0, 1024.0}) {
    const std::vector<double> shares = clipped_normal_shares(60, block);
    EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.0), 1, 1e-12);
    EXPECT_NEAR(shares.front(), shares.back(), 1e-12);
    EXPECT_GT(shares.front(), 1 / block);
  }
}

TEST(Distribution, Divergence) {
  const std::vector<double> p = {.5, .5, 0, 0}, q = {0, 0, .25, .75}, r = {.25, .25, .25, .25};
  EXPECT_EQ(jensen_shannon(p, p), 0);
  EXPECT_NEAR(jensen_shannon(p, q), std::numbers::ln2, 1e-12);
  // ½[½·ln(½/⅜)·2] + ½[¼·ln(¼/⅜)·2 + ¼·ln(¼/⅛)·2]
  EXPECT_NEAR(jensen_shannon(p, r), .5 * std::log(4.0 / 3) + .5 * (.5 * std::log(2.0 / 3) + .5 * std::log(2.0)), 1e-12);
  EXPECT_EQ(jensen_shannon(p, r), jensen_shannon(r, p));
}

TEST(Distribution, Errors) {
  const std::vector<float> x = {1, 2};
  EXPECT_EQ(error_of([&] { normalise_blocks(x, 2, 0); }), "[distribution] a block must have 1 value or more, got 0");
  EXPECT_EQ(error_of([&] { histogram(x, 0); }), "[distribution] a histogram must have 1 bin or more, got 0");
  EXPECT_EQ(error_of([&] { clipped_normal_shares(4, 2); }), "[distribution] a clipped normal must have blocks of 3 values or more, got 2");
  EXPECT_EQ(error_of([&] {
              rounding_variance(x, std::vector<double>{0, 2});
            }),
            "[distribution] levels must rise from 0 to their number − 1, got 2");
  EXPECT_EQ(error_of([&] { jensen_shannon(std::vector<double>{1}, std::vector<double>{}); }),
            "[distribution] histograms must have equal bins, got 1");
}

}  // namespace
}  // namespace satchel
