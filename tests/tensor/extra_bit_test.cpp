// Samples of 3 bits among those of 2: each is what the whole tensor would be in so many bits.
#include "satchel/tensor/extra_bit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "reference.h"
#include "satchel/core/error.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// 6 samples of `pixels` rows; the second, the last and the fourth have 3 bits, in this order.
constexpr int64_t kSamples = 6, kChosen = 3;
at::Tensor slots() { return at::tensor({-1, 0, -1, 2, -1, 1}, at::kInt); }

struct Coded {
  at::Tensor x, gamma, beta, seed = seed_tensor(5, at::kCPU);
  CodecSpec two, three;
  ExtraBit extra;
  Packed code, of_two, of_three;

  Coded(int64_t pixels, int64_t channels, bool relu) : two(parse_spec(relu ? "satchel,side=relu" : "satchel")), three(two) {
    three.bits = 3;
    x = normal({kSamples * pixels, channels}, 1) * 1.5;
    if (relu) {
      x = x.relu();
    } else {
      gamma = normal({channels}, 2);
      beta = normal({channels}, 3) * 0.3;
      gamma[0] = 0;  // one side
    }
    extra = extra_bit_plane(slots(), kChosen, pixels * channels);
    code = pack_extra_bit(x, two, seed, gamma, beta, extra);
    of_two = whole(two);
    of_three = whole(three);
  }
  Packed whole(const CodecSpec& spec) const { return gamma.defined() ? pack_side(x, spec, seed, gamma, beta) : pack(x, spec, seed); }

  /// Rows of samples with so many bits out of each.
  at::Tensor chosen(const at::Tensor& from_two, const at::Tensor& from_three) const {
    const at::Tensor wide = slots().ge(0).repeat_interleave(x.size(0) / kSamples).unsqueeze(1);
    return at::where(wide, from_three, from_two);
  }
};

TEST(Third, EverySampleIsCodedInItsBits) {
  for (const bool relu : {false, true}) {
    for (const auto& [pixels, channels] : {std::pair<int64_t, int64_t>{16, 16}, {64, 12}, {256, 7}, {4096, 3}}) {
      const Coded c(pixels, channels, relu);
      const at::Tensor expected = c.chosen(unpack(c.of_two), unpack(c.of_three));
      const int64_t rows = c.x.size(0);
      EXPECT_TRUE(same(extra_bit_rows(c.code, c.extra, 0, rows, at::kFloat), expected)) << relu << " " << pixels;
      for (const auto& [first, last] :
           {std::pair{int64_t{1}, rows - 1}, {rows / 3, rows / 2}, {pixels, 2 * pixels}, {rows / 2, rows / 2}}) {
        EXPECT_TRUE(same(extra_bit_rows(c.code, c.extra, first, last, at::kFloat), expected.narrow(0, first, last - first)));
      }
      const auto on = [&](const at::Tensor& bits) { return unpack_mask({bits, {rows, channels}}); };
      EXPECT_TRUE(same(on(extra_bit_on(c.code, c.extra)), c.chosen(on(on_bits(c.of_two)), on(on_bits(c.of_three)))));
    }
  }
}

TEST(Third, BytesAreThoseOfTwoBitsAndAPlane) {
  const Coded c(64, 8, false);
  EXPECT_EQ(c.code.bytes.numel(), c.of_two.bytes.numel());
  // 512 values a sample: 64 bytes of third bits for each of three, and 4 bytes for each of six.
  EXPECT_EQ(c.extra.bytes(), 3 * 64 + 6 * 4);
  EXPECT_LT(c.code.bytes.numel() + c.extra.bytes(), c.of_three.bytes.numel());
}

TEST(Third, WhereSamplesCanBeSplit) {
  const CodecSpec spec = parse_spec("satchel");
  EXPECT_TRUE(takes_extra_bit(spec, 512));
  EXPECT_FALSE(takes_extra_bit(spec, 500)) << "blocks of 256 do not fill it";
  EXPECT_FALSE(takes_extra_bit(parse_spec("satchel,bits=3"), 512));
  EXPECT_FALSE(takes_extra_bit(parse_spec("satchel,side=both"), 512));
  EXPECT_FALSE(takes_extra_bit(parse_spec("satchel,block=128"), 512));
  EXPECT_THROW(extra_bit_plane(slots(), 7, 512), Error);
  EXPECT_THROW(extra_bit_plane(slots().to(at::kLong), 3, 512), Error);
  const Coded c(64, 8, false);
  EXPECT_THROW(extra_bit_view(c.of_three, c.extra), Error);
}

TEST(Third, NonFiniteValuesShowInTheirBlock) {
  Coded c(64, 8, false);
  c.x[70][3] = NAN;  // of sample 1, which has 3 bits: its third block
  const at::Tensor seen = extra_bit_rows(pack_extra_bit(c.x, c.two, c.seed, c.gamma, c.beta, c.extra), c.extra, 0, 384, at::kFloat);
  EXPECT_TRUE(at::isnan(seen.narrow(0, 64, 32)).all().item<bool>());
  EXPECT_FALSE(at::isnan(seen.narrow(0, 96, 32)).any().item<bool>());
}

TEST(Third, RangesAreThoseOfTheHeaders) {
  const Coded c(64, 8, false);
  const at::Tensor blocks = c.x.view({kSamples, 2, 256}), length = blocks.amax(2) - blocks.amin(2);
  const at::Tensor exact = length.to(at::kDouble).square().sum(1), got = squared_ranges(c.code, kSamples);
  EXPECT_EQ(got.scalar_type(), at::kDouble);
  // Both ends are rounded outwards to 8 bits, a 128th of their own size at most, which is at most the range: 2/128, squared.
  EXPECT_TRUE((got >= exact).all().item<bool>());
  EXPECT_TRUE((got <= exact * (1 + 2.0 / 128) * (1 + 2.0 / 128)).all().item<bool>());
  // Samples that blocks do not fill share alike.
  const at::Tensor even = squared_ranges(c.code, 5);
  EXPECT_NEAR(even[0].item<double>(), got.sum().item<double>() / 5, 1e-12 * got.sum().item<double>());
}

}  // namespace
}  // namespace satchel
