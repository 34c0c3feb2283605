#include "tests/autograd/gradient.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/tensor/chain.h"
#include "satchel/train/memory.h"
#include "tests/one_thread.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

Inputs in_double(const Inputs& inputs) {
  Inputs copies;
  for (const at::Tensor& t : inputs) copies.push_back(t.detach().to(at::kDouble).requires_grad_(t.requires_grad()));
  return copies;
}

at::Tensor weights_of(const at::Tensor& out) {
  at::manual_seed(99);
  return at::randn(out.sizes(), at::kDouble).to(out.device());
}

struct Reference {
  at::Tensor out, g;
  std::vector<at::Tensor> gradients;
};

Reference reference_of(const GradientCase& c, const Inputs& inputs, uint64_t seed) {
  const Inputs doubles = in_double(inputs);
  const at::Tensor out = c.torchs(doubles, first_seed(seed, c.device));
  Reference r{out.detach(), weights_of(out), {}};
  r.gradients = gradients_of(out, r.g, doubles);
  return r;
}

at::Tensor run(const GradientCase& c, const Inputs& inputs, const std::string& method, uint64_t seed) {
  first_seed(seed, c.device);
  return c.ours(inputs, saving_of(method));
}

}  // namespace

std::function<Inputs()> fixed(at::Device device, std::function<Inputs()> make) {
  return [device, make] {
    at::manual_seed(17);
    Inputs inputs = make();
    for (at::Tensor& t : inputs) t = t.to(device).requires_grad_();
    return inputs;
  };
}

at::Tensor values_around(at::IntArrayRef shape, double offset) { return at::randn(shape).add_(offset); }

at::Tensor torch_activation(const at::Tensor& x, Activation activation, double slope) {
  switch (activation) {
    case Activation::relu: return at::relu(x);
    case Activation::leaky_relu: return at::leaky_relu(x, slope);
    case Activation::elu: return at::elu(x, slope);
    case Activation::none: return x;
  }
  return x;
}

at::Tensor first_seed(uint64_t seed, at::Device device) {
  at::manual_seed(seed);
  const at::Tensor first = fresh_seed(device);
  at::manual_seed(seed);
  return first;
}

at::Tensor dropout_factors(const at::Tensor& seed, at::IntArrayRef shape, double p) {
  return apply_chain(at::ones(shape, seed.device()), {}, {}, {}, p > 0 ? seed : at::Tensor(), {p, 1}).to(at::kDouble);
}

std::vector<at::Tensor> gradients_of(const at::Tensor& out, const at::Tensor& g, const Inputs& inputs, bool retain) {
  Inputs wanted;
  for (const at::Tensor& t : inputs) {
    if (t.requires_grad()) wanted.push_back(t);
  }
  auto gradients = torch::autograd::grad({out}, wanted, {g.to(out.scalar_type())}, retain, /*create_graph=*/false, /*allow_unused=*/true);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(wanted[i]);  // no part in `out`
  }
  return gradients;
}

void expect_exact(const GradientCase& c, const std::string& method) {
  const Inputs inputs = c.inputs();
  const Reference want = reference_of(c, inputs, 7);
  const at::Tensor out = run(c, inputs, method, 7);
  // float32 sums of at most a few hundred terms of order 1, each rounded to 2^−24: well below 2^−14 of the largest.
  const auto expect_close = [&](const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
    const double bound = std::ldexp(std::max(wanted.abs().max().item<double>(), 1.0), -14);
    EXPECT_LE((got.to(at::kDouble) - wanted).abs().max().item<double>(), bound) << c.name << ", " << method << ": " << what;
  };
  expect_close(out, want.out, "output");
  const auto got = gradients_of(out, want.g, inputs);
  ASSERT_EQ(got.size(), want.gradients.size());
  for (size_t i = 0; i < got.size(); ++i) expect_close(got[i], want.gradients[i], "gradient " + std::to_string(i));
}

