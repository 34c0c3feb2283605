#include "satchel/core/side.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "satchel/core/levels.h"

namespace satchel {
namespace {

constexpr uint32_t kNoises = 1u << 16;

std::vector<SideTable> all_tables() {
  std::vector<SideTable> tables;
  for (const Levels levels : {Levels::even, Levels::optimal}) {
    for (const int bits : {2, 3}) {
      tables.push_back(side_table(bits, Side::one_sided, levels, 256));
      tables.push_back(side_table(bits, Side::relu, levels, 256));
    }
    for (const int bits : {2, 3, 4}) tables.push_back(side_table(bits, Side::both, levels, 256));
  }
  return tables;
}

Channel channel(float gamma, float beta, float off_mean = -0.7f) { return {gamma == 0 ? 0 : -beta / gamma, gamma, beta, off_mean}; }

double mean_decoded(float x, const Channel& c, Range r, const SideTable& t) {
  double sum = 0;
  for (uint32_t noise = 0; noise < kNoises; ++noise) sum += side_value_of(side_code_of(x, c, r, t, noise), c, r, t);
  return sum / kNoises;
}

TEST(Side, UniformIsTheMiddleOfItsCell) {
  for (uint32_t noise = 0; noise < kNoises; ++noise) ASSERT_EQ(uniform_of(noise), (noise + .5) / 65536);
}

// The mask is what the forward ReLU did, to the last bit: fma(γ, x, β) > 0, next to the threshold above all.
TEST(Side, MaskIsExact) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const std::vector<SideTable> tables = all_tables();
  int on_count = 0, off_count = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const Channel c = trial % 10 == 0 ? channel(0, normal(random)) : channel(normal(random), normal(random));
    const Range r = make_range(-4.0f, 4.0f, true, HeaderType::bf16);
    float x = normal(random);
    if (trial % 2 == 0 && std::abs(c.threshold) < 3) x = float_of(bits_of(c.threshold) + random() % 5 - 2);
    if (!is_finite(x) || std::abs(x) > 4) continue;
    const bool on = std::fma(double{c.gamma}, double{x}, double{c.beta}) > 0;  // products of floats are exact in double
    const SideTable& t = tables[static_cast<size_t>(trial) % tables.size()];
    for (const uint32_t noise : {0u, 1u, 30000u, 65535u}) {
      const uint32_t code = side_code_of(x, c, r, t, noise);
      ASSERT_EQ(code >= static_cast<uint32_t>(t.off), on) << c.gamma << ' ' << c.beta << ' ' << x;
      ASSERT_LT(code, 1u << t.bits);
    }
    (on ? on_count : off_count) += 1;
  }
  EXPECT_GT(on_count, 5000);
  EXPECT_GT(off_count, 5000);
}

// Over all noises the mean is x on every side that has levels.
TEST(Side, UnbiasedOverAllNoises) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-2.5f, 3.1f);
  const Channel channels[] = {channel(1, 0), channel(.8f, -.4f), channel(-1.3f, .5f), channel(1, 2.4f), channel(0, 1), channel(0, -1)};
  for (const SideTable& t : all_tables()) {
    for (const Channel& c : channels) {
      const Range r = make_range(-2.5f, 3.1f, true, HeaderType::bf16);
      for (int i = 0; i < 5; ++i) {
        const float x = i == 0 ? 3.1f : i == 1 ? -2.5f : uniform(random);
        const bool on = is_on(x, c);
        const double mean = mean_decoded(x, c, r, t);
        if (!on && t.off == 1) {
          EXPECT_EQ(mean, c.off_mean);
          continue;
        }
        // Up iff (noise + ½)/2^16·width < d − base: the count is right to half a noise, one more where a product rounds; a
        // segment is no longer than the range. Three roundings of numbers below 8 stand in d, base and the decoded value.
        const double length = stretch_of(on, c, r).length;
        EXPECT_NEAR(mean, x, length * (0x1p-17 + 0x1p-24) + 3 * 8 * 0x1p-24) << t.bits << ' ' << c.gamma << ' ' << c.beta;
      }
    }
  }
}

