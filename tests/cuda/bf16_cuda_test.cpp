// bfloat16 activations on CUDA: to the bit what float32 gives of the same numbers, rounded at the end, whatever the sizes and addresses.
#include <limits>
#include <vector>

#include "cuda_fixture.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/epilogue.h"
#include "tests/autograd/bf16.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

at::Tensor rounded(const at::Tensor& t) { return t.to(at::kBFloat16); }
at::Tensor wide(const at::Tensor& t) { return t.to(at::kFloat); }

/// Memory on the device whose first value stands `shift` values past an aligned address.
at::Tensor shifted(const at::Tensor& t, int64_t shift) {
  const at::Tensor line = at::empty({t.numel() + shift}, t.options().device(at::kCUDA));
  return line.narrow(0, shift, t.numel()).view(t.sizes()).copy_(t);
}

/// A layer's numbers, and what the fused passes make of its rows in float32.
struct Layer {
  CodecSpec spec = parse_spec("satchel");
  ChainOptions options;
  at::Tensor seed = seed_tensor(71, at::kCUDA), h, gamma, beta;
  ColumnMoments moments;
  NormResult f32;

  Layer(const at::Tensor& input, ChainOptions chain) : options(chain), h(rounded(input).cuda()) {
    const int64_t channels = h.size(1);
    gamma = normal({channels}, 72).cuda();
    beta = normal({channels}, 73).cuda();
    gamma[channels / 2] = 0;
    moments = {(normal({channels}, 74) * 0.2).cuda(), (normal({channels}, 75).abs() + 0.5).cuda()};
    f32 = encode(wide(h));
  }
  NormResult encode(const at::Tensor& x, const at::Tensor& into = {}) const {
    return norm_act_encode({x, moments, gamma, beta, {}, into}, {spec, seed}, options);
  }
  at::Tensor kept_seed() const { return options.dropout > 0 ? seed : at::Tensor(); }
};

template <class F>
void for_layers(const F& f) {
  for (const int64_t channels : {1, 7, 8, 12, 40, 100, 128, 256, 512}) {
    for (const int64_t rows : {33, 1001, 5000}) {
      if (rows * channels < 256) continue;
      for (const ChainOptions options : {ChainOptions{0.5, 0}, ChainOptions{0, 0.1}}) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels));
        f(Layer(normal({rows, channels}, 76) * 1.5 + 0.2, options));
      }
    }
  }
}

TEST_F(Cuda, Bf16NormActKeepsTheBytesOfTheUnfusedPath) {
  for_layers([](const Layer& layer) {
    ASSERT_TRUE(fuses_norm_act(layer.h, layer.spec));
    const at::Tensor x = at::sub(wide(layer.h), layer.moments.mean).mul_(layer.moments.rstd);
    const Packed packed = pack_side(x, layer.spec, layer.seed, layer.gamma, layer.beta);
    const at::Tensor z = rounded(apply_chain(x, layer.gamma, layer.beta, {}, layer.seed, layer.options));
    for (const int64_t shift : {0, 1, 4}) {  // 16-byte accesses serve, or not
      const at::Tensor h = shifted(layer.h, shift);
      const NormResult got = layer.encode(h, shifted(h, shift).fill_(7));
      EXPECT_TRUE(same(got.save.code.bytes, packed.bytes));
      EXPECT_TRUE(same(got.z, z));
      const NormResult over = layer.encode(h, h);
      EXPECT_TRUE(same(over.save.code.bytes, packed.bytes)) << "in place";
      EXPECT_TRUE(same(h, z)) << "in place";
    }
    EXPECT_TRUE(same(layer.f32.save.code.bytes, packed.bytes));
  });
}

TEST_F(Cuda, Bf16NormActGradientsAreFloat32sRounded) {
  for_layers([](const Layer& layer) {
    const at::Tensor g = rounded(normal(layer.h.sizes(), 79)).cuda();
    const NormSave& save = layer.f32.save;
    const NormActSums want = norm_sums(wide(g), save);
    for (const int64_t shift : {0, 1, 4}) {
      const NormActSums sums = norm_sums(shifted(g, shift), save);
      EXPECT_TRUE(same(sums.beta, want.beta) && same(sums.gamma, want.gamma));
      for (const bool training : {true, false}) {
        const at::Tensor exact = wide(g), over = shifted(g, shift);
        norm_back_(exact, exact, save, {}, training ? want : NormActSums());
        norm_back_(over, over, save, {}, training ? want : NormActSums());
        EXPECT_TRUE(same(over, rounded(exact)));
      }
    }
  });
}

