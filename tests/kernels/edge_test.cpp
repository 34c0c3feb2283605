// The edge cases of theory.md 1: what is not finite, has no range, or stands at an end of the number line.
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 70;  // no multiple of 8, 16 or 64

uint32_t canonical_nan(DType type) { return type == DType::f32 ? 0x7fc00000u : type == DType::f16 ? 0x7e00u : 0x7fc0u; }

uint32_t raw(const Bytes& x, DType type, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, x.data() + i * size_of(type), static_cast<size_t>(size_of(type)));
  return bits;
}

BlockCode code_for(int64_t values, int bits = 2, HeaderType header = HeaderType::bf16, int64_t block = kBlock) {
  return {grid_of(values, block), header, Rounding::stochastic, levels_of(bits, Levels::optimal, block)};
}

Floats normals(int64_t n, Random& random, float scale = 1, float offset = 0) {
  Floats x;
  for (int64_t i = 0; i < n; ++i) x.push_back(random.normal() * scale + offset);
  return x;
}

/// Calls f(kernel, code, what x decodes to as f32) for every kernel, for 1 to 8 bits and both headers.
void for_all(const Floats& x, const std::function<void(const CpuKernels&, const BlockCode&, const Floats&)>& f) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
      const BlockCode code = code_for(static_cast<int64_t>(x.size()), bits, header);
      SCOPED_TRACE(describe(code, DType::f32));
      for (const CpuKernels* k : supported_kernels()) {
        const Coded in = encode(*k, code, as_type(x, DType::f32), DType::f32, 5);
        EXPECT_EQ(in, encode(kScalar, code, as_type(x, DType::f32), DType::f32, 5)) << k->name;
        f(*k, code, floats_of(decode(*k, code, in, DType::f32), DType::f32));
      }
    }
  }
}

// One bad value poisons its block, all of it, and nothing else.
TEST(Edge, NotFiniteDecodesToCanonicalNaN) {
  Random random(21);
  const Floats good = normals(5 * kBlock, random);
  const float bads[] = {kInf, -kInf, float_of(0x7fc00000), float_of(0xffc12345), float_of(0x7f800001), float_of(0xff812345)};
  for (const float bad : bads) {
    for (const int64_t at : {int64_t{140}, int64_t{141}, int64_t{175}, int64_t{209}}) {
      for (const DType type : kTypes) {
        Floats poisoned = good;
        poisoned[static_cast<size_t>(at)] = bad;
        const BlockCode code = code_for(5 * kBlock, static_cast<int>(at % 8) + 1);
        for (const CpuKernels* k : supported_kernels()) {
          const Bytes clean = decode(*k, code, encode(*k, code, as_type(good, type), type, 5), type);
          const Bytes own = decode(*k, code, encode(*k, code, as_type(poisoned, type), type, 5), type);
          for (int64_t i = 0; i < 5 * kBlock; ++i) {
            const uint32_t want = i / kBlock == 2 ? canonical_nan(type) : raw(clean, type, i);
            ASSERT_EQ(raw(own, type, i), want) << k->name << ' ' << bad << " at " << at << ", value " << i;
          }
        }
      }
    }
  }
}

TEST(Edge, OverflowingRangeIsPoison) {
  Random random(22);
  Floats x = normals(3 * kBlock, random);
  x[75] = FLT_MAX;
  x[76] = -FLT_MAX;
  for_all(x, [](const CpuKernels& k, const BlockCode&, const Floats& y) {
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(std::isnan(y[i]), i / kBlock == 1) << k.name << ' ' << i;
      EXPECT_TRUE(!std::isnan(y[i]) || bits_of(y[i]) == kCanonicalNaN) << k.name << ' ' << i;
    }
  });
}

// Half of FLT_MAX on both sides is a range that fits: it must come back, within one step.
TEST(Edge, HugeRangeIsNot) {
  Random random(23);
  Floats x = normals(kBlock, random, 0x1p124f);
  x[5] = FLT_MAX * 0.49f;
  x[6] = -FLT_MAX * 0.49f;
  for_all(x, [&](const CpuKernels& k, const BlockCode& code, const Floats& y) {
    // Levels are at most 2.2 even steps apart (4 bits, the outermost segment); bf16 rounds low and step by 2^−7 each.
    const double step = FLT_MAX * 0.98 / ((1 << code.levels.bits) - 1) * 2.2 * 1.02 + FLT_MAX * 0x1p-8;
    for (size_t i = 0; i < y.size(); ++i) ASSERT_LE(std::abs(double{y[i]} - double{x[i]}), step) << k.name << ' ' << i;
  });
}

TEST(Edge, ZeroRangeDecodesToLow) {
  for (const float v : {0.0f, 1.0f, -1.5f, 3.14159f, -3.14159f, 0x1p-126f, -0x1p-126f, 1e30f, 65504.0f}) {
    for_all(Floats(2 * kBlock + 3, v), [&](const CpuKernels& k, const BlockCode& code, const Floats& y) {
      const bool exact = code.header == HeaderType::f32 || (bits_of(v) & 0xffff) == 0;
      for (const float back : y) {
        if (exact) {
          ASSERT_EQ(bits_of(back), bits_of(v)) << k.name;
        } else {
          // low lies at most one bf16 ulp, 2^−7 of v, below v; the step that remains brings some codes back up.
          ASSERT_LE(std::abs(back - v), std::abs(v) * 0x1p-7f) << k.name << ' ' << v;
        }
      }
    });
  }
}

