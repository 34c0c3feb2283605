// Bits per sample: bytes against core/code.h value by value, the allocation against all others that a budget allows.
#include <cmath>
#include <limits>
#include <numeric>

#include "satchel/core/allocate.h"
#include "satchel/kernels/cpu/per_sample.h"
#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

PerSampleCode mixed_code(int64_t samples, int64_t values, int64_t block, double mean, HeaderType header = HeaderType::bf16,
                         Rounding rounding = Rounding::stochastic) {
  PerSampleCode code;
  code.samples = samples;
  code.values = values;
  code.block = std::min(block, code.groups() * kGroup);
  code.budget = per_sample_budget(samples, mean);
  code.header = header;
  code.rounding = rounding;
  return code;
}

std::vector<int> shared_bits(const std::vector<double>& squares, int64_t budget, const float* weights = nullptr) {
  const auto n = static_cast<int64_t>(squares.size());
  PerSampleCode code = mixed_code(n, 8, 8, 1);
  code.budget = budget;
  std::vector<uint32_t> shares(squares.size());
  per_sample_allocate(code, squares, weights, shares.data());
  std::vector<int> bits;
  int64_t before = 0;
  for (const uint32_t s : shares) {
    EXPECT_EQ(entry_before(s), before);
    bits.push_back(entry_bits(s));
    before += bits.back();
  }
  EXPECT_EQ(before, budget);
  return bits;
}

/// The least Σ C/(2^b − 1)² of all bits 1 to 8 whose sum is at most the budget.
double best_of_all(const std::vector<double>& c, int64_t budget, size_t from = 0) {
  if (from == c.size()) return 0;
  const auto left = static_cast<int64_t>(c.size() - from - 1);
  double best = std::numeric_limits<double>::infinity();
  for (int b = 1; b <= 8 && b + left <= budget; ++b) {
    const double top = (1 << b) - 1;
    best = std::min(best, c[from] / (top * top) + best_of_all(c, budget - b, from + 1));
  }
  return best;
}

TEST(MixedShare, IsTheBestOfAll) {
  Random random(81);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<double> c(static_cast<size_t>(1 + random.below(4)));
    for (double& v : c) v = random.one_in(6) ? 0 : std::exp(4.0 * random.normal());
    const auto n = static_cast<int64_t>(c.size());
    for (int64_t budget = n; budget <= 8 * n; ++budget) {
      const double best = best_of_all(c, budget);
      // Two sums of at most four numbers in another order: 4 roundings of 2^−53 each.
      EXPECT_NEAR(predicted_variance(c, shared_bits(c, budget)), best, best * 8 * 0x1p-53) << budget;
    }
  }
}

TEST(MixedShare, PredictsWhatAllocateBitsDoes) {
  Random random(82);
  for (const int64_t n : {1, 2, 17, 256}) {
    std::vector<double> c(static_cast<size_t>(n));
    for (double& v : c) v = random.one_in(8) ? 0 : std::exp(3.0 * random.normal());
    const std::vector<int64_t> ones(c.size(), 1);
    for (const double mean : {1.0, 1.5, 2.0, 3.7, 8.0}) {
      const int64_t budget = per_sample_budget(n, mean);
      const Allocation other = allocate_bits(c, ones, budget);
      // Sums of n numbers: n roundings of 2^−53 at most.
      EXPECT_NEAR(predicted_variance(c, shared_bits(c, budget)), other.predicted, other.predicted * 2 * static_cast<double>(n) * 0x1p-53);
    }
  }
}

TEST(MixedShare, EqualOnesGoByIndexAndNothingIsLeftOver) {
  EXPECT_EQ(shared_bits({5, 5, 5, 5}, 10), (std::vector<int>{3, 3, 2, 2}));
  EXPECT_EQ(shared_bits({0, 0, 0, 0}, 10), (std::vector<int>{3, 3, 2, 2}));
  EXPECT_EQ(shared_bits({1, 0}, 16), (std::vector<int>{8, 8}));
  EXPECT_EQ(shared_bits({0, 1, 0}, 12), (std::vector<int>{2, 8, 2}));  // what does not count shares the rest
  const float weights[] = {NAN, -1, INFINITY, 1};                      // senseless ones count for nothing
  EXPECT_EQ(shared_bits({1, 1, 1, 1}, 5, weights), (std::vector<int>{1, 1, 1, 2}));
}

