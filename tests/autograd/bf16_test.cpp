// bfloat16 activations through every function: what float32 computes of the same numbers, rounded.
#include "tests/autograd/bf16.h"

#include <gtest/gtest.h>

#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/pack.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

/// Cases whose reference has a mask or a matrix in float64, which torch's functions in bfloat16 would not take.
bool draws(const GradientCase& c) {
  for (const char* name : {"dropout", "odd", "batch leaky", "sage", "gcn", "spmm"}) {
    if (c.name.find(name) != std::string::npos) return true;
  }
  return c.name == "batch" || c.name == "batch + linear";
}

TEST(Bf16, GradientsAreTheExactOnesWithinRounding) {
  for (const GradientCase& c : all_cases()) {
    if (c.name == "avg_pool3d") continue;  // torch has no such function for bfloat16 on the CPU
    // A norm rounded before the skip is added turns a ReLU near 0 on or off: only one function for all three is exact.
    const bool adds = c.name.find("skip") != std::string::npos;
    if (c.name == "map: batch, +, relu") continue;
    for (const std::string& method : c.exact_methods) {
      // Method fp32 is torch's own functions, whose roundings the next test counts.
      if (method != "fp32" && (!adds || method == "satchel,bits=32")) expect_bf16(c, method);
    }
  }
}

TEST(Fp16, GradientsAreTheExactOnesWithinRounding) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.exact_methods) {
      if (method != "fp32") expect_bf16(c, method, at::kHalf);
    }
  }
}

/// torch's own functions in bfloat16, method fp32 and ours, all from numbers that bfloat16 holds. torch rounds its sums over rows too, a
/// part at a time: four times as many roundings as ours.
TEST(Bf16, TorchsOwnRoundingIsOfThatSize) {
  for (const GradientCase& plain : autograd_cases()) {
    if (draws(plain)) continue;
    const GradientCase c = in_bf16(plain);
    Inputs inputs = c.inputs();
    for (at::Tensor& t : inputs) t = t.detach().to(at::kBFloat16).to(t.scalar_type()).requires_grad_();
    const Passes exact = run_torch(c, inputs, 7);
    expect_rounded(run_torch(c, inputs, 7, at::kBFloat16), exact, c.name + ", torch", 32);
    expect_rounded(run_case(c, inputs, "fp32", 7), exact, c.name + ", fp32", 32);
    expect_rounded(run_case(c, inputs, "satchel,bits=32", 7), exact, c.name + ", satchel");
  }
}

/// Statistics of bfloat16 rows are computed in float32, so the same bytes are kept as of the same rows in float32.
TEST(Bf16, SharedSavesKeepTheCodesOfFloat32) {
  for (const GradientCase& plain : autograd_cases()) {
    if (!plain.expected_first || plain.name.find("elu,") != std::string::npos || plain.name.find("batch elu") != std::string::npos)
      continue;
    const GradientCase c = in_bf16(plain);
    const Inputs inputs = c.inputs();
    Inputs wide = inputs;
    wide[0] = inputs[0].detach().to(at::kFloat).requires_grad_();
    for (const char* method : {"satchel", "satchel,side=both", "satchel,bits=3", "satchel,side=none", "gact"}) {
      expect_rounded(run_case(c, inputs, method, 5), run_case(c, wide, method, 5), c.name + ", " + method);
    }
  }
}

TEST(Bf16, SavesAreReportedRetainedAndFreed) {
  for (const GradientCase& plain : autograd_cases()) {
    const GradientCase c = in_bf16(plain);
    for (const std::string& method : c.noisy_methods) {
      expect_bytes(c, method);
      expect_retained(c, method);
      expect_nothing_without_gradients(c, method);
    }
  }
}

TEST(Bf16, WeightGradientsAreNotRounded) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({200, 24}).to(at::kBFloat16).requires_grad_(), w = leaf({8, 24}), b = leaf({8});
  const NormWeights weights{leaf({24}), leaf({24}), {}, {}};
  const at::Tensor out = satchel::linear(norm_act(x, weights, {}, {parse_method("satchel,bits=32"), ""}), w, b);
  const auto got = gradients_of(out, at::randn({200, 8}), {weights.gamma, weights.beta, w});
  for (const at::Tensor& g : got) {
    ASSERT_EQ(g.scalar_type(), at::kFloat);
    EXPECT_FALSE(at::equal(g.to(at::kBFloat16).to(at::kFloat), g));
  }
}

TEST(Bf16, ChainRoundsWhatFloat32Gives) {
  at::manual_seed(4);
  const at::Tensor seed = seed_tensor(51, at::kCPU);
  for (const int64_t rows : {0, 1, 5, 63, 1000}) {  // one chunk of 4096 values and many
    for (const int64_t channels : {1, 3, 8, 100, 1000}) {
      for (const bool affine : {false, true}) {
        for (const ChainOptions options : {ChainOptions{0.5, 0}, ChainOptions{0, 0.1}, ChainOptions{0.25, 1}}) {
          const int64_t origin = options.slope > 0 ? 8 * channels : 0;
          const at::Tensor x = at::randn({rows, channels}).to(at::kBFloat16), wide = x.to(at::kFloat);
          const at::Tensor gamma = affine ? at::randn({channels}) : at::Tensor(), beta = affine ? at::randn({channels}) : at::Tensor();
          const at::Tensor on = on_bits(x, gamma, beta);
          EXPECT_TRUE(at::equal(on, on_bits(wide, gamma, beta)));
          for (const at::Tensor& bits : {at::Tensor(), on}) {
            const at::Tensor z = apply_chain(wide, gamma, beta, bits, seed, options, origin);
            EXPECT_TRUE(at::equal(apply_chain(x, gamma, beta, bits, seed, options, origin), z.to(at::kBFloat16)));
            const at::Tensor back = chain_gradient(wide, bits, seed, options, origin).to(at::kBFloat16);
            EXPECT_TRUE(at::equal(chain_gradient(x, bits, seed, options, origin), back));
            const at::Tensor over = x.clone();
            chain_gradient_(over, bits, seed, options, origin);
            EXPECT_TRUE(at::equal(over, back));
          }
        }
      }
    }
  }
}

/// LeakyReLU's slope is not ELU's α, whichever way a method goes.
TEST(NormAct, LeakySlopeIsItsOwn) {
  at::manual_seed(6);
  const at::Tensor x = leaf({40, 16});
  const NormWeights weights{leaf({16}), leaf({16}), at::zeros({16}), at::ones({16})};
  NormActOptions options;
  options.activation = Activation::leaky_relu;
  options.slope = 0.2;
  for (const bool training : {true, false}) {
    options.statistics.training = training;
    for (const char* method : {"satchel", "exact", "fp32"}) {
      const at::Tensor y = at::batch_norm(x, weights.gamma, weights.beta, weights.running_mean.clone(), weights.running_var.clone(),
                                          training, 0.1, 1e-5, false);
      const at::Tensor out = norm_act(x, {weights.gamma, weights.beta, weights.running_mean.clone(), weights.running_var.clone()}, options,
                                      {parse_method(method), ""});
      EXPECT_TRUE(at::allclose(out, at::leaky_relu(y, 0.2), 1e-4, 1e-5)) << method << training;
    }
  }
}

}  // namespace
}  // namespace satchel::test
