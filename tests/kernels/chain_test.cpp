// Affine, activation and dropout: near the formula in double, the same bits on every kernel, the right share dropped.
#include <cmath>

#include "tests/kernels/side_common.h"

namespace satchel::test {
namespace {

constexpr int64_t kLengths[] = {0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 511, 513, 1000, 4099};
constexpr int64_t kChannels[] = {1, 2, 3, 8, 40, 63, 64, 65, 100, 128, 300, 5000};
constexpr uint32_t kDrops[] = {0, 0, 1, 13107, 32768, 65535};
constexpr float kSlopes[] = {0.0f, 0.01f, 1.0f, -0.5f};
constexpr int64_t kOrigins[] = {0, 8, 64, 8 * 1234567, int64_t{1} << 40};

struct Case {
  Chain chain;
  Floats x, gamma, beta;
  Bytes on;
  uint64_t seed;

  const float* gammas() const { return gamma.empty() ? nullptr : gamma.data(); }
  const float* betas() const { return beta.empty() ? nullptr : beta.data(); }
  const uint8_t* bits() const { return on.empty() ? nullptr : on.data(); }
  float scale_of(int64_t c) const { return gamma.empty() ? 1.0f : gamma[static_cast<size_t>(c)]; }
  float shift_of(int64_t c) const { return beta.empty() ? 0.0f : beta[static_cast<size_t>(c)]; }
  std::string describe() const {
    std::ostringstream text;
    text << chain.values << " values, " << chain.channels << " channels, origin " << chain.origin << ", drop " << chain.drop << ", slope "
         << chain.slope << (gamma.empty() ? "" : ", affine") << (on.empty() ? "" : ", given bits");
    return text.str();
  }
};

Case case_of(int64_t values, Random& random) {
  Case c;
  c.chain.values = values;
  c.chain.channels = random.pick(kChannels);
  c.chain.slope = random.pick(kSlopes);
  c.chain.drop = random.pick(kDrops);
  c.chain.scale = 65536.0f / (65536.0f - static_cast<float>(c.chain.drop));
  c.chain.origin = random.pick(kOrigins);
  c.x = mixed_values(values, random);
  if (random.one_in(2)) {
    for (int64_t i = 0; i < c.chain.channels; ++i) {
      c.gamma.push_back(random.one_in(9) ? 0.0f : random.normal());
      c.beta.push_back(random.one_in(9) ? 0.0f : random.normal());
    }
  }
  if (random.one_in(2)) {
    c.on.resize(static_cast<size_t>(ceil_div(values, 8)));
    for (uint8_t& b : c.on) b = static_cast<uint8_t>(random.bits());
  }
  c.seed = random.bits();
  return c;
}

/// The whole range, or pieces that meet at multiples of 8.
template <class Run>
void in_pieces(int64_t values, Random* random, const Run& run) {
  for (int64_t first = 0, last; first < values; first = last) {
    last = random == nullptr ? values : std::min(values, first + 8 * (1 + random->below(20)));
    run(first, last);
  }
}

Bytes forward(const CpuKernels& k, const Case& c, Random* random = nullptr) {
  Guarded z(c.chain.values * 4);
  in_pieces(c.chain.values, random, [&](int64_t first, int64_t last) {
    k.chain(c.chain, c.x.data(), c.gammas(), c.betas(), c.bits(), c.seed, reinterpret_cast<float*>(z.data()), first, last);
  });
  EXPECT_TRUE(z.intact()) << k.name;
  return z.bytes();
}

Bytes backward(const CpuKernels& k, const Case& c, Random* random = nullptr) {
  Guarded out(c.chain.values * 4);
  in_pieces(c.chain.values, random, [&](int64_t first, int64_t last) {
    k.chain_back(c.chain, c.x.data(), c.bits(), c.seed, reinterpret_cast<float*>(out.data()), first, last);
  });
  EXPECT_TRUE(out.intact()) << k.name;
  return out.bytes();
}

Bytes on_bits(const CpuKernels& k, const Case& c, Random* random = nullptr) {
  Guarded on(ceil_div(c.chain.values, 8));
  in_pieces(c.chain.values, random,
            [&](int64_t first, int64_t last) { k.chain_on(c.chain, c.x.data(), c.gammas(), c.betas(), on.data(), first, last); });
  EXPECT_TRUE(on.intact()) << k.name;
  return on.bytes();
}

bool bit(const Bytes& bits, int64_t i) { return (bits[static_cast<size_t>(i / 8)] >> (i % 8) & 1) != 0; }

TEST(ChainKernels, IsTheFormulaInDouble) {
  Random random(81);
  for (int trial = 0; trial < 400; ++trial) {
    const Case c = case_of(random.pick(kLengths), random);
    SCOPED_TRACE(c.describe());
    const Floats z = floats_of(forward(kScalar, c), DType::f32), back = floats_of(backward(kScalar, c), DType::f32);
    const Bytes positive = on_bits(kScalar, c);
    for (int64_t i = 0; i < c.chain.values; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t n = c.chain.origin + i, channel = n % c.chain.channels;
      // The product of two floats is exact in double, so y has the sign that it has in exact arithmetic.
      const double y = double{c.scale_of(channel)} * double{c.x[at]} + double{c.shift_of(channel)};
      const bool kept = c.chain.drop == 0 || noise(c.seed, Stream::dropout, static_cast<uint64_t>(n)) >= c.chain.drop;
      const auto factor = [&](bool on) { return kept ? (on ? 1.0 : double{c.chain.slope}) * double{c.chain.scale} : 0.0; };
      const double expected = y * factor(c.on.empty() ? y > 0 : bit(c.on, i));
      // y, slope·scale and their product are rounded once each, by 2^−24; a fourth covers their products.
      ASSERT_NEAR(z[at], expected, 4 * 0x1p-24 * std::abs(expected)) << i;
      const double g = double{c.x[at]} * factor(c.on.empty() || bit(c.on, i));
      ASSERT_NEAR(back[at], g, 3 * 0x1p-24 * std::abs(g)) << i;  // without y's
      ASSERT_EQ(bit(positive, i), y > 0) << i;
    }
    const int in_last = static_cast<int>(c.chain.values % 8);
    ASSERT_TRUE(in_last == 0 || positive.back() >> in_last == 0) << "bits past the end";
  }
}

class EachChainKernel : public EachKernel {};
EACH_KERNEL(EachChainKernel);

TEST_P(EachChainKernel, HasTheScalarBitsInAnyPieces) {
  const CpuKernels* const k = GetParam();
  Random random(82);
  for (int trial = 0; trial < 600; ++trial) {
    const Case c = case_of(random.pick(kLengths), random);
    SCOPED_TRACE(c.describe() + " on " + k->name);
    Random* pieces = random.one_in(2) ? &random : nullptr;
    ASSERT_EQ(forward(*k, c, pieces), forward(kScalar, c));
    ASSERT_EQ(backward(*k, c, pieces), backward(kScalar, c));
    ASSERT_EQ(on_bits(*k, c, pieces), on_bits(kScalar, c));
  }
}

/// A chunk in a buffer of its own, with its origin, gives the whole tensor's values.
TEST_P(EachChainKernel, ChunksAreThePartsOfTheWhole) {
  const CpuKernels* const k = GetParam();
  Random random(83);
  for (int trial = 0; trial < 60; ++trial) {
    const Case whole = case_of(4099, random);
    const int64_t from = 8 * random.below(500), to = std::min<int64_t>(4099, from + random.below(300));
    Case part = whole;
    part.chain.values = to - from;
    part.chain.origin += from;
    part.x.assign(whole.x.begin() + from, whole.x.begin() + to);
    if (!whole.on.empty()) part.on.assign(whole.on.begin() + from / 8, whole.on.begin() + ceil_div(to, 8));
    ASSERT_EQ(forward(*k, part), slice(forward(*k, whole), DType::f32, from, to)) << whole.describe();
    ASSERT_EQ(backward(*k, part), slice(backward(*k, whole), DType::f32, from, to)) << whole.describe();
  }
}

TEST_P(EachChainKernel, OutputsMayBeTheirInputs) {
  const CpuKernels* const k = GetParam();
  Random random(84);
  for (const int64_t length : kLengths) {
    const Case c = case_of(length, random);
    Floats z = c.x, out = c.x;
    k->chain(c.chain, z.data(), c.gammas(), c.betas(), c.bits(), c.seed, z.data(), 0, length);
    k->chain_back(c.chain, out.data(), c.bits(), c.seed, out.data(), 0, length);
    EXPECT_EQ(as_type(z, DType::f32), forward(kScalar, c)) << k->name;
    EXPECT_EQ(as_type(out, DType::f32), backward(kScalar, c)) << k->name;
  }
}

TEST_P(EachChainKernel, NotANumberAndInfinityStayVisible) {
  const CpuKernels* const k = GetParam();
  for (const uint32_t drop : {0u, 32768u}) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      Case c;
      c.chain = {130, 1, 0.0f, drop, 2.0f, 0};
      c.x.assign(130, bad);
      c.on.assign(17, 0x5a);
      c.seed = 7;
      for (const float v : floats_of(forward(*k, c), DType::f32)) ASSERT_FALSE(is_finite(v)) << k->name;
      for (const float v : floats_of(backward(*k, c), DType::f32)) ASSERT_FALSE(is_finite(v)) << k->name;
      c.on.clear();
      for (const float v : floats_of(forward(*k, c), DType::f32)) ASSERT_FALSE(is_finite(v)) << k->name;
    }
  }
}

