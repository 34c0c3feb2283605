// Bits per sample through pack_per_sample() and unpack_per_sample(): the block code's own values, unbiased, never above the budget.
#include "satchel/tensor/per_sample.h"

#include <ATen/Parallel.h>

#include <string>

#include "chance.h"
#include "reference.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;
using reference::same;

const CodecSpec kActnn = parse_spec("actnn");

/// Samples of different scales.
at::Tensor scaled(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kFloat) {
  std::vector<int64_t> one(shape.size(), 1);
  one[0] = shape[0];
  return (normal(shape, seed) * normal(one, seed + 1).exp()).to(type);
}

int64_t total_bits(const Packed& p) { return bits_of(p).sum().item<int64_t>(); }

TEST(Mixed, EqualBitsGiveThePlainCodesValues) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = scaled({6, 5, 8, 8}, 1, type);
    for (const int bits : {1, 8}) {  // the two means that leave no choice
      CodecSpec plain = kActnn;
      plain.bits = bits;
      const Packed p = pack_per_sample(x, kActnn, 5, bits);
      EXPECT_TRUE(bits_of(p).eq(bits).all().item<bool>());
      EXPECT_TRUE(same(unpack_per_sample(p), unpack(pack(x, plain, 5)))) << bits;
    }
    // All alike: 2 bits each too.
    const at::Tensor alike = x.narrow(0, 0, 1).expand({4, 5, 8, 8}).contiguous();
    EXPECT_TRUE(same(unpack_per_sample(pack_per_sample(alike, kActnn, 5, 2)), unpack(pack(alike, kActnn, 5))));
  }
}

TEST(Mixed, NeverSpendsMoreThanTheMean) {
  for (const int64_t n : {1, 3, 7, 64}) {
    const at::Tensor x = scaled({n, 40}, 2);
    for (const double mean : {1.0, 1.3, 2.0, 2.71, 7.99, 8.0}) {
      const Packed p = pack_per_sample(x, kActnn, 1, mean);
      EXPECT_EQ(total_bits(p), static_cast<int64_t>(mean * static_cast<double>(n)));
      EXPECT_EQ(p.bytes.numel(), per_sample_bytes(x.sizes(), kActnn, mean));
      // The same bytes whatever the values are: nothing on the host depends on them.
      EXPECT_EQ(pack_per_sample(x.zero_(), kActnn, 1, mean).bytes.numel(), p.bytes.numel());
    }
  }
}

TEST(Mixed, WeightsMoveBits) {
  const at::Tensor x = normal({1, 512}, 3).expand({4, 512}).contiguous();
  const at::Tensor weights = at::tensor({1.0f, 1e4f, 1.0f, 1.0f});
  const at::Tensor bits = bits_of(pack_per_sample(x, kActnn, 1, 2, weights));
  // 10^4·gain(4) = 34 > gain(1) = 8/9: all four spare bits are sample 1's.
  EXPECT_TRUE(bits.equal(at::tensor({1, 5, 1, 1}, at::kByte)));
}

TEST(Mixed, GivesRangesBack) {
  const at::Tensor x = scaled({5, 600}, 4);
  at::Tensor squares;
  pack_per_sample(x, kActnn, seed_tensor(1, at::kCPU), 2, {}, &squares);
  at::Tensor expected = at::zeros({5}, at::kDouble);
  for (int64_t from = 0; from < 600; from += 256) {
    const at::Tensor block = x.narrow(1, from, std::min<int64_t>(256, 600 - from)).to(at::kDouble);
    expected += (std::get<0>(block.max(1)) - std::get<0>(block.min(1))).square();
  }
  // Three differences and squares of doubles: a few roundings of 2^−53.
  EXPECT_TRUE(at::allclose(squares, expected, 1e-15, 0));
}

TEST(Mixed, KeepsTheOrderOfMapsAndGivesSamples) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor x = scaled({7, 6, 5, 9}, 5).contiguous(format);
    const Packed p = pack_per_sample(x, kActnn, 3, 2.5);
    const at::Tensor y = unpack_per_sample(p);
    EXPECT_EQ(y.strides(), x.strides());
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 7}, {2, 5}, {6, 7}, {3, 3}}) {
      const at::Tensor part = unpack_per_sample(p, first, last);
      EXPECT_TRUE(same(part, y.narrow(0, first, last - first)));
      EXPECT_TRUE(part.numel() == 0 || part.stride(1) == x.stride(1));
    }
    // 8 bits a sample: the error is at most a step, range/255, more by the header's rounding (2^−7).
    const at::Tensor close = unpack_per_sample(pack_per_sample(x, kActnn, 3, 8));
    EXPECT_LE((close - x).abs().max().item<float>(), (x.max() - x.min()).item<float>() / 255 * 1.02f);
  }
  // Rows that are no stretch of memory each are put in order first.
  const at::Tensor turned = normal({30, 9}, 6).t();
  const at::Tensor back = unpack_per_sample(pack_per_sample(turned, kActnn, 3, 2));
  EXPECT_TRUE(same(back, unpack_per_sample(pack_per_sample(turned.contiguous(), kActnn, 3, 2))));
}

