#include "satchel/core/noise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace satchel {
namespace {

// Random123's vectors for philox4x32-7 (zeros, ones, digits of π), recomputed by a program of ten lines in Python.
TEST(Noise, KnownAnswers) {
  const auto expect = [](uint64_t key, Words counter, Words want) {
    const Words got = philox(key, counter);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.w[i], want.w[i]) << i;
  };
  expect(0, {0, 0, 0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  expect(~0ull, {~0u, ~0u, ~0u, ~0u}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
  expect(0x299f31d0a4093822, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a});
  // Element 5 of group 12345678901: high half of word 2, and the group's upper 32 bits count.
  EXPECT_EQ(noise(42, Stream::rounding, 12345678901ull * 8 + 5), 0xe9d0u);
  EXPECT_EQ(derive_seed(1, 2, 3, 4), 0x66933e81f9b5a8dbull);
}

// A constant expression: no state anywhere.
static_assert(noise(0, Stream::rounding, 0) == 0xb709 && noise(0, Stream::rounding, 1) == 0x5f6f);
static_assert(noise(0, Stream::rounding, 7) == 0x4f73);
static_assert(derive_seed(1, 2, 3, 4) != derive_seed(1, 2, 4, 3));

/// Wilson–Hilferty: χ² with n degrees of freedom exceeds this once in 10^6.
double chi2_limit(double n) { return n * std::pow(1 - 2 / (9 * n) + 4.753 * std::sqrt(2 / (9 * n)), 3); }

TEST(Noise, UniformOnAllSixteenBits) {
  for (const Stream stream : {Stream::rounding, Stream::dropout}) {
    std::vector<int> count(1 << 16);
    constexpr int kDraws = 1 << 20, kBins = 1 << 16;
    for (uint64_t group = 0; group < kDraws / 8; ++group) {
      const Words words = noise_group(20261115, stream, group);
      for (int slot = 0; slot < 8; ++slot) ++count[noise_of(words, slot)];
    }
    double chi2 = 0;
    const double mean = double{kDraws} / kBins;
    for (const int n : count) chi2 += (n - mean) * (n - mean) / mean;
    EXPECT_LT(chi2, chi2_limit(kBins - 1));
    // And no more even than chance allows: the mirrored limit.
    EXPECT_GT(chi2, 2 * (kBins - 1) - chi2_limit(kBins - 1));
  }
}

TEST(Noise, StreamsSeedsAndNeighboursDiffer) {
  constexpr int kN = 1 << 16;
  int streams = 0, seeds = 0, neighbours = 0;
  double product = 0;
  for (uint64_t i = 0; i < kN; ++i) {
    const uint32_t a = noise(1, Stream::rounding, i), b = noise(1, Stream::dropout, i);
    streams += a == b;
    seeds += a == noise(2, Stream::rounding, i);
    neighbours += a == noise(1, Stream::rounding, i + 1);
    product += (a / 65536.0 - .5) * (b / 65536.0 - .5);
  }
  // Equal by chance: Poisson with mean 1, above 12 with probability 6e-11.
  EXPECT_LE(streams, 12);
  EXPECT_LE(seeds, 12);
  EXPECT_LE(neighbours, 12);
  // The product of two independent uniforms has variance 1/144: five standard errors.
  EXPECT_LT(std::abs(product), 5 * std::sqrt(kN / 144.0));
}

TEST(Noise, DerivedSeedsAreDistinct) {
  std::set<uint64_t> seen;
  int made = 0;
  for (uint64_t run : {0ull, 1ull, ~0ull}) {
    for (uint64_t step : {0ull, 1ull, 2ull, 1ull << 32, 1ull << 40}) {
      for (uint32_t rank : {0u, 1u, 2u, 255u, 256u, 65535u}) {
        for (uint32_t save = 0; save < 50; ++save, ++made) seen.insert(derive_seed(run, step, rank, save));
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), made);
}

TEST(Noise, GroupsAndElementsAgree) {
  for (uint64_t element : {0ull, 1ull, 7ull, 8ull, 12345ull, (1ull << 35) + 3, ~0ull}) {
    const Words words = noise_group(9, Stream::projection, element / 8);
    EXPECT_EQ(noise(9, Stream::projection, element), noise_of(words, static_cast<int>(element % 8)));
    EXPECT_LT(noise(9, Stream::projection, element), 65536u);
  }
}

}  // namespace
}  // namespace satchel