TEST(Side, CodesAreInOrderOfTheValues) {
  const Range r = make_range(-3.0f, 3.0f, true, HeaderType::bf16);
  const Channel c = channel(1, .5f, -1.0f);
  for (const SideTable& t : all_tables()) {
    for (uint32_t code = 1; code < 1u << t.bits; ++code) {
      // Two neighbours may be equal only at the threshold, which both sides hold.
      const float before = side_value_of(code - 1, c, r, t), value = side_value_of(code, c, r, t);
      if (code == static_cast<uint32_t>(t.off) && t.off > 1) {
        EXPECT_EQ(before, value);
        EXPECT_EQ(value, c.threshold);
      } else {
        EXPECT_LT(before, value) << t.bits << ' ' << code;
      }
    }
    EXPECT_EQ(side_value_of((1u << t.bits) - 1, c, r, t), r.high);
    EXPECT_EQ(side_value_of(0, c, r, t), t.off == 1 ? c.off_mean : r.low);
  }
}

TEST(Side, NegativeGammaMirrors) {
  const Range r{-3.0f, 3.0f};
  const Channel up = channel(1, .5f), down = channel(-1, .5f);
  for (const SideTable& t : all_tables()) {
    if (t.off == 1) continue;
    for (float x = -3.0f; x <= 3.0f; x += .171f) {
      for (uint32_t noise : {0u, 20000u, 65535u}) {
        const uint32_t code = side_code_of(x, up, r, t, noise);
        EXPECT_EQ(side_code_of(-x, down, r, t, noise), code);
        EXPECT_EQ(side_value_of(code, down, r, t), -side_value_of(code, up, r, t));
      }
    }
  }
}

TEST(Side, LongSidesUseTheLevelsOfABlock) {
  const SideTable t = side_table(3, Side::one_sided, Levels::optimal, 256);
  const Range r{-4.0f, 4.0f};
  // Of a range of 8 the on side is 4, 6.25 or 7.5 long: the border is 6.4.
  for (const float threshold : {0.0f, -2.25f, -3.5f}) {
    const Channel c = channel(1, -threshold);
    const float length = 4.0f - threshold;
    const float* want = threshold == -3.5f ? t.on_long : t.on_short;
    for (int i = 0; i < t.on; ++i)
      EXPECT_EQ(side_value_of(static_cast<uint32_t>(t.off + i), c, r, t), std::fma(want[i], length, threshold));
  }
  EXPECT_NE(t.on_short[1], t.on_long[1]);
}

TEST(Side, EmptySideDecodesToTheThreshold) {
  // The threshold lies beyond the block, so it is clamped to its end and one side has no length.
  const Range r{1.0f, 2.0f};
  for (const SideTable& t : all_tables()) {
    const Channel beyond{2.5f, 1.0f, -1.5f, 0.0f};  // fma(1, 2, −1.5) > 0 although t says otherwise
    for (uint32_t noise : {0u, 1u, 65535u}) EXPECT_EQ(side_value_of(side_code_of(2.0f, beyond, r, t, noise), beyond, r, t), 2.0f);
  }
  const Range point = make_range(1.0f, 1.0f, true, HeaderType::bf16);
  for (const SideTable& t : all_tables()) {
    EXPECT_EQ(side_value_of(side_code_of(1.0f, channel(1, 0), point, t, 65535), channel(1, 0), point, t), 1.0f);
  }
}

