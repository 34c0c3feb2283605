#include "satchel/core/projection.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <vector>

namespace satchel {
namespace {

/// a mod b for polynomials over GF(2).
uint64_t remainder(uint64_t a, uint64_t b) {
  const int degree = 63 - __builtin_clzll(b);
  for (int i = 63; i >= degree; --i) {
    if (a >> i & 1) a ^= b << (i - degree);
  }
  return a;
}

TEST(Projection, PolynomialsAreIrreducible) {
  for (int k = 1; k <= kMaxProjectionLog; ++k) {
    const uint64_t p = uint64_t{1} << k | field_polynomial(k);
    // A product has a factor of at most half its degree.
    for (uint64_t q = 2; q < uint64_t{1} << (k / 2 + 1); ++q) ASSERT_NE(remainder(p, q), 0u) << k << ' ' << q;
  }
}

TEST(Projection, ProductIsThatOfTheField) {
  std::mt19937 random(1);
  for (int k = 1; k <= kMaxProjectionLog; ++k) {
    const uint32_t mask = (1u << k) - 1;
    for (int trial = 0; trial < 2000; ++trial) {
      const uint32_t a = random() & mask, b = random() & mask;
      uint64_t product = 0;
      for (int i = 0; i < k; ++i) product ^= (b >> i & 1) != 0 ? uint64_t{a} << i : 0;
      ASSERT_EQ(field_product(a, b, k), remainder(product, uint64_t{1} << k | field_polynomial(k))) << k;
    }
  }
}

TEST(Projection, HadamardColumnsNeverRepeat) {
  for (int log = 0; log <= 10; ++log) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      std::set<uint32_t> seen;
      for (int r = 0; r < 1 << log; ++r) seen.insert(hadamard_column(seed, 5, r, log));
      EXPECT_EQ(seen.size(), size_t{1} << log);
      EXPECT_LT(*seen.rbegin(), 1u << log);
    }
  }
}

// The bits themselves, from a Python program of the same definitions: every backend redraws these.
TEST(Projection, KnownAnswers) {
  const int64_t matrix = (int64_t{1} << 33) + 7;
  const uint32_t columns[] = {82, 184, 157, 119, 215, 61, 24, 242};
  for (int r = 0; r < 8; ++r) EXPECT_EQ(hadamard_column(12345, matrix, r, 8), columns[r]);
  for (const bool hadamard : {false, true}) {
    const Projection p{.rows = 1, .columns = 200, .width = 24, .per_matrix = 1, .hadamard = hadamard};
    uint32_t row = 0;
    for (int r = 0; r < 24; ++r) row |= is_negative(p, 12345, matrix, 150, r) ? 1u << r : 0u;
    EXPECT_EQ(row, hadamard ? 0xcccc33u : 0x568bc9u);
  }
}

TEST(Projection, CountsMatrices) {
  EXPECT_EQ((Projection{.rows = 100, .columns = 8, .width = 1, .per_matrix = 64}.matrices()), 2);
  EXPECT_EQ((Projection{.rows = 128, .columns = 8, .width = 1, .per_matrix = 64}.matrices()), 2);
  EXPECT_EQ((Projection{.rows = 0, .columns = 8, .width = 1, .per_matrix = 64}.matrices()), 0);
  EXPECT_EQ(Projection{}.matrices(), 0);
  EXPECT_EQ(log2_up(1), 0);
  EXPECT_EQ(log2_up(2), 1);
  EXPECT_EQ(log2_up(129), 8);
}

// No two of: neighbouring matrices, matrices 2^32 apart, seeds, forms, share their signs.
TEST(Projection, MatricesDiffer) {
  const Projection signs{.rows = 1, .columns = 64, .width = 64, .per_matrix = 1, .hadamard = false};
  Projection hadamard = signs;
  hadamard.hadamard = true;
  std::set<std::vector<bool>> seen;
  int made = 0;
  for (const Projection& p : {signs, hadamard}) {
    for (uint64_t seed : {0ull, 1ull, 1ull << 32}) {
      for (int64_t matrix : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{1} << 32, int64_t{1} << 33}) {
        std::vector<bool> bits;
        for (int d = 0; d < 64; ++d) {
          for (int r = 0; r < 64; ++r) bits.push_back(is_negative(p, seed, matrix, d, r));
        }
        seen.insert(bits);
        ++made;
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), made);
}

using Matrix = std::vector<std::vector<double>>;

