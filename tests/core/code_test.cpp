#include "satchel/core/code.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "satchel/core/levels.h"

namespace satchel {
namespace {

constexpr uint32_t kNoises = 1u << 16;
constexpr float kMax = std::numeric_limits<float>::max();
const HeaderType kHeaders[] = {HeaderType::bf16, HeaderType::f32};

std::vector<LevelTable> all_tables() {
  std::vector<LevelTable> tables;
  for (int bits = 1; bits <= 8; ++bits) tables.push_back(level_table(bits, Levels::even, 256));
  for (int bits = 2; bits <= 4; ++bits) {
    for (int64_t block : {int64_t{3}, int64_t{256}, int64_t{1} << 40}) tables.push_back(level_table(bits, Levels::optimal, block));
  }
  return tables;
}

int top_of(const LevelTable& t) { return (1 << t.bits) - 1; }
double level(const LevelTable& t, int i) { return t.even ? i : double{t.at[i]}; }

/// How many of the 2^16 noises round y up from `floor`; code_of rises with the noise, so one bisection counts them.
uint32_t ups(float y16, const LevelTable& t, uint32_t floor) {
  uint32_t low = 0, high = kNoises;  // the first noise that rounds up lies in [low, high]
  while (low < high) {
    const uint32_t mid = (low + high) / 2;
    const bool up = code_of(y16, t, mid) > floor;
    (up ? high : low) = up ? mid : mid + 1;
  }
  return kNoises - low;
}

/// What decoding gives on average over all noises.
double mean_decoded(float x, Header h, const LevelTable& t) {
  const float y16 = position(x, make_ruler(h));
  const uint32_t floor = code_of(y16, t, 0), up = ups(y16, t, floor);
  const double below = value_of(floor, h, t);
  return up == 0 ? below : below + (double{value_of(floor + 1, h, t)} - below) * up / kNoises;
}

/// Rounding errors, in 2^16ths of a code, of the fused sum that puts y on uneven levels: half an ulp a constant and a partial sum.
double map_error(double y16, const LevelTable& t) {
  if (t.even) return 0;
  double sum = y16 * t.slope + t.base, error = y16 * t.slope + std::abs(t.base) + std::abs(sum);
  for (int p = 1; p <= (top_of(t) - 1) / 2; ++p) {
    const double term = std::clamp(y16, t.at[p] * 65536.0, t.at[top_of(t) - p] * 65536.0) * t.bend[p];
    sum += term;
    error += std::abs(term) + std::abs(sum);
  }
  return error * 0x1p-24;
}

std::vector<float> positions(const LevelTable& t, std::mt19937& random) {
  const float end = static_cast<float>(top_of(t)) * 65536.0f;
  std::vector<float> y16 = {0.0f, 0.25f, 0.5f, 1.0f, 65535.5f, end, std::nextafter(end, 0.0f)};
  for (int i = 1; i < std::min(top_of(t), 16); ++i) {
    const float mark = static_cast<float>(level(t, i)) * 65536.0f;
    y16.insert(y16.end(), {mark, std::nextafter(mark, 0.0f), std::nextafter(mark, end)});
  }
  std::uniform_real_distribution<float> uniform(0, end);
  for (int i = 0; i < 24; ++i) y16.push_back(uniform(random));
  return y16;
}

// theory.md 12 (i): over all noises the mean code is the number that was rounded, to 2^-16.
TEST(Code, MeanOverAllNoises) {
  std::mt19937 random(7);
  for (const LevelTable& t : all_tables()) {
    for (const float y16 : positions(t, random)) {
      const double y = std::min(y16 / 65536.0, double(top_of(t)));
      int i = 0;
      while (i + 1 < top_of(t) && y >= level(t, i + 1)) ++i;
      const double width = level(t, i + 1) - level(t, i), exact = i + (y - level(t, i)) / width;
      double codes = 0, values = 0;
      uint32_t last = 0;
      for (uint32_t noise = 0; noise < kNoises; ++noise) {
        const uint32_t code = code_of(y16, t, noise);
        ASSERT_GE(code, last) << "rises with the noise";
        last = code;
        codes += code;
        values += level(t, static_cast<int>(code));
      }
      ASSERT_LE(last, static_cast<uint32_t>(top_of(t)));
      // rint moves y on the levels by at most half of 2^-16, the map onto uneven levels by its rounding errors.
      const double bound = std::min((.5 + map_error(y16, t)) / kNoises, 0x1p-16);
      EXPECT_NEAR(codes / kNoises, exact, bound) << t.bits << ' ' << t.even << ' ' << y;
      // A code is worth the width of its segment; at a level the error may fall into the neighbouring one.
      const double wide =
          std::max({width, i > 0 ? level(t, i) - level(t, i - 1) : 0.0, i + 1 < top_of(t) ? level(t, i + 2) - level(t, i + 1) : 0.0});
      EXPECT_NEAR(values / kNoises, y, bound * wide) << t.bits << ' ' << t.even << ' ' << y;
    }
  }
}

TEST(Code, LevelsAreCodedExactly) {
  for (const LevelTable& t : all_tables()) {
    for (int i = 0; i <= top_of(t); ++i) {
      const float y16 = static_cast<float>(level(t, i)) * 65536.0f;
      for (uint32_t noise : {0u, 1u, kNearestNoise, 65535u}) EXPECT_EQ(code_of(y16, t, noise), static_cast<uint32_t>(i)) << t.bits;
    }
  }
}

TEST(Code, NearestIsTheFloorOfAHalfMore) {
  const LevelTable t = level_table(3, Levels::even, 256);
  for (int k = 0; k <= 7 * 65536; k += 97) {
    EXPECT_EQ(code_of(static_cast<float>(k), t, kNearestNoise), static_cast<uint32_t>(std::floor(k / 65536.0 + .5)));
  }
}

TEST(Code, ValuesBeyondTheTopAreClamped) {
  for (const LevelTable& t : all_tables()) {
    EXPECT_EQ(code_of((static_cast<float>(top_of(t)) + 1) * 65536.0f, t, 65535), static_cast<uint32_t>(top_of(t)));
  }
}

TEST(Header, EnclosesItsBlock) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  int made = 0;
  for (int trial = 0; trial < 40000; ++trial) {
    const double scale = std::ldexp(1, static_cast<int>(random() % 250) - 125), offset = trial % 4 == 0 ? 0 : std::exp(normal(random) * 3);
    float a = flush(static_cast<float>(scale * (offset + normal(random)))),
          b = flush(static_cast<float>(scale * (offset + normal(random))));
    if (!is_finite(a) || !is_finite(b)) continue;
    if (a > b) std::swap(a, b);
    const int bits = 1 + static_cast<int>(random() % 8), top = (1 << bits) - 1;
    for (HeaderType type : kHeaders) {
      const Header h = make_header(a, b, true, top, type);
      if (is_poisoned(h)) continue;
      ++made;
      const long double low = h.low, step = h.step, least = a, most = b, span = most - low;
      ASSERT_LE(low, least);
      // The span and its B-th part are each rounded by 2^-24 before the step is rounded up; fp32 steps mend the latter.
      ASSERT_GE(low + top * step, most - span * (type == HeaderType::bf16 ? 0x1p-23L : 0x1p-24L)) << a << ' ' << b;
      // Not wider than it must be: bf16 has 8 bits, so rounding moves a number by less than 2^-7; the least step is 2^-126.
      const long double slack = type == HeaderType::bf16 ? 0x1p-7L : 0x1p-22L;
      ASSERT_GE(low, least - std::abs(least) * (type == HeaderType::bf16 ? 0x1p-7L : 0.0L));
      ASSERT_LE(step, std::max(span / top * (1 + slack) * (1 + 0x1p-22L), 0x1p-126L));
      // What is stored is what was used.
      alignas(8) unsigned char bytes[16] = {};
      store_header(bytes, type, 1, h);
      const Header back = load_header(bytes, type, 1);
      ASSERT_EQ(bits_of(back.low), bits_of(h.low));
      ASSERT_EQ(bits_of(back.step), bits_of(h.step));
    }
  }
  EXPECT_GT(made, 70000);
}

// theory.md 1: residual bias below 1e-6 σ at any offset. Each value's own bias is its place on the grid of 2^16 noises.
TEST(Code, ResidualBias) {
  for (const double offset : {0.0, 1.0, 100.0, -100.0}) {
    for (const HeaderType type : kHeaders) {
      for (const LevelTable& t :
           {level_table(2, Levels::even, 256), level_table(2, Levels::optimal, 256), level_table(4, Levels::optimal, 256)}) {
        std::mt19937 random(11);
        std::normal_distribution<double> normal(offset, 1);
        double bias = 0;
        constexpr int kBlocks = 256, kBlock = 256;
        for (int b = 0; b < kBlocks; ++b) {
          std::vector<float> x(kBlock);
          for (float& v : x) v = static_cast<float>(normal(random));
          const auto [least, most] = std::minmax_element(x.begin(), x.end());
          const Header h = make_header(*least, *most, true, top_of(t), type);
          // Half of 2^-16 by rint and at most as much by the map, times a segment of at most 3 steps; (x − low)/step errs by
          // 3·2^-24 of at most B steps; the decoded value by half an ulp of |x|.
          const double bound = h.step * (3 * 0x1p-16 + 3 * top_of(t) * 0x1p-24) + (std::abs(offset) + 8) * 0x1p-24;
          for (const float v : x) {
            const double error = mean_decoded(v, h, t) - v;
            ASSERT_LE(std::abs(error), bound) << v << " offset " << offset;
            bias += error;
          }
        }
        // 65,536 values, each within ±2^-17 of 2 σ: the mean strays by 2^-16·2/√12/256 = 3.4e-8 σ, one thirtieth of the limit.
        EXPECT_LT(std::abs(bias / (kBlocks * kBlock)), 1e-6) << "offset " << offset;
      }
    }
  }
}

TEST(Header, ZeroRange) {
  const LevelTable t = level_table(2, Levels::even, 256);
  for (const float x : {0.0f, 5.0f, -5.0f, 5.01f, -5.01f, 1e-30f, 0x1p-126f, 3e38f, -3e38f}) {
    for (const HeaderType type : kHeaders) {
      const Header h = make_header(x, x, true, 3, type);
      ASSERT_FALSE(is_poisoned(h)) << x;
      const float decoded = value_of(code_of(position(x, make_ruler(h)), t, 0), h, t);
      // bf16 rounds down by less than 2^-7; fp32 headers and bf16 numbers come back exactly.
      const bool exact = type == HeaderType::f32 || (bits_of(x) & 0xffff) == 0;
      EXPECT_LE(std::abs(decoded - x), exact ? 0.0f : std::abs(x) * 0x1p-7f) << x;
      if (exact) {
        EXPECT_EQ(h.step, 0.0f);
        EXPECT_EQ(code_of(position(x, make_ruler(h)), t, 65535), 0u);
      }
    }
  }
  EXPECT_EQ(bits_of(make_header(flush(-0.0f), flush(-0.0f), true, 3, HeaderType::bf16).low), 0u);
}

TEST(Header, NonFiniteAndOverflowingBlocksDecodeToNaN) {
  const LevelTable t = level_table(2, Levels::optimal, 256);
  const auto expect_poison = [&](Header h, HeaderType type) {
    EXPECT_TRUE(is_poisoned(h));
    alignas(8) unsigned char bytes[8] = {};
    store_header(bytes, type, 0, h);
    for (uint32_t code = 0; code < 4; ++code) EXPECT_EQ(bits_of(value_of(code, load_header(bytes, type, 0), t)), kCanonicalNaN);
    const Ruler r = make_ruler(h);
    EXPECT_LE(code_of(position(1.0f, r), t, 65535), 3u);
  };
  for (const HeaderType type : kHeaders) {
    expect_poison(make_header(0, 1, false, 3, type), type);
    expect_poison(make_header(-3e38f, 3e38f, true, 3, type), type);
    expect_poison(make_header(-kMax, kMax, true, 255, type), type);
  }
  expect_poison(make_header(-kMax, 0, true, 3, HeaderType::bf16), HeaderType::bf16);  // no bf16 below −max
}

TEST(Header, HugeRangesAreFiniteOrPoisoned) {
  for (const HeaderType type : kHeaders) {
    for (int bits = 1; bits <= 8; ++bits) {
      const LevelTable t = level_table(bits, Levels::even, 256);
      for (const float most : {1e38f, 2e38f, 3.3e38f, kMax}) {
        for (const float least : {0.0f, -1e37f, 1e37f, -1e38f}) {
          const Header h = make_header(least, most, true, top_of(t), type);
          if (is_poisoned(h)) continue;
          EXPECT_TRUE(is_finite(value_of(static_cast<uint32_t>(top_of(t)), h, t))) << most;
          EXPECT_NEAR(mean_decoded(most, h, t) / most, 1, 1e-4);
        }
      }
    }
  }
  EXPECT_FALSE(is_poisoned(make_header(-1e38f, 1e38f, true, 3, HeaderType::bf16)));
}

TEST(Header, TinyRanges) {
  const LevelTable t = level_table(2, Levels::even, 256);
  for (const HeaderType type : kHeaders) {
    // A range of one smallest normal: the step is as small as a step can be, and both ends are on it.
    const Header h = make_header(0.0f, 0x1p-126f, true, 3, type);
    EXPECT_EQ(h.step, 0x1p-126f);
    EXPECT_EQ(code_of(position(0x1p-126f, make_ruler(h)), t, 0), 1u);
    EXPECT_EQ(code_of(position(0x1p-126f, make_ruler(h)), t, 65535), 1u);
    EXPECT_EQ(value_of(1, h, t), 0x1p-126f);
    EXPECT_EQ(code_of(position(0x1p-127f, make_ruler(h)), t, 65535), 0u) << "subnormals are zero";
    // Scaling by a power of two changes nothing but the header.
    for (int exponent = -120; exponent <= 120; exponent += 3) {
      const float scale = std::ldexp(1.0f, exponent);
      const Header one = make_header(-1.25f, 2.7f, true, 3, type), scaled = make_header(-1.25f * scale, 2.7f * scale, true, 3, type);
      ASSERT_EQ(one.low * scale, scaled.low) << exponent;
      ASSERT_EQ(one.step * scale, scaled.step) << exponent;
      for (float x : {-1.25f, -.3f, .1f, 1.9f, 2.7f}) {
        ASSERT_EQ(bits_of(position(x, make_ruler(one))), bits_of(position(x * scale, make_ruler(scaled)))) << exponent << ' ' << x;
      }
    }
  }
}

/// All bits that packing and unpacking a tiny block give.
std::vector<uint32_t> trace(const std::vector<float>& x, const LevelTable& t, HeaderType type) {
  std::vector<uint32_t> bits;
  float least = std::numeric_limits<float>::infinity(), most = -least;
  for (const float v : x) {
    least = std::min(least, flush(v));
    most = std::max(most, flush(v));
  }
  const Header h = make_header(least, most, true, top_of(t), type);
  const Ruler r = make_ruler(h);
  bits.insert(bits.end(), {bits_of(h.low), bits_of(h.step)});
  for (const float v : x) {
    for (uint32_t noise : {0u, 12345u, 40000u, 65535u}) {
      const uint32_t code = code_of(position(v, r), t, noise);
      bits.insert(bits.end(), {code, bits_of(value_of(code, h, t))});
    }
  }
  return bits;
}

TEST(Code, NothingDependsOnFtzOrDaz) {
  const unsigned mode = _mm_getcsr();
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 3000; ++trial) {
    // From all subnormal through the borders 2^-126, 2^-64 and 2^-40 to usual numbers.
    const double scale = std::ldexp(1, -149 + trial % 150), offset = trial % 3 == 0 ? 0 : trial % 3 == 1 ? 3 : 1000;
    std::vector<float> x(7);
    for (float& v : x) v = static_cast<float>(scale * (offset + normal(random)));
    if (trial % 5 == 0) x[0] = 0x1p-140f;
    if (trial % 7 == 0) x[1] = -0.0f;
    if (trial % 11 == 0) x[2] = 1e30f;
    for (const LevelTable& t :
         {level_table(2, Levels::even, 256), level_table(3, Levels::optimal, 256), level_table(8, Levels::even, 256)}) {
      for (const HeaderType type : kHeaders) {
        const std::vector<uint32_t> plain = trace(x, t, type);
        _mm_setcsr(mode | 0x8040);
        const std::vector<uint32_t> flushed = trace(x, t, type);
        _mm_setcsr(mode);
        ASSERT_EQ(plain, flushed) << trial;
      }
    }
  }
}

TEST(Code, DecodingToHalfSaturates) {
  const LevelTable t = level_table(1, Levels::even, 2);
  const Header h = make_header(0.0f, 1e6f, true, 1, HeaderType::bf16);
  uint16_t half = 0;
  store(&half, DType::f16, 0, value_of(1, h, t));
  EXPECT_EQ(from_f16(half), 65504.0f);
}

}  // namespace
}  // namespace satchel