TEST(Side, ReluKeepsZerosExactly) {
  const Channel c = relu_channel();
  for (const int bits : {2, 3}) {
    const SideTable t = side_table(bits, Side::relu, Levels::optimal, 256);
    const Range r = make_range(0.0f, 2.0f, true, HeaderType::bf16);
    for (const float x : {0.0f, -0.0f, 0x1p-140f}) {
      EXPECT_EQ(side_code_of(x, c, r, t, 65535), 0u);
      EXPECT_EQ(bits_of(side_value_of(0, c, r, t)), 0u);
    }
    for (const float x : {0x1p-126f, 1e-6f, 1.0f, 2.0f}) {
      for (uint32_t noise : {0u, 65535u}) EXPECT_GE(side_code_of(x, c, r, t, noise), 1u) << x;
    }
    EXPECT_EQ(side_code_of(2.0f, c, r, t, 65535), (1u << bits) - 1);
  }
}

TEST(Side, RangesEncloseAndPoison) {
  for (const HeaderType type : {HeaderType::bf16, HeaderType::f32}) {
    const Range r = make_range(-1.001f, 3.001f, true, type);
    EXPECT_LE(r.low, -1.001f);
    EXPECT_GE(r.high, 3.001f);
    alignas(8) unsigned char bytes[16] = {};
    for (const Range bad : {make_range(0, 1, false, type), make_range(-3e38f, 3e38f, true, type)}) {
      EXPECT_TRUE(is_poisoned(bad));
      store_range(bytes, type, 1, bad);
      for (const SideTable& t : all_tables()) {
        for (uint32_t code = 0; code < 1u << t.bits; ++code) {
          EXPECT_EQ(bits_of(side_value_of(code, relu_channel(), load_range(bytes, type, 1), t)), kCanonicalNaN);
        }
      }
    }
    store_range(bytes, type, 1, r);
    EXPECT_EQ(load_range(bytes, type, 1).low, r.low);
    EXPECT_EQ(load_range(bytes, type, 1).high, r.high);
  }
  EXPECT_TRUE(is_poisoned(make_range(0, 3.4e38f, true, HeaderType::bf16)));
}

TEST(Side, NearestTakesTheNearerLevel) {
  const SideTable t = side_table(3, Side::one_sided, Levels::even, 256);
  const Range r{-5.0f, 5.0f};
  const Channel c = channel(1, 0);
  // Levels 0, 1, …, 5, each rounded by at most 2^-13 of 5; the noise 2^15 stands for ½ + 2^-17.
  constexpr float kRounded = 5 * 0x1p-13f;
  for (float x = 0.01f; x < 5.0f; x += .013f) {
    if (std::abs(x - std::floor(x) - .5f) < kRounded + 0x1p-16f) continue;
    EXPECT_NEAR(side_value_of(side_code_of(x, c, r, t, kNearestNoise), c, r, t), std::nearbyint(x), kRounded) << x;
  }
}

// Sides of at least 2^-100 give the same bits whatever FTZ and DAZ say; x itself may be subnormal.
TEST(Side, DoesNotDependOnFtzOrDaz) {
  const unsigned mode = _mm_getcsr();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto trace = [](float x, const Channel& c, Range r, const SideTable& t) {
    std::vector<uint32_t> bits;
    for (uint32_t noise : {0u, 3u, 33333u, 65535u}) {
      const uint32_t code = side_code_of(x, c, r, t, noise);
      bits.insert(bits.end(), {code, bits_of(side_value_of(code, c, r, t))});
    }
    return bits;
  };
  for (const SideTable& t : all_tables()) {
    for (int trial = 0; trial < 1000; ++trial) {
      const float scale = std::ldexp(1.0f, -98 + trial % 100);
      const Range r = make_range(-2.0f * scale, 3.0f * scale, true, HeaderType::bf16);
      const Channel c = trial % 2 == 0 ? relu_channel() : channel(1, .3f * scale);
      const float x = trial % 10 == 0 ? 0x1p-130f : std::clamp(normal(random), -2.0f, 3.0f) * scale;
      const std::vector<uint32_t> plain = trace(x, c, r, t);
      _mm_setcsr(mode | 0x8040);
      const std::vector<uint32_t> flushed = trace(x, c, r, t);
      _mm_setcsr(mode);
      ASSERT_EQ(plain, flushed) << trial;
    }
  }
}

}  // namespace
}  // namespace satchel
