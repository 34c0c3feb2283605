#include "satchel/core/number.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <cmath>
#include <limits>
#include <random>

namespace satchel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// A half by its definition.
double half_value(uint32_t h) {
  const int exponent = static_cast<int>(h >> 10 & 31);
  const double fraction = h & 0x3ff;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Number, EveryHalfRoundTrips) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float x = from_f16(static_cast<uint16_t>(h));
    if ((h & 0x7c00) != 0x7c00) {
      ASSERT_EQ(x, half_value(h)) << h;
      ASSERT_EQ(to_f16(x), h);
    } else if ((h & 0x3ff) == 0) {
      ASSERT_EQ(x, (h & 0x8000) != 0 ? -kInf : kInf);
      ASSERT_EQ(to_f16(x), h);
    } else {
      ASSERT_TRUE(std::isnan(x));
      ASSERT_EQ(to_f16(x), 0x7e00);
    }
  }
}

TEST(Number, EveryBf16RoundTrips) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float x = from_bf16(static_cast<uint16_t>(h));
    ASSERT_EQ(bits_of(x), h << 16);
    if (std::isnan(x)) {
      ASSERT_EQ(to_bf16(x), 0x7fc0);
      continue;
    }
    ASSERT_EQ(to_bf16(x), h);
    if (!is_finite(x)) continue;
    ASSERT_EQ(bf16_down(x), h);
    ASSERT_EQ(bf16_up(x), h);
  }
}

// Between two neighbouring halves: everything below the middle goes down, above it up, the middle to the even one.
TEST(Number, HalvesRoundToNearestEven) {
  for (uint32_t h = 0; h < 0x7bff; ++h) {
    const float middle = static_cast<float>((half_value(h) + half_value(h + 1)) / 2);  // exact: 12 significant bits
    for (uint32_t sign : {0u, 0x8000u}) {
      const float m = sign != 0 ? -middle : middle;
      ASSERT_EQ(to_f16(m), sign | (h % 2 == 0 ? h : h + 1)) << h;
      ASSERT_EQ(to_f16(std::nextafter(m, 0.0f)), sign | h) << h;
      ASSERT_EQ(to_f16(std::nextafter(m, sign != 0 ? -kInf : kInf)), sign | (h + 1)) << h;
    }
  }
}

TEST(Number, HalvesSaturate) {
  for (float x : {65504.0f, 65519.9f, 65520.0f, 70000.0f, 1e30f, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(to_f16(x), 0x7bff) << x;
    EXPECT_EQ(to_f16(-x), 0xfbff) << x;
  }
  EXPECT_EQ(to_f16(kInf), 0x7c00);
  EXPECT_EQ(to_f16(-kInf), 0xfc00);
  EXPECT_EQ(to_f16(-std::numeric_limits<float>::quiet_NaN()), 0x7e00);
  EXPECT_EQ(to_f16(0x1p-149f), 0);
  EXPECT_EQ(to_f16(-0.0f), 0x8000);
}

TEST(Number, Bf16RoundsToNearestEvenAndSaturates) {
  for (uint32_t h = 0; h < 0x7f7f; ++h) {
    const uint32_t middle = (h << 16) | 0x8000;
    for (uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t top = sign >> 16;
      ASSERT_EQ(to_bf16(float_of(sign | middle)), top | (h % 2 == 0 ? h : h + 1));
      ASSERT_EQ(to_bf16(float_of(sign | (middle - 1))), top | h);
      ASSERT_EQ(to_bf16(float_of(sign | (middle + 1))), top | (h + 1));
    }
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()), 0x7f7f);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::max()), 0xff7f);
  EXPECT_EQ(to_bf16(kInf), 0x7f80);
  EXPECT_EQ(to_bf16(-kInf), 0xff80);
}

TEST(Number, DirectedRoundingEncloses) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = float_of(random());
    if (!is_finite(x)) continue;
    const float down = from_bf16(bf16_down(x)), up = from_bf16(bf16_up(x));
    ASSERT_LE(down, x);
    ASSERT_GE(up, x);
    // The enclosing pair are neighbours: their bits differ by one unit of bf16, or x is a bf16 itself.
    const int64_t distance = std::abs(int64_t{bits_of(up)} - int64_t{bits_of(down)});
    ASSERT_EQ(distance, (bits_of(x) & 0xffff) == 0 ? 0 : 0x10000);
  }
  EXPECT_EQ(from_bf16(bf16_down(-std::numeric_limits<float>::max())), -kInf);
  EXPECT_EQ(from_bf16(bf16_up(std::numeric_limits<float>::max())), kInf);
  EXPECT_EQ(bf16_down(0x1p-149f), 0);
  EXPECT_EQ(bf16_up(-0x1p-149f), 0x8000);
}

TEST(Number, FlushAndFiniteLookAtBits) {
  EXPECT_EQ(bits_of(flush(-0.0f)), 0u);
  EXPECT_EQ(bits_of(flush(0x1p-127f)), 0u);
  EXPECT_EQ(bits_of(flush(-0x1.fffffcp-127f)), 0u);
  EXPECT_EQ(flush(0x1p-126f), 0x1p-126f);
  EXPECT_EQ(flush(-0x1p-126f), -0x1p-126f);
  EXPECT_TRUE(std::isnan(flush(float_of(kCanonicalNaN))));
  for (uint32_t bits : {0x7f800000u, 0xff800000u, kCanonicalNaN, 0x7f800001u, 0xffffffffu}) EXPECT_FALSE(is_finite(float_of(bits)));
  for (uint32_t bits : {0u, 1u, 0x7f7fffffu, 0xff7fffffu}) EXPECT_TRUE(is_finite(float_of(bits)));
}

TEST(Number, LoadAndStoreAgreeWithTheirTypes) {
  float f[2] = {};
  uint16_t h[2] = {};
  store(f, DType::f32, 1, 1.0f / 3);
  EXPECT_EQ(load(f, DType::f32, 1), 1.0f / 3);
  store(h, DType::f16, 1, 1e9f);
  EXPECT_EQ(load(h, DType::f16, 1), 65504.0f);
  store(h, DType::bf16, 0, 1.0f / 3);
  EXPECT_EQ(load(h, DType::bf16, 0), 0x1.56p-2f);
  EXPECT_EQ(h[1], 0x7bff);
  EXPECT_EQ(size_of(DType::f32) + size_of(DType::f16) + size_of(DType::bf16), 8);
}

TEST(Number, HalvesDoNotDependOnFtzOrDaz) {
  const unsigned mode = _mm_getcsr();
  for (uint32_t h = 0; h < 65536; ++h) {
    const volatile uint16_t in = static_cast<uint16_t>(h);
    const uint32_t plain = bits_of(from_f16(in));
    _mm_setcsr(mode | 0x8040);
    const uint32_t flushed = bits_of(from_f16(in));
    const uint16_t back = to_f16(float_of(flushed));
    _mm_setcsr(mode);
    ASSERT_EQ(plain, flushed) << h;
    ASSERT_EQ(back, to_f16(float_of(plain))) << h;
  }
}

}  // namespace
}  // namespace satchel