Matrix matrix_of(const Projection& p, uint64_t seed, int64_t index) {
  Matrix m(static_cast<size_t>(p.columns), std::vector<double>(static_cast<size_t>(p.width)));
  for (int d = 0; d < p.columns; ++d) {
    for (int r = 0; r < p.width; ++r) {
      m[static_cast<size_t>(d)][static_cast<size_t>(r)] = (is_negative(p, seed, index, d, r) ? -1 : 1) / std::sqrt(double(p.width));
    }
  }
  return m;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

struct Shape {
  int columns, width;
  bool hadamard;
};

/// Variance of an entry of P·Pᵀ off the diagonal: 1/R for independent signs; for R of D' columns without repetition
/// (1 − (R − 1)/(D' − 1))/R.
double entry_variance(const Shape& s) {
  const double size = 1 << log2_up(s.columns);
  return s.hadamard ? (1 - (s.width - 1) / (size - 1)) / s.width : 1.0 / s.width;
}

const Shape kShapes[] = {{32, 4, false}, {32, 4, true}, {24, 3, false}, {24, 3, true}, {40, 8, true}};
constexpr int kMatrices = 3000;

TEST(Projection, MeanOfPPtIsTheIdentity) {
  for (const Shape& s : kShapes) {
    const Projection p{.rows = kMatrices, .columns = s.columns, .width = s.width, .per_matrix = 1, .hadamard = s.hadamard};
    const size_t n = static_cast<size_t>(s.columns);
    Matrix sum(n, std::vector<double>(n));
    for (int i = 0; i < kMatrices; ++i) {
      const Matrix m = matrix_of(p, 17, i);
      for (size_t d = 0; d < n; ++d) {
        ASSERT_NEAR(dot(m[d], m[d]), 1, 1e-12);
        for (size_t e = 0; e < d; ++e) sum[d][e] += dot(m[d], m[e]);
      }
    }
    double chi2 = 0, pairs = 0;
    for (size_t d = 0; d < n; ++d) {
      for (size_t e = 0; e < d; ++e, ++pairs) chi2 += sum[d][e] * sum[d][e] / (kMatrices * entry_variance(s));
    }
    // The pairs are uncorrelated: χ² with as many degrees of freedom, at 10^-6 on either side (Wilson–Hilferty).
    const double width = 4.753 * std::sqrt(2 / (9 * pairs)), centre = 1 - 2 / (9 * pairs);
    EXPECT_LT(chi2, pairs * std::pow(centre + width, 3)) << s.columns << ' ' << s.hadamard;
    EXPECT_GT(chi2, pairs * std::pow(centre - width, 3)) << s.columns << ' ' << s.hadamard;
  }
}

// E‖ĥ − h‖² = (D − 1)/R·‖h‖²; Hadamard: (D' − R)/R, times (D − 1)/(D' − 1) where D is less than the power of two D'.
TEST(Projection, ErrorOfTheory) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (const Shape& s : kShapes) {
    const Projection p{.rows = kMatrices, .columns = s.columns, .width = s.width, .per_matrix = 1, .hadamard = s.hadamard};
    const size_t n = static_cast<size_t>(s.columns);
    std::vector<double> h(n), z(static_cast<size_t>(s.width));
    for (double& v : h) v = normal(random);
    double sum = 0, squares = 0;
    for (int i = 0; i < kMatrices; ++i) {
      const Matrix m = matrix_of(p, 23, i);
      for (size_t r = 0; r < z.size(); ++r) {
        z[r] = 0;
        for (size_t d = 0; d < n; ++d) z[r] += h[d] * m[d][r];
      }
      double error = 0;
      for (size_t d = 0; d < n; ++d) error += std::pow(dot(z, m[d]) - h[d], 2);
      error /= dot(h, h);
      sum += error;
      squares += error * error;
    }
    const double size = 1 << log2_up(s.columns), mean = sum / kMatrices;
    const double want = s.hadamard ? (s.columns - 1) / (size - 1) * (size - s.width) / s.width : (s.columns - 1.0) / s.width;
    // Five standard errors as measured; with one matrix' error about as uncertain as itself that is some 5 %.
    const double standard = std::sqrt((squares / kMatrices - mean * mean) / kMatrices);
    EXPECT_NEAR(mean, want, 5 * standard) << s.columns << ' ' << s.hadamard;
    EXPECT_LT(5 * standard, .12 * want);
  }
}

}  // namespace
}  // namespace satchel
