// The side codes: the same bytes on every kernel, the exact mask, and what happens at the edges.
#include <cfloat>
#include <cmath>
#include <limits>

#include "tests/kernels/side_common.h"

namespace satchel::test {
namespace {

constexpr int64_t kBlocks[] = {1, 3, 49, 64, 100, 256, 1000};
constexpr int64_t kLengths[] = {0, 1, 7, 8, 63, 64, 65, 129, 1000, 3001};

/// Encodes with every kernel, decodes with every kernel, all the same as scalar.
void compare_all(const SideCode& code, const Channel* channels, const Bytes& x, DType in, DType out, uint64_t seed) {
  SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
  const Coded truth = encode(kScalar, code, channels, x, in, seed);
  const Bytes values = decode(kScalar, code, channels, truth, out);
  for (const CpuKernels* a : supported_kernels()) {
    const Coded own = encode(*a, code, channels, x, in, seed);
    ASSERT_EQ(own.headers, truth.headers) << a->name;
    ASSERT_EQ(own.codes, truth.codes) << a->name;
    for (const CpuKernels* b : supported_kernels()) {
      for (const bool streaming : {false, true}) {
        ASSERT_EQ(decode(*b, code, channels, own, out, streaming), values)
            << "encoded by " << a->name << ", decoded by " << b->name << (streaming ? ", past the caches" : "");
      }
    }
  }
}

/// Decodes any codes at all, those that no value gets included, with every kernel: the same as scalar.
void compare_any_codes(const SideCode& code, const Channel* channels, Coded coded, DType out, Random& random) {
  for (uint8_t& byte : coded.codes) byte = static_cast<uint8_t>(random.bits());
  const Bytes values = decode(kScalar, code, channels, coded, out);
  for (const CpuKernels* k : supported_kernels()) {
    ASSERT_EQ(decode(*k, code, channels, coded, out), values) << k->name << ' ' << describe(code, out);
  }
}

TEST(SideKernels, SameBytesForEveryShape) {
  Random random(41);
  for (const SideForm& form : kForms) {
    for (const int64_t inner : {1, 3, 64, 100}) {
      for (const int64_t channel_count : {1, 3, 16, 128, 200}) {
        for (const int64_t length : kLengths) {
          const SideCode code = side_code(form, length, random.pick(kBlocks), channel_count, inner, random);
          const std::vector<Channel> channels = channels_of(channel_count, random);
          const DType in = random.pick(kTypes), out = random.pick(kTypes);
          const Bytes x = as_type(mixed_values(length, random), in);
          compare_all(code, form.side == Side::relu ? nullptr : channels.data(), x, in, out, random.bits());
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Where every γ is positive and finite and every threshold inside the block's range, kernels take a shorter way, for as many tiles as a
// block or a channel's run has; those with thresholds at the range's ends, just beyond them or far outside, or with one channel that falls,
// is flat or is no number, give the same bytes as well.
TEST(SideKernels, SameBytesWhereThresholdsLieInsideTheRange) {
  Random random(50);
  for (int trial = 0; trial < 700; ++trial) {
    const SideForm form = kForms[trial % std::size(kForms)];
    const int64_t counts[] = {1, 40, 64, 100, 192}, inners[] = {1, 1, 70, 300};
    const int64_t count = random.pick(counts), length = 1 + random.below(2000);
    const SideCode code = side_code(form, length, random.one_in(2) ? 256 : random.pick(kBlocks), count, random.pick(inners), random);
    std::vector<Channel> channels;
    for (int64_t c = 0; c < count; ++c) {
      const float gamma = 0.5f + std::abs(random.normal());
      channels.push_back(channel_of(gamma, random.one_in(4) ? 0.0f : 0.3f * gamma * random.normal(), random.normal()));
    }
    Channel& odd = channels[static_cast<size_t>(random.below(count))];
    const float ends[] = {-2.0f, 2.0f, std::nextafterf(2.0f, 3.0f), std::nextafterf(-2.0f, -3.0f), 1.0f, -1.3f, 1e-40f, 1e30f};
    if (random.one_in(2)) odd = channel_of(1.0f, -random.pick(ends), 0.5f);
    const float gammas[] = {-1.0f, 0.0f, INFINITY, NAN};
    if (random.one_in(8)) odd = {random.one_in(2) ? 0.1f : NAN, random.pick(gammas), 0.25f, 0.5f};
    Floats x;
    for (int64_t i = 0; i < length; ++i) x.push_back(random.one_in(30) ? random.normal() * 0x1p-128f : random.normal());
    for (float& v : x) v = std::clamp(v, -2.0f, 2.0f);
    const DType in = random.pick(kTypes), out = random.pick(kTypes);
    const Channel* own = form.side == Side::relu ? nullptr : channels.data();
    const uint64_t seed = random.bits();
    compare_all(code, own, as_type(x, in), in, out, seed);
    compare_any_codes(code, own, encode(kScalar, code, own, as_type(x, in), in, seed), out, random);
    if (HasFatalFailure()) return;
  }
}

// In a poisoned block codes still tell what passed, NaN included, whole or part of a tile, on either side of any threshold.
TEST(SideKernels, SameCodesInPoisonedBlocks) {
  Random random(53);
  for (int trial = 0; trial < 140; ++trial) {
    const SideForm form = kForms[trial % std::size(kForms)];
    const SideCode code = side_code(form, 1 + random.below(700), random.pick(kBlocks), 16, 1, random);
    const std::vector<Channel> channels = channels_of(16, random);
    Floats x = mixed_values(code.grid.values, random);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (float& v : x) v = random.one_in(40) ? random.pick(bad) : v;
    const DType in = random.pick(kTypes), out = random.pick(kTypes);
    compare_all(code, form.side == Side::relu ? nullptr : channels.data(), as_type(x, in), in, out, random.bits());
    if (HasFatalFailure()) return;
  }
}

TEST(SideKernels, PiecesAndOriginsGiveTheSameBytes) {
  Random random(42);
  for (int trial = 0; trial < 140; ++trial) {
    const SideForm form = kForms[trial % std::size(kForms)];
    const int64_t count = random.one_in(2) ? 13 : 128, inner = random.one_in(2) ? 1 : 1 + random.below(5);  // 128: two whole tiles
    const SideCode code = side_code(form, 1 + random.below(2000), random.pick(kBlocks), count, inner, random);
    const std::vector<Channel> made = channels_of(count, random);
    const Channel* channels = form.side == Side::relu ? nullptr : made.data();
    const DType type = random.pick(kTypes);
    const int64_t n = code.grid.values, cut = random.below(n) / 8 * 8;
    const Bytes x = as_type(mixed_values(n, random), type), left = slice(x, type, 0, cut), right = slice(x, type, cut, n);
    const Coded truth = encode(kScalar, code, channels, x, type, 8);
    const Bytes values = decode(kScalar, code, channels, truth, type);
    SCOPED_TRACE(describe(code, type));
    for (const CpuKernels* k : supported_kernels()) {
      const Coded own = coded(
          code,
          [&](void* headers) {
            k->side_measure(code, {x.data(), type}, headers, 0, code.grid.blocks());
          },
          [&](void* headers, uint8_t* codes) {
            k->side_encode(code, {right.data(), type, cut}, channels, 8, headers, codes, cut, n);
            k->side_encode(code, {left.data(), type}, channels, 8, headers, codes, 0, cut);
          });
      ASSERT_EQ(own, truth) << k->name;
      Guarded back((n - cut) * size_of(type));
      k->side_decode(code, truth.codes.data(), channels, truth.headers.data(), {back.data(), type, cut}, cut, n);
      ASSERT_TRUE(back.intact()) << k->name;
      ASSERT_EQ(back.bytes(), slice(values, type, cut, n)) << k->name;
    }
  }
}

/// A block of values of one side, each within 3 ulps of where its own noise lets it gain a level.
Floats cliff(const SideCode& code, const Channel& c, Range r, uint64_t seed, Random& random) {
  Floats x = {r.low, r.high};
  for (int64_t i = 2; i < code.grid.values; ++i) {
    const bool on = code.table.off == 1 || random.one_in(2);
    const Stretch s = stretch_of(on, c, r);
    const float* levels =
        on ? (s.is_long ? code.table.on_long : code.table.on_short) : (s.is_long ? code.table.off_long : code.table.off_short);
    const int64_t below = random.below((on ? code.table.on : code.table.off) - 1);
    const float mark = levels[below] * s.length, next = levels[below + 1] * s.length;
    const float d = fmaf(uniform_of(noise(seed, Stream::rounding, static_cast<uint64_t>(i))), next - mark, mark);
    float v = s.up ? s.from + d : s.from - d;
    for (int64_t steps = random.below(4); steps > 0; --steps) v = std::nextafterf(v, random.one_in(2) ? r.high : r.low);
    x.push_back(std::clamp(v, r.low, r.high));
  }
  return x;
}

TEST(SideKernels, SameCodesWithinAnUlpOfTheCliff) {
  Random random(48);
  for (int trial = 0; trial < 140; ++trial) {
    const SideForm form = kForms[trial % std::size(kForms)];
    const SideCode code = {grid_of(1000, 1000), HeaderType::f32, Rounding::stochastic,
                           side_table(form.bits, form.side, Levels::optimal, 1000)};
    const float gamma = random.one_in(2) ? 1.5f : -0.7f;
    const Channel c = form.side == Side::relu ? relu_channel() : channel_of(gamma, random.normal() * 0.3f, 0.0f);
    const uint64_t seed = random.bits();
    const Range r = {form.side == Side::relu ? 0.0f : -2.5f - std::abs(random.normal()), 2.5f + std::abs(random.normal())};
    const Bytes x = as_type(cliff(code, c, r, seed, random), DType::f32);
    compare_all(code, form.side == Side::relu ? nullptr : &c, x, DType::f32, DType::f32, seed);
    if (HasFatalFailure()) return;
  }
}

// A product of two floats is exact in double and a sum keeps its sign, so fma(γ, x, β) > 0 can be had without an fma.
TEST(SideKernels, CodesTellTheExactMask) {
  Random random(43);
  for (const SideForm& form : kForms) {
    const SideCode code = side_code(form, 4000, 256, 16, 1, random);
    const std::vector<Channel> channels = form.side == Side::relu ? std::vector<Channel>(16, relu_channel()) : channels_of(16, random);
    Floats x = mixed_values(4000, random);
    for (size_t i = 0; i < x.size(); i += 3) {  // within 2 ulps of the threshold
      const float t = channels[i % 16].threshold;
      if (!is_finite(t) || std::abs(t) > 100) continue;
      x[i] = t;
      for (int64_t steps = random.below(3); steps > 0; --steps) x[i] = std::nextafterf(x[i], random.one_in(2) ? 1e9f : -1e9f);
      x[i] = flush(x[i]);
    }
    for (const CpuKernels* k : supported_kernels()) {
      const Coded own = encode(*k, code, form.side == Side::relu ? nullptr : channels.data(), as_type(x, DType::f32), DType::f32, 5);
      for (size_t i = 0; i < x.size(); ++i) {
        const Channel& c = channels[i % 16];
        const bool on = double{c.gamma} * double{x[i]} + double{c.beta} > 0;
        const uint32_t got = get_code(own.codes.data(), form.bits, static_cast<int64_t>(i));
        ASSERT_EQ(got >= static_cast<uint32_t>(code.table.off), on) << k->name << ' ' << i << ' ' << x[i];
      }
    }
  }
}

TEST(SideKernels, PoisonedBlocksDecodeToCanonicalNaN) {
  Random random(44);
  for (const SideForm& form : kForms) {
    const SideCode code = side_code(form, 400, 70, 16, 1, random);
    const std::vector<Channel> made = channels_of(16, random);
    const Channel* channels = form.side == Side::relu ? nullptr : made.data();
    const Floats good = mixed_values(400, random);
    for (const float bad : {NAN, INFINITY, -INFINITY, FLT_MAX}) {
      Floats x = good;
      x[140] = bad;
      if (bad == FLT_MAX) x[141] = -FLT_MAX;  // the range overflows
      for (const CpuKernels* k : supported_kernels()) {
        const Coded clean = encode(*k, code, channels, as_type(good, DType::f32), DType::f32, 5);
        const Coded own = encode(*k, code, channels, as_type(x, DType::f32), DType::f32, 5);
        const Floats y = floats_of(decode(*k, code, channels, own, DType::f32), DType::f32);
        const Floats unhurt = floats_of(decode(*k, code, channels, clean, DType::f32), DType::f32);
        for (size_t i = 0; i < y.size(); ++i) {
          ASSERT_EQ(bits_of(y[i]), i / 70 == 2 ? kCanonicalNaN : bits_of(unhurt[i])) << k->name << ' ' << i;
        }
      }
    }
  }
}

#ifdef __x86_64__
// As long as no difference of two numbers of a block, nor a level of a side, is itself subnormal.
TEST(SideKernels, FlushingSubnormalsChangesNothing) {
  Random random(47);
  for (const SideForm& form : kForms) {
    const SideCode code = side_code(form, 3000, 100, 16, 1, random);
    const std::vector<Channel> made = channels_of(16, random);
    const Channel* channels = form.side == Side::relu ? nullptr : made.data();
    Floats x = mixed_values(3000, random);
    for (float& v : x) v = random.one_in(8) ? random.normal() * 0x1p-128f : v;  // most of them subnormal
    for (const DType type : kTypes) {
      const Bytes in = as_type(x, type);
      for (const CpuKernels* k : supported_kernels()) {
        const Coded usual = encode(*k, code, channels, in, type, 5);
        Coded flushed;
        Bytes values;
        {
          const Flushing on;
          flushed = encode(*k, code, channels, in, type, 5);
          values = decode(*k, code, channels, usual, type);
        }
        ASSERT_EQ(flushed, usual) << k->name << ' ' << describe(code, type);
        ASSERT_EQ(values, decode(*k, code, channels, usual, type)) << k->name << ' ' << describe(code, type);
      }
    }
  }
}
#endif

// A mean that is not finite shows as NaN, the same on every kernel and in every type.
TEST(SideKernels, OffMeansComeBack) {
  Random random(45);
  const SideCode code = side_code({2, Side::one_sided}, 400, 100, 6, 1, random);
  const float means[] = {-0.25f, INFINITY, -INFINITY, float_of(0xffc12345), 1e-40f, -0.0f};
  std::vector<Channel> channels;
  for (const float mean : means) channels.push_back({0.0f, 1.0f, 0.0f, mean});
  const Bytes x = as_type(mixed_values(400, random), DType::f32);
  for (const DType type : kTypes) {
    Bytes want(static_cast<size_t>(6 * size_of(type)));
    for (int c = 0; c < 6; ++c) store(want.data(), type, c, c == 0 ? -0.25f : c <= 3 ? float_of(kCanonicalNaN) : 0.0f);
    for (const CpuKernels* k : supported_kernels()) {
      const Coded own = encode(*k, code, channels.data(), x, DType::f32, 5);
      const Bytes y = decode(*k, code, channels.data(), own, type);
      for (int64_t i = 0; i < 400; ++i) {
        if (get_code(own.codes.data(), 2, i) != 0) continue;
        ASSERT_EQ(slice(y, type, i, i + 1), slice(want, type, i % 6, i % 6 + 1)) << k->name << ' ' << name_of(type) << ' ' << i;
      }
    }
  }
}

TEST(SideKernels, OffSumsAreTheChannelsOffValues) {
  Random random(46);
  const SideCode code = side_code({2, Side::one_sided}, 3000, 256, 7, 3, random);
  std::vector<Channel> channels = channels_of(7, random);
  for (const DType type : kTypes) {
    const Bytes x = as_type(mixed_values(3000, random), type);
    const Floats seen = floats_of(x, type);
    std::vector<double> got(14), want(14), total(14);
    off_sums(code, {x.data(), type}, channels.data(), got.data(), 0, 1000);
    const Bytes later = slice(x, type, 1000, 3000);
    off_sums(code, {later.data(), type, 1000}, channels.data(), got.data(), 1000, 3000);
    for (size_t i = 0; i < seen.size(); ++i) {
      const size_t c = i / 3 % 7;
      const float v = flush(seen[i]);
      if (double{channels[c].gamma} * double{v} + double{channels[c].beta} > 0) continue;
      want[2 * c] += v;
      total[2 * c] += std::abs(v);
      want[2 * c + 1] += 1;
    }
    for (size_t c = 0; c < 7; ++c) {
      EXPECT_EQ(got[2 * c + 1], want[2 * c + 1]);
      // Any order of at most 3000 additions in double: 3000·2^−53 of the sum of magnitudes.
      EXPECT_LE(std::abs(got[2 * c] - want[2 * c]), total[2 * c] * 3000 * 0x1p-53);
    }
  }
}

// The order of the additions is part of the definition: every kernel gives the same doubles, from any piece.
TEST(SideKernels, OffSumsAreTheSameOnEveryKernel) {
  Random random(49);
  for (const int64_t inner : {1, 2, 15, 16, 17, 40, 3136}) {
    for (const int64_t count : {1, 3, 15, 16, 17, 31, 64, 77, 256, 1000}) {
      const int64_t n = random.below(3 * inner * count) % 20000 + 1;
      const SideCode code = side_code({2, Side::one_sided}, n, 256, count, inner, random);
      const std::vector<Channel> made = channels_of(count, random);
      const Channel* channels = random.one_in(8) ? nullptr : made.data();
      const DType type = random.pick(kTypes);
      Floats values = mixed_values(n, random);
      for (float& v : values) v = random.one_in(20) ? v * 0x1p-126f : v;
      const Bytes x = as_type(values, type);
      const int64_t cut = random.below(n);
      const Bytes later = slice(x, type, cut, n);
      std::vector<double> want(static_cast<size_t>(2 * count));
      off_sums(code, {x.data(), type}, channels, want.data(), 0, cut);
      off_sums(code, {x.data(), type}, channels, want.data(), cut, n);
      for (const CpuKernels* k : supported_kernels()) {
        std::vector<double> got(want.size());
        k->off_sums(code, {x.data(), type}, channels, got.data(), 0, cut);
        k->off_sums(code, {later.data(), type, cut}, channels, got.data(), cut, n);
        ASSERT_EQ(got, want) << k->name << ' ' << describe(code, type) << ", cut at " << cut;
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