TEST(MixedShare, BudgetIsTheFloorOfTheMean) {
  EXPECT_EQ(per_sample_budget(10, 2.39), 23);
  EXPECT_EQ(per_sample_budget(3, 1.0), 3);
  EXPECT_EQ(per_sample_budget(3, 99.0), 24);
  for (int64_t n = 1; n < 100; ++n) {
    for (double mean = 1; mean <= 8; mean += 0.125)
      EXPECT_LE(static_cast<double>(per_sample_budget(n, mean)), mean * static_cast<double>(n));
  }
}

struct Packed {
  Bytes bytes;
  std::vector<F32Header> ranges;
};

/// All samples in one go, or in pieces of `piece`; into guarded memory.
Packed packed(const PerSampleCode& code, const Bytes& x, DType type, uint64_t seed, int64_t piece) {
  Guarded bytes(code.total());
  std::vector<F32Header> ranges(static_cast<size_t>(code.samples * code.blocks()));
  std::vector<double> squares(static_cast<size_t>(code.samples));
  const auto in_pieces = [&](const auto& run) {
    for (int64_t n = 0; n < code.samples; n += piece) run(n, std::min(code.samples, n + piece));
  };
  in_pieces([&](int64_t first, int64_t last) { per_sample_measure(code, {x.data(), type}, ranges.data(), squares.data(), first, last); });
  per_sample_allocate(code, squares, nullptr, reinterpret_cast<uint32_t*>(bytes.data() + code.entries_at()));
  in_pieces([&](int64_t first, int64_t last) {
    per_sample_encode(code, {x.data(), type}, seed, ranges.data(), bytes.data(), first, last);
  });
  EXPECT_TRUE(bytes.intact()) << "wrote past the bytes";
  return {bytes.bytes(), ranges};
}

Bytes unpacked(const PerSampleCode& code, const Bytes& bytes, DType type, int64_t first, int64_t last) {
  Guarded out((last - first) * code.values * size_of(type));
  per_sample_decode(code, bytes.data(), out.data(), type, first, first, last);
  EXPECT_TRUE(out.intact()) << "wrote past the values";
  return out.bytes();
}

/// Codes and values as core/code.h has them; the bits are those of the shares.
void compare(const PerSampleCode& code, const Bytes& x, DType type, uint64_t seed) {
  const Packed p = packed(code, x, type, seed, code.samples);
  ASSERT_EQ(packed(code, x, type, seed, 2).bytes, p.bytes);
  Bytes expected(p.bytes.size());
  std::copy(p.bytes.begin() + code.entries_at(), p.bytes.end(), expected.begin() + code.entries_at());
  Floats values;
  for (int64_t n = 0; n < code.samples; ++n) {
    uint32_t share;
    std::memcpy(&share, &p.bytes[static_cast<size_t>(code.entries_at() + 4 * n)], 4);
    LevelTable levels;
    levels.bits = entry_bits(share);
    for (int64_t v = 0; v < code.values; ++v) {
      const int64_t block = n * code.blocks() + v / code.block;
      const F32Header r = p.ranges[static_cast<size_t>(block)];
      const Header h = per_sample_header({r.low, r.step}, levels.bits, code.header);
      store_header(&expected[static_cast<size_t>(code.headers_at())], code.header, block, h);
      const auto element = static_cast<uint64_t>(n * code.groups() * kGroup + v);
      const uint32_t u = code.rounding == Rounding::nearest ? kNearestNoise : noise(seed, Stream::rounding, element);
      const float in = load(x.data(), type, n * code.values + v);
      const uint32_t c = is_poisoned(h) ? 0 : code_of(position(in, make_ruler(h)), levels, u);
      put_code(&expected[static_cast<size_t>(code.unit() * entry_before(share))], levels.bits, v, c);
      values.push_back(value_of(c, h, levels));
    }
  }
  ASSERT_EQ(p.bytes, expected);
  for (const DType out : {type, DType::f32}) {
    const Bytes all = as_type(values, out);
    ASSERT_EQ(unpacked(code, p.bytes, out, 0, code.samples), all);
    const int64_t first = code.samples / 3, last = code.samples - code.samples / 4;
    ASSERT_EQ(unpacked(code, p.bytes, out, first, last), slice(all, out, first * code.values, last * code.values));
  }
}

