// Affine, activation and dropout of tensors: torch's own result without dropout, the same values in chunks, every rule named.
#include "satchel/tensor/chain.h"

#include <limits>

#include "reference.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;
using reference::same;

const at::Tensor kNone;

at::Tensor seed_of(int64_t seed) { return seed_tensor(static_cast<uint64_t>(seed), at::kCPU); }

at::Tensor flags_of(const at::Tensor& bits, const at::Tensor& x) { return unpack_mask({bits, x.sizes().vec()}); }

TEST(Chain, IsTorchsOwnWithoutDropout) {
  for (const int64_t rows : {0, 1, 7, 1000, 3001}) {
    for (const int64_t channels : {0, 1, 3, 40, 128}) {
      for (const double slope : {0.0, 0.1, 1.0}) {
        const at::Tensor x = normal({rows, channels}, 1), gamma = normal({channels}, 2), beta = normal({channels}, 3);
        const at::Tensor y = x.to(at::kDouble) * gamma.to(at::kDouble) + beta.to(at::kDouble);
        const at::Tensor expected = at::leaky_relu(y, slope);
        // y, the slope and the product are rounded once each: 3·2^−24, and a fourth for their products.
        const at::Tensor bound = expected.abs() * (4 * 0x1p-24);
        EXPECT_TRUE(((apply_chain(x, gamma, beta, kNone, kNone, {0, slope}) - expected).abs() <= bound).all().item<bool>());
        const at::Tensor on = on_bits(x, gamma, beta);
        EXPECT_EQ(on.numel(), (rows * channels + 7) / 8);
        EXPECT_TRUE(at::equal(flags_of(on, x), y > 0));
        EXPECT_TRUE(same(apply_chain(x, gamma, beta, on, kNone, {0, slope}), apply_chain(x, gamma, beta, kNone, kNone, {0, slope})));
        const at::Tensor g = normal({rows, channels}, 4);
        EXPECT_TRUE(same(chain_gradient(g, on, kNone, {0, slope}), at::where(y > 0, g, g * static_cast<float>(slope))));
        EXPECT_TRUE(same(chain_gradient(g, kNone, kNone, {0, slope}), g));
      }
    }
  }
}

TEST(Chain, WithoutAffineItIsTheActivation) {
  const at::Tensor x = normal({77, 13}, 5);
  EXPECT_TRUE(same(apply_chain(x, kNone, kNone, kNone, kNone, {}), at::relu(x)));
  EXPECT_TRUE(at::equal(flags_of(on_bits(x, kNone, kNone), x), x > 0));
  EXPECT_TRUE(same(apply_chain(x, kNone, kNone, kNone, kNone, {0, 1}), x + 0.0));
}

TEST(Chain, DropsAndScalesAlikeForwardAndBackward) {
  const at::Tensor x = normal({1000, 128}, 6).abs() + 1, g = normal({1000, 128}, 7);
  for (const double p : {0.1, 0.3, 0.5, 0.9}) {
    const at::Tensor z = apply_chain(x, kNone, kNone, kNone, seed_of(8), {p, 0});
    const double drop = std::round(p * 65536) / 65536;
    const at::Tensor kept = z != 0;
    // Binomial: z = (count − n·p)/√(n·p(1 − p)), beyond 4.8916 once in 10^6.
    const double n = double(x.numel());
    EXPECT_LT(std::abs(kept.sum().item<double>() - n * (1 - drop)) / std::sqrt(n * drop * (1 - drop)), 4.8916) << p;
    EXPECT_TRUE(same(z, at::where(kept, x * static_cast<float>(1 / (1 - drop)), at::zeros_like(x))));
    const at::Tensor back = chain_gradient(g, kNone, seed_of(8), {p, 0});
    EXPECT_TRUE(at::equal(back, at::where(kept, g * static_cast<float>(1 / (1 - drop)), at::zeros_like(g))));
    EXPECT_FALSE(same(z, apply_chain(x, kNone, kNone, kNone, seed_of(9), {p, 0})));
    const at::Tensor over = g.clone();
    const auto version = over._version();
    chain_gradient_(over, kNone, seed_of(8), {p, 0});
    EXPECT_TRUE(same(over, back));
    EXPECT_GT(over._version(), version);
  }
}

TEST(Chain, ChunksOfRowsAreTheWhole) {
  const at::Tensor x = normal({1001, 40}, 10), gamma = normal({40}, 11), beta = normal({40}, 12), on = on_bits(x, gamma, beta);
  const ChainOptions options{0.4, 0.2};
  const at::Tensor z = apply_chain(x, gamma, beta, on, seed_of(13), options), back = chain_gradient(x, on, seed_of(13), options);
  for (int64_t first = 0; first < 1001; first += 96) {
    const int64_t rows = std::min<int64_t>(96, 1001 - first), origin = first * 40;
    const at::Tensor part = x.narrow(0, first, rows), bits = on.narrow(0, origin / 8, (rows * 40 + 7) / 8);
    EXPECT_TRUE(same(apply_chain(part, gamma, beta, bits, seed_of(13), options, origin), z.narrow(0, first, rows)));
    EXPECT_TRUE(same(chain_gradient(part, bits, seed_of(13), options, origin), back.narrow(0, first, rows)));
  }
}