TEST_P(EachChainKernel, ZerosArePositive) {
  const CpuKernels* const k = GetParam();
  Case c;
  c.chain = {130, 1, 0.0f, 32768, 2.0f, 0};
  for (int i = 0; i < 130; ++i) c.x.push_back(i % 2 == 0 ? -1.0f : -0.0f);
  c.seed = 3;
  for (const float v : floats_of(forward(*k, c), DType::f32)) ASSERT_EQ(satchel::bits_of(v), 0u) << k->name;
}

TEST(ChainKernels, DropsItsShareIndependentlyOfRounding) {
  constexpr int64_t kValues = 1 << 20;
  for (const uint32_t drop : {655u, 19661u, 32768u, 58982u}) {
    Case c;
    c.chain = {kValues, 64, 0.0f, drop, 1.0f, 0};
    c.x.assign(kValues, 1.0f);
    c.seed = 11;
    const Floats z = floats_of(forward(best_cpu_kernel(), c), DType::f32);
    int64_t dropped = 0, agree = 0;
    for (int64_t i = 0; i < kValues; ++i) {
      const bool gone = z[static_cast<size_t>(i)] == 0.0f;
      dropped += gone ? 1 : 0;
      agree += gone == (noise(c.seed, Stream::rounding, static_cast<uint64_t>(i)) < drop) ? 1 : 0;
    }
    // Binomial counts: mean n·p, variance n·p·(1 − p).
    const double p = drop / 65536.0, both = p * p + (1 - p) * (1 - p), n = double(kValues);
    EXPECT_LT(std::abs(double(dropped) - n * p) / std::sqrt(n * p * (1 - p)), kZ) << drop;
    EXPECT_LT(std::abs(double(agree) - n * both) / std::sqrt(n * both * (1 - both)), kZ) << drop;
  }
}