TEST(Mixed, BytesDoNotDependOnThreads) {
  const at::Tensor x = scaled({37, 3000}, 7);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Packed one = pack_per_sample(x, kActnn, 3, 2);
  const at::Tensor y = unpack_per_sample(one);
  EXPECT_TRUE(same(unpack(one), y));
  EXPECT_TRUE(same(unpack_samples(one, 1, 3), y.narrow(0, 1, 2)));
  at::set_num_threads(2);
  EXPECT_TRUE(same(pack_per_sample(x, kActnn, 3, 2).bytes, one.bytes));
  EXPECT_TRUE(same(unpack_per_sample(one), y));
  at::set_num_threads(threads);
}

TEST(Mixed, IsUnbiased) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = scaled({8, 500}, 8, type) + 0.5;
    for (const double mean : {1.5, 2.0, 3.0}) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::to_string(mean));
      const double unit = type == at::kFloat ? 0x1p-24 : 0x1p-8;
      // Half an ulp of the largest value, levels reach a little beyond it; and 2^−16 of a gap by the noise's steps.
      const double slack = 1.2 * unit * x.abs().max().item<double>() + 0x1p-17 * (x.max() - x.min()).item<double>();
      const auto r = chance::pooled(x, at::ones_like(x, at::kBool), 200, slack,
                                    [&](uint64_t seed) { return unpack_per_sample(pack_per_sample(x, kActnn, seed, mean)); });
      EXPECT_GE(r.tested, x.numel() / 20);  // bf16's half ulp and samples of 8 bits leave less to test
      EXPECT_EQ(r.outside, 0);
      EXPECT_LT(std::abs(r.z), chance::kLimit);
      EXPECT_LT(r.chi2, chance::kLimit);
    }
  }
}

TEST(Mixed, SavesTheErrorItPredicts) {
  const at::Tensor x = scaled({64, 1024}, 9);
  const auto error = [&](const at::Tensor& y) { return (y - x).square().sum().item<double>(); };
  double per_sample = 0, plain = 0;
  at::Tensor squares;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    per_sample += error(unpack_per_sample(pack_per_sample(x, kActnn, seed_tensor(seed, at::kCPU), 2, {}, &squares)));
    plain += error(unpack(pack(x, kActnn, seed)));
  }
  const auto predicted = [&](const at::Tensor& bits) {
    return (squares / (at::exp2(bits.to(at::kDouble)) - 1).square()).sum().item<double>();
  };
  const at::Tensor bits = bits_of(pack_per_sample(x, kActnn, 1, 2));
  const double ratio = predicted(bits) / predicted(at::full_like(bits, 2));
  EXPECT_LT(ratio, 0.7);
  // Predicted is the bound p(1 − p) ≤ ¼ for every value; what 1 bit and 8 bits leave of it differs by less than 2 (theory.md 12).
  EXPECT_GT(per_sample / plain, ratio / 2);
  EXPECT_LT(per_sample / plain, ratio * 2);
}

TEST(Mixed, EmptyTensorsAndOddOnes) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0, 3, 4}, {4, 0}, {1}, {5}, {1, 1}}) {
    const at::Tensor x = normal(shape, 10);
    const at::Tensor y = unpack_per_sample(pack_per_sample(x, kActnn, 1, 2));
    EXPECT_EQ(y.sizes(), x.sizes());
    // One value a block: low is that value, rounded down to bf16.
    if (x.numel() > 0) {
      EXPECT_LE((y - x).abs().max().item<float>(), x.abs().max().item<float>() * 0x1p-7f);
    }
  }
}

TEST(Mixed, RefusesWhatItCannotCode) {
  const at::Tensor x = normal({4, 64}, 11);
  expect_error([&] { pack_per_sample(x, kActnn, 1, 0.5); }, "[pack_per_sample] mean bits must be 1 to 8, got 0.5");
  expect_error([&] { pack_per_sample(x, kActnn, 1, std::nan("")); }, "mean bits must be 1 to 8");
  expect_error([&] { pack_per_sample(x, parse_spec("actnn,levels=optimal"), 1, 2); }, "per-sample bits take");
  expect_error([&] { pack_per_sample(x, parse_spec("actnn,block=100"), 1, 2); }, "per-sample bits take");
  expect_error([&] { pack_per_sample(x, parse_spec("satchel"), 1, 2); }, "per-sample bits take");
  expect_error([&] { pack_per_sample(at::zeros({}), kActnn, 1, 2); }, "tensors of samples");
  expect_error([&] { pack_per_sample(x, kActnn, 1, 2, at::ones({3})); }, "weights must be one float32 number a sample");
  const at::Tensor whole = normal({2, 256}, 12), seed = seed_tensor(1, at::kCPU);
  expect_error([&] { pack_per_sample(whole, kActnn, seed, 2, {}, nullptr, at::zeros({2, 2})); }, "ranges must be");
  Packed p = pack_per_sample(x, kActnn, 1, 2);
  expect_error([&] { unpack_per_sample(p, 1, 5); }, "[unpack_per_sample] samples must lie within 0 to 4, got 1 to 5");
  expect_error([&] { transposed_product(p, x); }, "all samples must have the same bits, got bits per sample");
  p.bytes = p.bytes.narrow(0, 0, 10);
  expect_error([&] { unpack_per_sample(p); }, "bytes must be");
}

}  // namespace
}  // namespace satchel