TEST_F(Cuda, Bf16NormActRebuildsTheNextInput) {
  for_layers([](const Layer& layer) {
    const int64_t rows = layer.h.size(0);
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, rows}, {rows / 3, rows}, {8, rows / 2}, {rows / 2, rows / 2 + 1}}) {
      const at::Tensor want = norm_act_input(layer.f32.save.code, layer.kept_seed(), layer.options, first, last);
      const at::Tensor got = norm_act_input(layer.f32.save.code, layer.kept_seed(), layer.options, first, last, at::kBFloat16);
      EXPECT_TRUE(same(got, rounded(want))) << first << " to " << last;
    }
  });
}

TEST_F(Cuda, Bf16NormActWritesWithinItsRows) {
  const Layer layer(normal({1001, 40}, 83), {0.5, 0});
  const CodecLayout plan = check_packed(layer.f32.save.code, "test");
  const Place place(layer.h.device(), "test");
  Chain chain;
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{3, 500}, {8, 1001}, {1000, 1001}}) {
    const int64_t values = (last - first) * 40;
    const at::Tensor line = at::full({values + 16}, 7, layer.h.options());
    auto* to = static_cast<at::BFloat16*>(line.mutable_data_ptr()) + 8;
    cuda::norm_act_input({plan.side, chain, layer.f32.save.code.bytes.mutable_data_ptr<uint8_t>(), nullptr}, first, last, to, DType::bf16,
                         place.stream());
    const at::Tensor want = norm_act_input(layer.f32.save.code, {}, {}, first, last, at::kBFloat16);
    EXPECT_TRUE(same(line.narrow(0, 8, values).view(want.sizes()).contiguous(), want));
    EXPECT_TRUE((line.narrow(0, 0, 8) == 7).all().item<bool>() && (line.narrow(0, values + 8, 8) == 7).all().item<bool>());
  }
}

TEST_F(Cuda, Bf16ShowsWhatIsNotANumberAndWhatIsTooLarge) {
  at::Tensor h = normal({999, 128}, 78);
  h[5][6] = std::numeric_limits<float>::quiet_NaN();
  h[700][1] = std::numeric_limits<float>::infinity();
  h[998][127] = std::numeric_limits<float>::quiet_NaN();  // in the last, broken block
  const Layer layer(h, {0, 0});
  const NormResult got = layer.encode(layer.h);
  EXPECT_TRUE(same(got.save.code.bytes, layer.f32.save.code.bytes));
  EXPECT_TRUE(same(at::isnan(got.z), at::isnan(layer.f32.z)));
  EXPECT_TRUE(same(at::nan_to_num(got.z), at::nan_to_num(rounded(layer.f32.z))));
  // 3e38 is 3.004e38 in bfloat16, 1.132 times that 3.4006e38: finite in float32, past 3.3962e38, from where the nearest bfloat16 is
  // infinite.
  const at::Tensor most = rounded(at::full({8, 32}, 3e38)), scale = at::full({32}, 1.132), zero = at::zeros({32});
  EXPECT_TRUE(at::isfinite(apply_chain(wide(most), scale, zero, {}, {}, {})).all().item<bool>());
  EXPECT_TRUE(at::isinf(apply_chain(most, scale, zero, {}, {}, {})).all().item<bool>());
  EXPECT_TRUE(at::isinf(apply_chain(most.cuda(), scale.cuda(), zero.cuda(), {}, {}, {})).all().item<bool>());
}

TEST_F(Cuda, Bf16ColumnMomentsAreFloat32s) {
  for (const int64_t channels : {1, 7, 8, 40, 100, 128, 256, 1000}) {
    for (const int64_t rows : {1, 2, 9, 1001, 40001}) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels));
      const at::Tensor h = rounded(normal({rows, channels}, 82) * 2 + 3);
      const ColumnMoments want = column_moments(wide(h).cuda(), {});
      for (const int64_t shift : {0, 1, 2, 4}) {
        const ColumnMoments got = column_moments(shifted(h, shift), {});
        EXPECT_TRUE(same(got.mean, want.mean) && same(got.rstd, want.rstd)) << shift;
      }
    }
  }
}