void expect_unbiased(const GradientCase& c, const std::string& method) {
  constexpr int kSeeds = 200;
  const OneThread one_thread;
  const Inputs inputs = c.inputs();
  const auto expected = [&](uint64_t seed) {
    Reference r = reference_of(c, inputs, seed);
    if (c.expected_first) r.gradients[0] = c.expected_first(inputs, r.g, first_seed(seed, c.device), parse_method(method));
    return r;
  };
  Reference want = expected(1000);
  const bool drawn = !at::equal(want.out, reference_of(c, inputs, 1001).out);  // dropout, from the save's own seed: made anew for each
  std::vector<std::vector<double>> sums;                                       // of every direction, over seeds: sum and sum of squares
  for (int s = 0; s < kSeeds; ++s) {
    if (drawn && s > 0) want = expected(1000 + static_cast<uint64_t>(s));
    const auto got = gradients_of(run(c, inputs, method, 1000 + static_cast<uint64_t>(s)), want.g, inputs);
    at::manual_seed(5);
    size_t direction = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const at::Tensor error = got[i].to(at::kDouble) - want.gradients[i];
      for (const at::Tensor& along : {want.gradients[i], at::randn(error.sizes(), at::kDouble).to(c.device)}) {
        if (sums.size() <= direction) sums.resize(direction + 1, {0, 0, 0});
        const double t = (error * along).sum().item<double>(),
                     scale = along.norm().item<double>() * want.gradients[i].norm().item<double>();
        sums[direction][0] += t;
        sums[direction][1] += t * t;
        sums[direction][2] = std::max(sums[direction][2], scale);
        ++direction;
      }
    }
  }
  for (size_t d = 0; d < sums.size(); ++d) {
    const double mean = sums[d][0] / kSeeds, var = std::max(0.0, sums[d][1] / kSeeds - mean * mean);
    // z of a mean of 200 draws; 10^−6 two-sided is 4.9 for a normal, 5.05 for t with 199 degrees. Beside it float32's rounding.
    const double bound = 5.05 * std::sqrt(var / (kSeeds - 1)) + std::ldexp(sums[d][2], -18);
    EXPECT_LE(std::abs(mean), bound) << c.name << ", " << method << ", direction " << d << " of " << sums.size();
  }
}

void expect_retained(const GradientCase& c, const std::string& method) {
  const Inputs inputs = c.inputs();
  const at::Tensor out = run(c, inputs, method, 3), g = weights_of(out);
  const auto first = gradients_of(out, g, inputs, /*retain=*/true);
  const auto second = gradients_of(out, g, inputs);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << c.name << ", " << method;
  EXPECT_ANY_THROW(gradients_of(out, g, inputs)) << c.name << ", " << method;
}

void expect_bytes(const GradientCase& c, const std::string& method) {
  const Inputs inputs = c.inputs();
  first_seed(3, c.device);
  c.ours(inputs, saving_of(method));  // tables and the like are made once
  first_seed(3, c.device);
  const MemoryMeter meter(at::kCPU);
  const at::Tensor out = c.ours(inputs, saving_of(method));
  const int64_t kept = meter.allocated() - static_cast<int64_t>(out.nbytes());
  EXPECT_EQ(kept, total_bytes(saved_tensors(out))) << c.name << ", " << method;
  gradients_of(out, at::ones_like(out), inputs);
  EXPECT_EQ(meter.allocated(), static_cast<int64_t>(out.nbytes())) << c.name << ", " << method << ": backward frees what was kept";
}

void expect_nothing_without_gradients(const GradientCase& c, const std::string& method) {
  Inputs inputs = c.inputs();
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(run(c, inputs, method, 3).requires_grad()) << c.name;
  }
  for (at::Tensor& t : inputs) t = t.detach();
  first_seed(3, c.device);
  const MemoryMeter meter(at::kCPU);
  const at::Tensor out = c.ours(inputs, saving_of(method));
  EXPECT_EQ(meter.allocated(), static_cast<int64_t>(out.nbytes())) << c.name << ", " << method;
}

}  // namespace satchel::test
