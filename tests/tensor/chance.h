// Testing chance (theory.md 12): per spec one pooled z and one χ² with the known variance p(1 − p), threshold at 10^−6.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

namespace satchel::chance {

constexpr double kLimit = 4.9;  // P(|z| > 4.9) < 10^−6 for a normal z

/// χ² with n degrees of freedom as a normal number (Wilson and Hilferty).
inline double normal_of_chi2(double chi2, double n) { return (std::cbrt(chi2 / n) - (1 - 2 / (9 * n))) / std::sqrt(2 / (9 * n)); }

struct Result {
  int64_t tested = 0;   // values with seeds·p(1 − p) ≥ 25
  int64_t outside = 0;  // values outside of what they decode to
  double z = 0, chi2 = 0;
};

/// draw(seed) gives x̂. A value takes two neighbouring levels, seen as the least and the most of its draws: with
/// p = (x − least)/(most − least) the variance of one draw is p(1 − p)(most − least)². `slack` is what the output type's rounding
/// may add to a level: half an ulp of the largest value. `only` picks the values that promise to be unbiased.
inline Result pooled(const at::Tensor& x, const at::Tensor& only, int seeds, double slack,
                     const std::function<at::Tensor(uint64_t)>& draw) {
  const at::Tensor exact = x.to(at::kDouble);
  at::Tensor sum = at::zeros_like(exact), least = at::full_like(exact, INFINITY), most = -least;
  for (int s = 0; s < seeds; ++s) {
    const at::Tensor got = draw(static_cast<uint64_t>(s) * 7919 + 11).to(at::kDouble);
    sum += got;
    least = at::minimum(least, got);
    most = at::maximum(most, got);
  }
  const at::Tensor gap = most - least, p = (exact - least) / gap, spread = p * (1 - p);
  // Values with one outcome in all draws have p(1 − p) far below 25/seeds; those with two lie between them.
  const at::Tensor two = (gap > 0).logical_and(only);
  const at::Tensor out = two.logical_and((exact < least - slack).logical_or(exact > most + slack));
  const at::Tensor use = two.logical_and(spread * seeds >= 25);
  const at::Tensor off = sum / seeds - exact;
  const at::Tensor shrunk = off.sign() * (off.abs() - slack).clamp_min(0);
  const at::Tensor z = (shrunk / (gap * (spread / seeds).sqrt())).masked_select(use);
  Result r;
  r.tested = z.numel();
  r.outside = out.sum().item<int64_t>();
  r.z = z.sum().item<double>() / std::sqrt(static_cast<double>(r.tested));
  r.chi2 = normal_of_chi2(z.square().sum().item<double>(), static_cast<double>(r.tested));
  return r;
}

/// At least a tenth of the values must have been tested, or the test would say nothing.
inline void expect_unbiased(const Result& r, int64_t values) {
  EXPECT_GE(r.tested, values / 10);
  EXPECT_EQ(r.outside, 0);
  EXPECT_LT(std::abs(r.z), kLimit);
  // The rounding slack shrinks every |z|, so only too much spread is an error where there is slack.
  EXPECT_LT(r.chi2, kLimit);
}

/// Mean 0 of independent draws whose variance is estimated from them.
inline double t_of(const std::vector<double>& draws) {
  double mean = 0, square = 0;
  for (const double d : draws) mean += d / static_cast<double>(draws.size());
  for (const double d : draws) square += (d - mean) * (d - mean) / static_cast<double>(draws.size() - 1);
  return mean / std::sqrt(square / static_cast<double>(draws.size()));
}

}  // namespace satchel::chance