TEST_F(Cuda, Bf16ChainGivesTheBitsOfTheCpu) {
  const at::Tensor seed = seed_tensor(51, at::kCPU), there = seed.cuda();
  for (const int64_t rows : {1, 5, 63, 1000}) {
    for (const int64_t channels : {1, 3, 8, 40, 128, 1000}) {
      for (const ChainOptions options : {ChainOptions{0.25, 0}, ChainOptions{0, 0.1}, ChainOptions{0.5, 1}}) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels));
        const at::Tensor x = rounded(normal({rows, channels}, 52)), gamma = normal({channels}, 53), beta = normal({channels}, 54);
        const at::Tensor bits = on_bits(x, gamma, beta), z = apply_chain(x, gamma, beta, {}, seed, options, 8 * channels);
        const at::Tensor back = chain_gradient(x, bits, seed, options, 8 * channels);
        for (const int64_t shift : {0, 1, 4}) {
          const at::Tensor gpu = shifted(x, shift);
          EXPECT_TRUE(same(on_bits(gpu, gamma.cuda(), beta.cuda()).cpu(), bits));
          EXPECT_TRUE(same(apply_chain(gpu, gamma.cuda(), beta.cuda(), {}, there, options, 8 * channels).cpu(), z));
          chain_gradient_(gpu, bits.cuda(), there, options, 8 * channels);
          EXPECT_TRUE(same(gpu.cpu(), back));
        }
      }
    }
  }
}

TEST_F(Cuda, Bf16GradientsAreTheExactOnesWithinRounding) {
  for (const test::GradientCase& c : test::autograd_cases(at::kCUDA)) {
    for (const std::string& method : c.exact_methods) test::expect_bf16(c, method);
    test::expect_retained(test::in_bf16(c), "satchel");
  }
}

TEST_F(Cuda, Fp16GradientsAreTheExactOnesWithinRounding) {
  for (const test::GradientCase& c : test::autograd_cases(at::kCUDA)) {
    for (const std::string& method : c.exact_methods) {
      if (method != "fp32") test::expect_bf16(c, method, at::kHalf);
    }
  }
}

/// Gradients through the fused node, on the code it packed, against the same formula in float64.
TEST_F(Cuda, Bf16FusedNodeGivesTheGradientOfItsCode) {
  at::manual_seed(31);
  const at::Tensor h = rounded(at::randn({4001, 128}, at::kCUDA)).requires_grad_(), g = rounded(at::randn({4001, 128}, at::kCUDA));
  const at::Tensor f32 = wide(h.detach()).requires_grad_();
  const auto weight = [] { return at::rand({128}, at::kCUDA).add_(0.5).requires_grad_(); };
  const NormWeights weights{weight(), weight(), {}, {}};
  NormActOptions options;
  options.dropout = 0.5;
  const auto run = [&](const at::Tensor& x) {
    test::first_seed(5, at::kCUDA);
    const at::Tensor z = norm_act(x, weights, options);
    return std::pair{z.detach(), test::gradients_of(z, g, {x, weights.gamma, weights.beta})};
  };
  const auto [z, got] = run(h);
  const auto [want_z, want] = run(f32);
  EXPECT_TRUE(same(z, rounded(want_z)));  // the same statistics, codes and draws
  EXPECT_TRUE(same(got[0], rounded(want[0])));
  EXPECT_TRUE(same(got[1], want[1]) && same(got[2], want[2]));
}

/// h's memory becomes z's where h was given away, and only then.
TEST_F(Cuda, NormActReusesMemoryThatNobodyElseHolds) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor leaf = at::randn({1000, 64}, at::kCUDA).to(type).requires_grad_();
    const NormWeights weights{at::ones({64}, at::kCUDA).requires_grad_(), at::zeros({64}, at::kCUDA).requires_grad_(), {}, {}};
    const auto run = [&](at::Tensor x, const at::Tensor& held) {
      test::first_seed(5, at::kCUDA);
      const void* before = x.const_data_ptr();
      const at::Tensor copy = x.detach().clone();
      const at::Tensor z = norm_act(std::move(x), weights, {});
      if (held.defined()) {
        EXPECT_TRUE(same(held.detach().contiguous(), copy)) << "what is held must not change";
      }
      return std::tuple{z.const_data_ptr() == before, z.detach(), test::gradients_of(z, at::ones_like(z), {leaf})[0]};
    };
    const at::Tensor held = leaf * 2;
    const auto [other, z, gradient] = run(held, held);
    EXPECT_FALSE(other);
    const auto [own, own_z, own_gradient] = run(leaf * 2, {});
    EXPECT_TRUE(own);
    EXPECT_TRUE(same(own_z, z) && same(own_gradient, gradient));
    at::Tensor moved = leaf * 2;
    const at::Tensor view = moved.detach();
    const auto [viewed, view_z, view_gradient] = run(std::move(moved), view);
    EXPECT_FALSE(viewed);
    EXPECT_TRUE(same(view_gradient, gradient));
    const auto [saved, saved_z, saved_gradient] = run(at::relu(leaf), {});  // relu's node keeps its output
    EXPECT_FALSE(saved);
    const auto [first, first_z, first_gradient] = run(leaf, leaf);
    EXPECT_FALSE(first);
  }
}

}  // namespace
}  // namespace satchel
