// Unbiasedness of the side codes: of the on side in every form, of both sides in the form that promises it.
#include <cmath>

#include "tests/kernels/side_common.h"

namespace satchel::test {
namespace {

constexpr int kSeeds = 64;
constexpr int64_t kValues = 4096, kChannels = 16;

/// Variance of one value in units of its own gap: p(1 − p), and the gap; 0 where the side has no length.
struct Gap {
  double width = 0, variance = 0;
};

Gap gap_of(float x, bool on, const Channel& c, Range r, const SideTable& table) {
  const bool flat = c.gamma == 0, up = flat || on != (c.gamma < 0);
  const double t = flat ? r.low : std::clamp(c.threshold, r.low, r.high);
  const double length = up ? r.high - t : t - r.low;
  if (length <= 0) return {};
  const bool is_long = static_cast<float>(length) > 0.8f * (r.high - r.low);
  const float* levels = on ? (is_long ? table.on_long : table.on_short) : (is_long ? table.off_long : table.off_short);
  const int count = on ? table.on : table.off;
  const double d = std::clamp((up ? x - t : t - x) / length, 0.0, 1.0);
  int i = 0;
  while (i + 2 < count && levels[i + 1] <= d) ++i;
  const double width = double{levels[i + 1]} - double{levels[i]}, p = (d - levels[i]) / width;
  return {width * length, p * (1 - p)};
}

/// Pooled error of one side, in gaps.
struct Pool {
  double error = 0, variance = 0;
  int64_t values = 0;
};

void expect_unbiased(const Pool& pool, const char* side) {
  ASSERT_GT(pool.values, 1000) << side;
  // Noise of 16 bits: at most 2^−17 of a gap a value; a threshold rounded to fp32 and the arithmetic on top of it: less
  // than that again.
  const double grain = static_cast<double>(pool.values) * kSeeds * 0x1p-16;
  EXPECT_LE(std::abs(pool.error), kZ * std::sqrt(pool.variance) + grain) << side;
}

void pool_sides(const SideCode& code, const Channel* channels, const Floats& x, Pool& on_pool, Pool& off_pool) {
  const CpuKernels& k = best_cpu_kernel();
  const Bytes bytes = as_type(x, DType::f32);
  std::vector<double> sums(x.size());
  Coded own;
  for (int s = 0; s < kSeeds; ++s) {
    own = encode(k, code, channels, bytes, DType::f32, derive_seed(7, static_cast<uint64_t>(s), 0, 0));
    const Floats y = floats_of(decode(k, code, channels, own, DType::f32), DType::f32);
    for (size_t i = 0; i < y.size(); ++i) sums[i] += double{y[i]} - double{x[i]};
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const Channel c = channels == nullptr ? relu_channel() : channels[i % kChannels];
    const bool on = double{c.gamma} * double{x[i]} + double{c.beta} > 0;
    if (!on && code.table.off == 1) continue;
    const Gap gap =
        gap_of(x[i], on, c, load_range(own.headers.data(), code.header, code.grid.block_of(static_cast<int64_t>(i))), code.table);
    if (gap.width == 0) continue;
    Pool& pool = on ? on_pool : off_pool;
    pool.error += sums[i] / gap.width;
    pool.variance += kSeeds * gap.variance;
    ++pool.values;
  }
}

TEST(SideChance, OnSideIsUnbiasedAndBothIsOnBoth) {
  Random random(51);
  for (const SideForm& form : kForms) {
    for (const Levels levels : {Levels::even, Levels::optimal}) {
      for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
        const SideCode code = {
            grid_of(kValues, 256), header, Rounding::stochastic, side_table(form.bits, form.side, levels, 256), kChannels, 1};
        std::vector<Channel> channels;
        for (int c = 0; c < kChannels; ++c) {  // two of them flat, thresholds of the rest from −2 to 2 and two outside
          const float gamma = (c % 2 != 0 ? -1.0f : 1.0f) * (0.5f + static_cast<float>(random.uniform()));
          const float t = c == 2 ? 9.0f : c == 3 ? -9.0f : static_cast<float>(c - 8) * 0.25f;
          channels.push_back(c < 2 ? channel_of(0.0f, c == 0 ? 1.0f : -1.0f, 0.0f) : channel_of(gamma, -gamma * t, 0.0f));
        }
        Floats x;
        for (int64_t i = 0; i < kValues; ++i) x.push_back(random.normal());
        if (form.side == Side::relu) std::transform(x.begin(), x.end(), x.begin(), [](float v) { return std::max(v, 0.0f); });
        SCOPED_TRACE(describe(code, DType::f32));
        Pool on, off;
        pool_sides(code, form.side == Side::relu ? nullptr : channels.data(), x, on, off);
        expect_unbiased(on, "on");
        if (form.side == Side::both) expect_unbiased(off, "off");
      }
    }
  }
}

// Code 0 of the relu form is exactly 0, on every kernel.
TEST(SideChance, ReluKeepsZeros) {
  Random random(52);
  Floats x;
  for (int64_t i = 0; i < 1000; ++i) x.push_back(std::max(random.normal(), 0.0f));
  for (const int bits : {2, 3}) {
    const SideCode code = {grid_of(1000, 256), HeaderType::bf16, Rounding::stochastic, side_table(bits, Side::relu, Levels::optimal, 256)};
    for (const CpuKernels* k : supported_kernels()) {
      const Coded own = encode(*k, code, nullptr, as_type(x, DType::f32), DType::f32, 3);
      const Floats y = floats_of(decode(*k, code, nullptr, own, DType::f32), DType::f32);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(get_code(own.codes.data(), bits, static_cast<int64_t>(i)) == 0, x[i] == 0) << k->name << ' ' << i;
        if (x[i] == 0) {
          ASSERT_EQ(bits_of(y[i]), 0u) << k->name << ' ' << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