TEST(Chain, SideCodesRememberWhatWasOn) {
  for (const char* text : {"satchel", "side=one,bits=3", "side=both,bits=2", "side=both,bits=3", "side=both,bits=4", "satchel,block=100"}) {
    for (const int64_t rows : {0, 1, 5, 2000}) {
      const at::Tensor x = normal({rows, 50}, 14), gamma = normal({50}, 15), beta = normal({50}, 16);
      const Packed packed = pack_side(x, parse_spec(text), seed_of(17), gamma, beta);
      EXPECT_TRUE(same(on_bits(packed), on_bits(x, gamma, beta))) << text;
    }
  }
  for (const char* text : {"side=relu,bits=2", "side=relu,bits=3"}) {
    const at::Tensor x = normal({333, 50}, 18).clamp_min(0);
    EXPECT_TRUE(same(on_bits(pack(x, parse_spec(text), 19)), on_bits(x, kNone, kNone))) << text;
  }
}

TEST(Chain, NotANumberStaysVisible) {
  at::Tensor x = normal({64, 64}, 20);
  x[3][4] = std::numeric_limits<float>::quiet_NaN();
  x[5][6] = std::numeric_limits<float>::infinity();
  for (int64_t seed = 0; seed < 20; ++seed) {
    const at::Tensor z = apply_chain(x, kNone, kNone, kNone, seed_of(seed), {0.5, 0});
    EXPECT_EQ(at::isfinite(z).logical_not().sum().item<int64_t>(), 2);
  }
}

TEST(Chain, BadInputIsNamed) {
  const at::Tensor x = normal({4, 6}, 21), channel = normal({6}, 22), on = at::zeros({3}, at::kByte), seed = seed_of(1);
  const auto apply = [&](const at::Tensor& t, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& bits, const at::Tensor& s,
                         ChainOptions options,
                         int64_t origin = 0) { return [=] { apply_chain(t, gamma, beta, bits, s, options, origin); }; };
  expect_error(apply(kNone, kNone, kNone, kNone, kNone, {}), "[apply_chain] tensor must be defined");
  expect_error(apply(x.to(at::kDouble), kNone, kNone, kNone, kNone, {}),
               "[apply_chain] tensor must be float32, bfloat16 or float16, got Double");
  expect_error(apply(x.view({24}), kNone, kNone, kNone, kNone, {}), "[apply_chain] tensor must be rows x channels, got [24]");
  expect_error(apply(x.t(), kNone, kNone, kNone, kNone, {}), "[apply_chain] tensor must be contiguous");
  expect_error(apply(x.to(at::kMeta), kNone, kNone, kNone, kNone, {}), "[apply_chain] device must be cpu or cuda");
  expect_error(apply(x, channel, kNone, kNone, kNone, {}), "[apply_chain] gamma and beta must be given together, got gamma alone");
  expect_error(apply(x, channel, normal({5}, 1), kNone, kNone, {}), "[apply_chain] beta must hold 6 contiguous values");
  expect_error(apply(x, channel.to(at::kDouble), channel, kNone, kNone, {}), "[apply_chain] gamma must be float32, got Double");
  expect_error(apply(x, channel.to(at::kMeta), channel, kNone, kNone, {}), "[apply_chain] gamma must be on the tensor's device");
  expect_error(apply(x, kNone, kNone, on.narrow(0, 0, 2), kNone, {}), "[apply_chain] on must be 3 contiguous bytes, got [2]");
  expect_error(apply(x, kNone, kNone, on.to(at::kBool), kNone, {}), "[apply_chain] on must be uint8, got Bool");
  expect_error(apply(x, kNone, kNone, kNone, kNone, {0.5, 0}), "[apply_chain] seed must be defined");
  expect_error(apply(x, kNone, kNone, kNone, at::zeros({1}), {0.5, 0}), "[apply_chain] seed must be int64");
  for (const double p : {-0.1, 1.0, 2.0, std::nan("")}) {
    expect_error(apply(x, kNone, kNone, kNone, seed, {p, 0}), "[apply_chain] dropout must be in [0, 1)");
  }
  expect_error(apply(x, kNone, kNone, kNone, seed, {1 - 1e-9, 0}), "[apply_chain] dropout must leave 1 of 2^16 values");
  expect_error(apply(x, kNone, kNone, kNone, seed, {0, INFINITY}), "[apply_chain] slope must be finite, got inf");
  for (const int64_t origin : {-8, 4}) {
    expect_error(apply(x, kNone, kNone, kNone, seed, {}, origin), "[apply_chain] origin must be a multiple of 8");
  }
  expect_error([&] { chain_gradient(x.t(), kNone, kNone, {}); }, "[chain_gradient] tensor must be contiguous");
  expect_error([&] { chain_gradient_(x.t(), kNone, kNone, {}); }, "[chain_gradient_] tensor must be contiguous");
  expect_error([&] { on_bits(x, kNone, channel); }, "[on_bits] gamma and beta must be given together, got beta alone");
  expect_error([&] { on_bits(pack(x, parse_spec("bits=2"), 1)); }, "[on_bits] packed tensor must be a side code");
  expect_error([&] { on_bits(pack_side(x.t(), parse_spec("satchel"), seed, normal({4}, 1), normal({4}, 2))); },
               "[on_bits] packed tensor must be contiguous");
}

}  // namespace
}  // namespace satchel