TEST(Mixed, CodesEverySampleAsItsBitsSay) {
  Random random(83);
  for (const int64_t values : {1, 3, 7, 8, 9, 63, 64, 65, 127, 256, 257, 300, 1000}) {
    for (const int64_t samples : {1, 2, 5, 33}) {
      for (const int64_t block : {8, 64, 96, 256, 1024}) {
        const double mean = 1 + 7 * random.uniform();
        const DType type = random.pick(kTypes);
        const auto code = mixed_code(samples, values, block, mean, random.one_in(2) ? HeaderType::bf16 : HeaderType::f32,
                                     random.one_in(3) ? Rounding::nearest : Rounding::stochastic);
        SCOPED_TRACE(std::to_string(samples) + " x " + std::to_string(values) + ", block " + std::to_string(block) + ", mean " +
                     std::to_string(mean) + " " + name_of(type));
        compare(code, as_type(mixed_values(samples * values, random), type), type, random.bits());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Mixed, WiderSamplesGetMoreBits) {
  Random random(84);
  const auto code = mixed_code(4, 512, 256, 2);
  Floats x(2048);
  for (size_t i = 0; i < x.size(); ++i) x[i] = random.normal() * (i < 512 ? 100.0f : 1.0f);
  const Packed p = packed(code, as_type(x, DType::f32), DType::f32, 1, 4);
  const auto* shares = reinterpret_cast<const uint32_t*>(p.bytes.data() + code.entries_at());
  // C of sample 0 is about 10^4 times the others': 10^4·gain(4) = 34 > gain(1) = 8/9, so all four spare bits are its own.
  EXPECT_EQ(entry_bits(shares[0]), 5);
  EXPECT_EQ(entry_bits(shares[1]) + entry_bits(shares[2]) + entry_bits(shares[3]), 3);
}

TEST(Mixed, NonFiniteValuesPoisonTheirBlockAlone) {
  Random random(85);
  const auto code = mixed_code(3, 520, 256, 2);
  Floats x = mixed_values(3 * 520, random);
  x[520 + 300] = NAN;     // sample 1, block 1
  x[2 * 520] = INFINITY;  // sample 2, block 0
  const Packed p = packed(code, as_type(x, DType::f32), DType::f32, 7, 3);
  const Floats y = floats_of(unpacked(code, p.bytes, DType::f32, 0, 3), DType::f32);
  for (int64_t i = 0; i < 3 * 520; ++i) {
    const int64_t n = i / 520, b = i % 520 / 256;
    ASSERT_EQ(std::isnan(y[static_cast<size_t>(i)]), (n == 1 && b == 1) || (n == 2 && b == 0)) << i;
  }
}

TEST(Mixed, HugeAndTinyRangesAreSharedOutAlike) {
  for (const float scale : {1e-44f, 1e-30f, 1.0f, 1e38f}) {
    Random random(86);
    const auto code = mixed_code(4, 64, 64, 2.5);
    Floats x(256);
    for (float& v : x) v = static_cast<float>(random.uniform()) * scale;
    compare(code, as_type(x, DType::f32), DType::f32, 9);
  }
}

}  // namespace
}  // namespace satchel::test
