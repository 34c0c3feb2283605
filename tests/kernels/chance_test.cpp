// Unbiasedness of the block code (theory.md 12 ii): one pooled z and one χ² a spec, with the known variance p(1 − p).
#include <cmath>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr int kSeeds = 256;

/// Sum of errors, its variance, and Σz² of the values whose z is close to normal.
struct Pool {
  double error = 0, variance = 0, slack = 0, squares = 0;
  int64_t counted = 0;

  void add(double sum, double each, double half_ulp) {
    error += sum;
    variance += kSeeds * each;
    slack += kSeeds * half_ulp;
  }
  void add_square(double sum, double each) {
    squares += sum * sum / (kSeeds * each);
    ++counted;
  }
};

/// The z that has the same tail as χ² with n degrees of freedom (Wilson and Hilferty).
double z_of_chi_square(double chi, double n) { return (std::cbrt(chi / n) - (1 - 2 / (9 * n))) / std::sqrt(2 / (9 * n)); }

/// Where x stands between the two levels around it, in steps: below, above and itself.
struct Place {
  double below, above, y;
  double variance() const { return (y - below) * (above - y); }
  double up() const { return (y - below) / (above - below); }
};

Place place_of(float x, Header h, const LevelTable& levels) {
  const int top = (1 << levels.bits) - 1;
  const auto at = [&](int i) { return levels.even ? double(i) : double{levels.at[i]}; };
  const double y = std::clamp((double{x} - double{h.low}) / double{h.step}, 0.0, double(top));
  int i = 0;
  while (i + 1 < top && at(i + 1) <= y) ++i;
  return {at(i), at(i + 1), y};
}

Pool pool_of(const BlockCode& code, const Floats& x, DType in, DType out) {
  const CpuKernels& k = best_cpu_kernel();
  const Bytes bytes = as_type(x, in);
  const Floats seen = floats_of(bytes, in);
  std::vector<double> sums(x.size());
  Coded coded;
  for (int s = 0; s < kSeeds; ++s) {
    coded = encode(k, code, bytes, in, derive_seed(99, static_cast<uint64_t>(s), 0, 0));
    const Floats y = floats_of(decode(k, code, coded, out), out);
    for (size_t i = 0; i < y.size(); ++i) sums[i] += double{y[i]} - double{seen[i]};
  }
  Pool pool;
  for (size_t i = 0; i < x.size(); ++i) {
    const Header h = load_header(coded.headers.data(), code.header, code.grid.block_of(static_cast<int64_t>(i)));
    if (h.step == 0) continue;
    const Place place = place_of(seen[i], h, code.levels);
    // Half an ulp of the output: 2^−24, 2^−11 and 2^−8 of what is decoded, at most |x| and one gap of levels.
    const double unit = out == DType::f32 ? 0x1p-24 : out == DType::f16 ? 0x1p-11 : 0x1p-8;
    const double gap = (place.above - place.below) * h.step;
    pool.add(sums[i] / gap, place.variance() * h.step * h.step / (gap * gap), unit * (std::abs(seen[i]) + gap) / gap);
    const double p = place.up();
    if (kSeeds * p * (1 - p) >= 25) pool.add_square(sums[i] / gap, p * (1 - p));
  }
  return pool;
}

void expect_unbiased(const BlockCode& code, const Floats& x, DType in, DType out) {
  SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
  const Pool pool = pool_of(code, x, in, out);
  ASSERT_GT(pool.variance, 0);
  // Noise has 16 bits and rint is off by half of one: at most 2^−16 of a gap a value (theory.md 12 i).
  const double grain = static_cast<double>(x.size()) * kSeeds * 0x1p-16;
  EXPECT_LE(std::abs(pool.error), kZ * std::sqrt(pool.variance) + pool.slack + grain);
  if (out != DType::f32) return;  // rounding of the output adds to χ² what the variance does not know of
  ASSERT_GT(pool.counted, 100);
  // A binomial's z² has variance 2 + (1 − 6pq)/(S·pq) ≤ 2 + 1/25, so √(1.02) of the normal one.
  EXPECT_LE(std::abs(z_of_chi_square(pool.squares, static_cast<double>(pool.counted))), kZ * std::sqrt(1.02));
}

Floats normals(int64_t n, float offset, Random& random) {
  Floats x;
  for (int64_t i = 0; i < n; ++i) x.push_back(random.normal() + offset);
  return x;
}

TEST(Chance, BlockCodeIsUnbiased) {
  Random random(31);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Levels levels : {Levels::even, Levels::optimal}) {
      if (levels == Levels::optimal && (bits < 2 || bits > 4)) continue;
      for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
        for (const int64_t block : {64, 1000}) {
          const BlockCode code = {grid_of(1000, block), header, Rounding::stochastic, levels_of(bits, levels, block)};
          expect_unbiased(code, normals(1000, 0, random), DType::f32, DType::f32);
        }
      }
    }
  }
}

TEST(Chance, TypesAndOffsets) {
  Random random(32);
  for (const DType type : {DType::f16, DType::bf16}) {
    const BlockCode code = {grid_of(1000, 256), HeaderType::bf16, Rounding::stochastic, levels_of(2, Levels::optimal, 256)};
    expect_unbiased(code, normals(1000, 0, random), type, DType::f32);
    expect_unbiased(code, normals(1000, 0, random), type, type);
  }
  for (const float offset : {1.0f, -1.0f, 100.0f, -100.0f, 1000.0f, 10000.0f}) {
    for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
      const BlockCode code = {grid_of(1000, 256), header, Rounding::stochastic, levels_of(2, Levels::optimal, 256)};
      expect_unbiased(code, normals(1000, offset, random), DType::f32, DType::f32);
    }
  }
}

// Nearest is nearest: on even levels no value is off by more than half a step.
TEST(Chance, NearestIsWithinHalfAStep) {
  Random random(33);
  const Floats x = normals(1000, 0, random);
  for (int bits = 1; bits <= 8; ++bits) {
    const BlockCode code = {grid_of(1000, 100), HeaderType::bf16, Rounding::nearest, levels_of(bits, Levels::even, 100)};
    for (const CpuKernels* k : supported_kernels()) {
      const Coded in = encode(*k, code, as_type(x, DType::f32), DType::f32, 0);
      const Floats y = floats_of(decode(*k, code, in, DType::f32), DType::f32);
      for (size_t i = 0; i < x.size(); ++i) {
        const Header h = load_header(in.headers.data(), code.header, static_cast<int64_t>(i) / 100);
        // rint moves 2^16·y by half, arithmetic by a few 2^−24: 2^−16 of a step covers both.
        ASSERT_LE(std::abs(y[i] - x[i]), h.step * (0.5f + 0x1p-16f)) << k->name << ' ' << bits << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
