// Means and deviations of channels, groups and rows on the CPU, beside float64.
#include "satchel/autograd/statistics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "tests/tensor/reference.h"

namespace satchel::test {
namespace {

using reference::normal;

/// Rows of samples, some far from 0, and more than one stretch of them.
struct Rows {
  int64_t samples, span, channels;
  double offset;
  at::Tensor values() const { return normal({samples * span, channels}, 1).mul_(0.5).add_(normal({channels}, 2).mul_(offset)); }
};

const Rows kRows[] = {{2, 1, 1, 0}, {7, 1, 3, 10}, {5000, 1, 130, 1}, {40, 50, 64, 100}, {3, 700, 200, 1000}, {9, 4, 60000, 1}};

void expect_moments(const Statistics& got, const at::Tensor& mean, const at::Tensor& var, double offset, const std::string& what) {
  ASSERT_EQ(got.mean.sizes(), mean.sizes()) << what;
  ASSERT_EQ(got.rstd.sizes(), mean.sizes()) << what;
  ASSERT_EQ(got.mean.scalar_type(), at::kFloat) << what;
  // Sums of float32 numbers by halves: a few of their last places, 2^−24 each. The mean's error, squared, is added to the variance.
  const at::Tensor rstd = var.add(1e-5).rsqrt();
  const double mean_error = 0x1p-22 * (offset + 1);
  EXPECT_LE((got.mean - mean).abs().max().item<double>(), mean_error) << what;
  EXPECT_TRUE((((got.rstd - rstd) / rstd).abs() <= 0x1p-20 + 0.5 * mean_error * mean_error * at::square(rstd)).all().item<bool>()) << what;
}

TEST(Statistics, ChannelsAreThoseOfFloat64) {
  for (const Rows& rows : kRows) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor x = rows.values().to(type);
      const auto [var, mean] = at::var_mean(x.to(at::kDouble), at::IntArrayRef{0}, /*correction=*/0, /*keepdim=*/true);
      const at::Tensor running_mean = at::full({rows.channels}, 3.0), running_var = at::full({rows.channels}, 5.0);
      const std::string what = std::to_string(rows.channels) + " channels in " + c10::toString(type);
      expect_moments(statistics_of(x, {{}, {}, running_mean, running_var}, {Norm::batch}, {}), mean, var, 4 * rows.offset, what);
      const double count = static_cast<double>(x.size(0));
      EXPECT_TRUE(at::allclose(running_mean.to(at::kDouble), mean[0] * 0.1 + 2.7, 1e-5, 1e-5)) << what;
      EXPECT_TRUE(at::allclose(running_var.to(at::kDouble), var[0] * (0.1 * count / (count - 1)) + 4.5, 1e-5, 1e-5)) << what;
    }
  }
}

TEST(Statistics, GroupsAndRowsAreThoseOfFloat64) {
  for (const Rows& rows : kRows) {
    for (const int64_t groups : {0, 1, 2}) {  // 0: LayerNorm's rows
      if (groups > 0 && rows.channels % groups != 0) continue;
      const int64_t span = groups == 0 ? 1 : rows.span, of_each = std::max<int64_t>(groups, 1);
      const at::Tensor x = rows.values().to(groups == 2 ? at::kBFloat16 : at::kFloat);
      const at::Tensor values = x.to(at::kDouble).view({x.size(0) / span, span, of_each, rows.channels / of_each});
      const auto [var, mean] = at::var_mean(values, at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
      const NormAxes axes = groups == 0 ? NormAxes{Norm::layer} : NormAxes{Norm::batch, groups, span};
      if (span * rows.channels / of_each == 1) continue;  // a deviation of 0
      expect_moments(statistics_of(x, {}, axes, {}), mean, var, 4 * rows.offset,
                     std::to_string(rows.channels) + " channels, groups " + std::to_string(groups));
    }
  }
}

/// A sum in float32 divided by the count need not be the number again; what is left would be divided by √eps.
TEST(Statistics, EqualValuesHaveNoDeviation) {
  for (const int64_t rows : {3, 7, 49, 1000, 16934}) {
    const at::Tensor channels = normal({1, 50}, 5).expand({rows, 50}).contiguous(),
                     each = normal({rows, 1}, 6).expand({rows, 50}).contiguous();
    EXPECT_EQ(normalised(channels, statistics_of(channels, {}, {Norm::batch}, {}), {Norm::batch}).abs().max().item<float>(), 0) << rows;
    EXPECT_EQ(normalised(each, statistics_of(each, {}, {Norm::layer}, {}), {Norm::layer}).abs().max().item<float>(), 0) << rows;
  }
}

TEST(Statistics, WhatIsNotFiniteShows) {
  at::Tensor x = normal({600, 5}, 3);
  x[0][1] = std::numeric_limits<float>::infinity();
  x[599][3] = std::numeric_limits<float>::quiet_NaN();
  const Statistics s = statistics_of(x, {}, {Norm::batch}, {});
  const at::Tensor finite = at::isfinite(normalised(x, s, {Norm::batch})).all(0).to(at::kInt);
  EXPECT_TRUE(at::equal(finite, at::tensor({1, 0, 1, 0, 1}, at::kInt)));
}

}  // namespace
}  // namespace satchel::test
