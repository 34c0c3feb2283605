// float16 activations on CUDA: to the bit what float32 gives of the same numbers, rounded at the end, whatever the sizes and addresses.
#include <limits>
#include <string>

#include "cuda_fixture.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

at::Tensor rounded(const at::Tensor& t) { return t.to(at::kHalf); }
at::Tensor wide(const at::Tensor& t) { return t.to(at::kFloat); }

/// Memory on the device whose first value stands `shift` values past an aligned address.
at::Tensor shifted(const at::Tensor& t, int64_t shift) {
  const at::Tensor line = at::empty({t.numel() + shift}, t.options().device(at::kCUDA));
  return line.narrow(0, shift, t.numel()).view(t.sizes()).copy_(t);
}

/// A layer's numbers. Some are so small that float16 has them as subnormals.
struct Layer {
  at::Tensor seed = seed_tensor(71, at::kCUDA), h, g, gamma, beta;
  ColumnMoments moments;

  Layer(int64_t rows, int64_t channels) {
    h = rounded(normal({rows, channels}, 76) * 1.5 + 0.2).cuda();
    g = rounded(normal({rows, channels}, 79) * 1e-4).cuda();
    gamma = normal({channels}, 72).cuda();
    beta = normal({channels}, 73).cuda();
    gamma[channels / 2] = 0;
    moments = {(normal({channels}, 74) * 0.2).cuda(), (normal({channels}, 75).abs() + 0.5).cuda()};
  }
};

template <class F>
void for_layers(const F& f) {
  for (const int64_t channels : {7, 8, 40, 128, 256}) {
    for (const int64_t rows : {129, 1001}) {
      if (!mine()) continue;
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels));
      f(Layer(rows, channels));
    }
  }
}

TEST_F(Cuda, F16NormActIsFloat32sRounded) {
  const CodecSpec spec = parse_spec("satchel");
  for_layers([&](const Layer& l) {
    ASSERT_TRUE(fuses_norm_act(l.h, spec));
    for (const ChainOptions options : {ChainOptions{0.5, 0}, ChainOptions{0, 0.1}}) {
      const at::Tensor seed = options.dropout > 0 ? l.seed : at::Tensor();
      const auto encode = [&](const at::Tensor& x) { return norm_act_encode({x, l.moments, l.gamma, l.beta}, {spec, l.seed}, options); };
      const NormResult f32 = encode(wide(l.h));
      const NormActSums want = norm_sums(wide(l.g), f32.save);
      const at::Tensor exact = wide(l.g), input = norm_act_input(f32.save.code, seed, options, 1, l.h.size(0));
      norm_back_(exact, exact, f32.save, {}, want);
      EXPECT_TRUE(same(norm_act_input(f32.save.code, seed, options, 1, l.h.size(0), at::kHalf), rounded(input)));
      for (const int64_t shift : {0, 1, 4}) {  // 16-byte accesses serve, or not
        const NormResult got = encode(shifted(l.h, shift));
        EXPECT_TRUE(same(got.save.code.bytes, f32.save.code.bytes));
        EXPECT_TRUE(same(got.z, rounded(f32.z)));
        const at::Tensor g = shifted(l.g, shift);
        const NormActSums sums = norm_sums(g, f32.save);
        EXPECT_TRUE(same(sums.beta, want.beta) && same(sums.gamma, want.gamma));
        norm_back_(g, g, f32.save, {}, want);
        EXPECT_TRUE(same(g, rounded(exact)));
      }
    }
  });
}

TEST_F(Cuda, F16NormBlockIsFloat32sRounded) {
  for (const char* text : {"block=128", "block=256", "block=512,levels=even", "block=1024"}) {
    const CodecSpec spec = parse_spec(text);
    for_layers([&](const Layer& l) {
      if (l.h.numel() < spec.block) return;  // one shorter block
      ASSERT_TRUE(fuses_norm_block(l.h, spec)) << text;
      const auto encode = [&](const at::Tensor& x) {
        return norm_block_encode({x, l.moments, l.gamma, l.beta}, {spec, l.seed}, {0.5, seed_tensor(5, at::kCUDA), true});
      };
      const NormResult f32 = encode(wide(l.h)), got = encode(l.h);
      EXPECT_TRUE(same(got.save.code.bytes, pack(l.h, spec, l.seed).bytes)) << text;
      EXPECT_TRUE(same(got.save.code.bytes, f32.save.code.bytes) && same(got.save.on, f32.save.on)) << text;
      EXPECT_TRUE(same(got.z, rounded(f32.z)));
      const at::Tensor exact = wide(l.g), g = l.g.clone();
      const NormActSums want = norm_sums(exact, f32.save), sums = norm_sums(g, got.save);
      EXPECT_TRUE(same(sums.beta, want.beta) && same(sums.gamma, want.gamma));
      norm_back_(exact, exact, f32.save, l.gamma, want);
      norm_back_(g, g, got.save, l.gamma, want);
      EXPECT_TRUE(same(g, rounded(exact)));
    });
  }
}

TEST_F(Cuda, F16ColumnMomentsAreFloat32s) {
  for_layers([](const Layer& l) {
    const ColumnMoments want = column_moments(wide(l.h), {});
    for (const int64_t shift : {0, 1, 2, 4}) {
      const ColumnMoments got = column_moments(shifted(l.h, shift), {});
      EXPECT_TRUE(same(got.mean, want.mean) && same(got.rstd, want.rstd)) << shift;
    }
  });
}

TEST_F(Cuda, F16ChainGivesTheBitsOfTheCpu) {
  const at::Tensor seed = seed_tensor(51, at::kCPU), there = seed.cuda();
  for (const int64_t channels : {1, 8, 40, 1000}) {
    for (const ChainOptions options : {ChainOptions{0.25, 0}, ChainOptions{0, 0.1}, ChainOptions{0.5, 1}}) {
      SCOPED_TRACE(channels);
      const at::Tensor x = rounded(normal({63, channels}, 52)), gamma = normal({channels}, 53), beta = normal({channels}, 54);
      const at::Tensor bits = on_bits(x, gamma, beta), z = apply_chain(x, gamma, beta, {}, seed, options);
      EXPECT_TRUE(same(z, rounded(apply_chain(wide(x), gamma, beta, {}, seed, options))));
      const at::Tensor back = chain_gradient(x, bits, seed, options);
      for (const int64_t shift : {0, 1, 4}) {
        const at::Tensor gpu = shifted(x, shift);
        EXPECT_TRUE(same(on_bits(gpu, gamma.cuda(), beta.cuda()).cpu(), bits));
        EXPECT_TRUE(same(apply_chain(gpu, gamma.cuda(), beta.cuda(), {}, there, options).cpu(), z));
        chain_gradient_(gpu, bits.cuda(), there, options);
        EXPECT_TRUE(same(gpu.cpu(), back));
      }
    }
  }
}

/// 60000 · 1.25 = 75000 is finite in float32 and past 65520, from where the nearest float16 is infinite: a loss scaler sees it.
TEST_F(Cuda, F16ShowsWhatIsTooLarge) {
  const at::Tensor most = rounded(at::full({8, 32}, 60000.0)), scale = at::full({32}, 1.25), zero = at::zeros({32});
  EXPECT_TRUE(at::isinf(apply_chain(most, scale, zero, {}, {}, {})).all().item<bool>());
  EXPECT_TRUE(at::isinf(apply_chain(most.cuda(), scale.cuda(), zero.cuda(), {}, {}, {})).all().item<bool>());
}

}  // namespace
}  // namespace satchel