TEST_P(EachChainKernel, SideOnIsEveryCodeFromOffUp) {
  const CpuKernels* const k = GetParam();
  Random random(85);
  for (const SideForm& form : kForms) {
    for (const int64_t length : kLengths) {
      SideCode code = side_code(form, length, 256, 1, 1, random);
      if (random.one_in(4)) code.table.off = static_cast<int>(1 + random.below(3));  // any number of off codes, not only powers of two
      Bytes codes(static_cast<size_t>(code_bytes(length, form.bits)));
      for (uint8_t& b : codes) b = static_cast<uint8_t>(random.bits());
      Guarded on(ceil_div(length, 8));
      in_pieces(length, random.one_in(2) ? &random : nullptr,
                [&](int64_t first, int64_t last) { k->side_on(code, codes.data(), on.data(), first, last); });
      Bytes expected(static_cast<size_t>(ceil_div(length, 8)));
      for (int64_t i = 0; i < length; ++i) {
        if (get_code(codes.data(), form.bits, i) >= static_cast<uint32_t>(code.table.off))
          expected[static_cast<size_t>(i / 8)] |= uint8_t(1 << i % 8);
      }
      ASSERT_EQ(on.bytes(), expected) << k->name << ", " << length << " codes of " << form.bits << " bits, " << code.table.off << " off";
      ASSERT_TRUE(on.intact()) << k->name;
    }
  }
}

/// What the code remembers is what the chain computes.
TEST(SideOn, IsTheChainsOwnMask) {
  Random random(86);
  for (const SideForm& form : kForms) {
    Case c;
    c.chain.values = 3001;
    c.x = mixed_values(3001, random);
    if (form.side != Side::relu) {
      c.chain.channels = 40;
      for (int i = 0; i < 40; ++i) {
        c.gamma.push_back(random.normal());
        c.beta.push_back(random.normal());
      }
    }
    std::vector<Channel> channels;
    for (size_t i = 0; i < c.gamma.size(); ++i) channels.push_back(channel_of(c.gamma[i], c.beta[i], 0.0f));
    const SideCode code = side_code(form, 3001, 256, c.chain.channels, 1, random);
    const Coded coded = encode(kScalar, code, form.side == Side::relu ? nullptr : channels.data(), as_type(c.x, DType::f32), DType::f32, 5);
    Guarded on(ceil_div(3001, 8));
    best_cpu_kernel().side_on(code, coded.codes.data(), on.data(), 0, 3001);
    EXPECT_EQ(on.bytes(), on_bits(best_cpu_kernel(), c)) << describe(code, DType::f32);
  }
}

}  // namespace
}  // namespace satchel::test