TEST(Edge, SubnormalsAndMinusZeroArePlusZero) {
  Floats x(3 * kBlock, -0.0f);
  for (size_t i = 0; i < kBlock; ++i) x[i] = float_of((i % 2 != 0 ? 0x80000000u : 0u) | static_cast<uint32_t>(1 + i * 100000));
  for_all(x, [](const CpuKernels& k, const BlockCode&, const Floats& y) {
    for (const float v : y) ASSERT_EQ(bits_of(v), 0u) << k.name;
  });
}

// Ranges around 2^−126: steps are at least 2^−126, so nothing comes back further off than that, and nothing subnormal.
TEST(Edge, TinyRanges) {
  Random random(24);
  for (const float scale : {0x1p-126f, 0x1.8p-126f, 0x1p-125f, 0x1p-120f, 0x1p-110f}) {
    Floats x;
    for (int64_t i = 0; i < 2 * kBlock; ++i) x.push_back(static_cast<float>(random.below(5) - 2) * scale);
    for (int64_t i = 0; i < kBlock; ++i) x.push_back(scale * (1.0f + static_cast<float>(random.below(9)) * 0x1p-23f));
    for_all(x, [&](const CpuKernels& k, const BlockCode& code, const Floats& y) {
      for (size_t i = 0; i < y.size(); ++i) {
        ASSERT_EQ(bits_of(y[i]), bits_of(flush(y[i]))) << k.name;
        // The range is at most 4·scale, levels are at most 2.2 even steps apart, and bf16 widens a step by 2^−7.
        const float step = std::max(4 * scale / static_cast<float>((1 << code.levels.bits) - 1), 0x1p-126f) * 2.3f;
        ASSERT_LE(std::abs(y[i] * 0x1p30f - flush(x[i]) * 0x1p30f), step * 0x1p30f) << k.name << ' ' << i;
      }
    });
  }
}

// The header is made so that the guards never bite: least and most of a block stand on the ruler, however far from 0.
TEST(Edge, OffsetsStayOnTheRuler) {
  Random random(25);
  for (const float offset : {0.0f, 1.0f, 100.0f, 1000.0f, 10000.0f, -100.0f, -10000.0f}) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const HeaderType type : {HeaderType::bf16, HeaderType::f32}) {
        const Floats x = normals(256, random, 1, offset);
        const auto [least, most] = std::minmax_element(x.begin(), x.end());
        const int top = (1 << bits) - 1;
        const Header h = make_header(*least, *most, true, top, type);
        EXPECT_LE(h.low, *least);
        // step ≥ (most − low)/B up to the rounding of one subtraction and one division: 2^−24 each.
        EXPECT_GE(double{h.step} * top, (double{*most} - double{h.low}) * (1 - 0x1p-23));
        EXPECT_GE(position(*least, make_ruler(h)), 0.0f);
        EXPECT_LE(position(*most, make_ruler(h)), static_cast<float>(top) * 65536.0f * (1 + 0x1p-22f));
        // bf16: low drops by at most 2^−7 of it, the step grows by at most 2^−7 of it.
        const double slack = type == HeaderType::bf16 ? std::abs(*least) * 0x1p-7 : 0;
        EXPECT_LE(double{h.step} * top, (double{*most} - double{*least} + slack) * (1 + 0x1p-7 + 0x1p-20));
      }
    }
  }
}

class EachEdge : public EachKernel {};
EACH_KERNEL(EachEdge);

TEST_P(EachEdge, HalfSaturates) {
  const CpuKernels* const k = GetParam();
  Floats x(kBlock, 0.0f);
  x[3] = 1e5f;
  x[4] = -1e5f;
  const BlockCode code = code_for(kBlock, 8, HeaderType::f32);
  {
    const Bytes y = decode(*k, code, encode(*k, code, as_type(x, DType::f32), DType::f32, 5), DType::f16);
    EXPECT_EQ(raw(y, DType::f16, 3), 0x7bffu) << k->name;
    EXPECT_EQ(raw(y, DType::f16, 4), 0xfbffu) << k->name;
  }
  // bf16 would round 2^128·(1 − 2^−24) to infinity; it stays the largest finite one.
  const Floats huge(kBlock, FLT_MAX);
  {
    const Bytes y = decode(*k, code, encode(*k, code, as_type(huge, DType::f32), DType::f32, 5), DType::bf16);
    EXPECT_EQ(raw(y, DType::bf16, 3), 0x7f7fu) << k->name;
  }
}

#ifdef __x86_64__
TEST(Edge, FlushingSubnormalsChangesNothing) {
  Random random(26);
  Floats x;
  for (int power = -149; power <= 126; power += 5) {  // each block around one power of two, the next around another
    const Floats block = normals(kBlock, random, std::ldexp(1.0f, power), power % 2 != 0 ? std::ldexp(3.0f, power) : 0.0f);
    x.insert(x.end(), block.begin(), block.end());
  }
  for (int i = 0; i < kBlock; ++i) x.push_back(std::ldexp(random.normal(), static_cast<int>(random.below(250)) - 130));
  for (const DType type : kTypes) {
    const Bytes in = as_type(x, type);
    for (int bits = 1; bits <= 8; ++bits) {
      const BlockCode code = code_for(static_cast<int64_t>(x.size()), bits, bits % 2 != 0 ? HeaderType::bf16 : HeaderType::f32);
      for (const CpuKernels* k : supported_kernels()) {
        const Coded usual = encode(*k, code, in, type, 5);
        Coded flushed;
        Bytes values;
        {
          const Flushing on;
          flushed = encode(*k, code, in, type, 5);
          values = decode(*k, code, usual, type);
        }
        ASSERT_EQ(flushed, usual) << k->name << ' ' << describe(code, type);
        ASSERT_EQ(values, decode(*k, code, usual, type)) << k->name << ' ' << describe(code, type);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace satchel::test
