// The shared gradient test with activations of 16 bits: a case's first input in bfloat16 or float16, its weights in float32.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "satchel/core/error.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {

/// The case with its first input rounded to bfloat16 or float16, and what is added to that.
inline GradientCase in_bf16(GradientCase c, at::ScalarType type = at::kBFloat16) {
  c.inputs = [make = c.inputs, type] {
    Inputs inputs = make();
    const auto sizes = inputs[0].sizes().vec();
    for (at::Tensor& t : inputs) {
      if (t.sizes() == at::IntArrayRef(sizes)) t = t.detach().to(type).requires_grad_();
    }
    return inputs;
  };
  return c;
}

/// Rounding to bfloat16 is off by 2^−8 at most, relatively, to float16 by 2^−11 or by 2^−25, and on no way from an input to a gradient are
/// there more than eight of them: input, norm, activation, dropout, weight, product, and the same back. Independent ones add up as squares
/// do.
inline void expect_rounded(const at::Tensor& got, const at::Tensor& want, const std::string& where, double roundings = 8,
                           at::ScalarType type = at::kBFloat16) {
  const at::Tensor exact = want.to(at::kDouble);
  const double off = (got.to(at::kDouble) - exact).norm().item<double>(), size = exact.norm().item<double>();
  const bool half = type == at::kHalf;
  const double least = half ? 0x1p-25 * std::sqrt(static_cast<double>(exact.numel())) : 0;
  EXPECT_LE(off, std::sqrt(roundings) * ((half ? 0x1p-11 : 0x1p-8) * size + least) + 1e-12) << where;  // NaN fails too
}

struct Passes {
  at::Tensor out;
  std::vector<at::Tensor> gradients;
};

/// Forward and backward of a case; `g` is rounded to bfloat16 wherever it is used.
inline Passes run_case(const GradientCase& c, const Inputs& inputs, const std::string& method, uint64_t seed) {
  first_seed(seed, c.device);
  const at::Tensor out = c.ours(inputs, {parse_method(method), "layer"});
  at::manual_seed(99);
  const at::Tensor g = at::randn(out.sizes()).to(at::kBFloat16).to(c.device);
  return {out.detach(), gradients_of(out, g, inputs)};
}

/// The same from torch's own functions in float64.
inline Passes run_torch(const GradientCase& c, const Inputs& inputs, uint64_t seed, at::ScalarType type = at::kDouble) {
  Inputs copies;
  for (const at::Tensor& t : inputs) copies.push_back(t.detach().to(type).requires_grad_());
  const at::Tensor out = c.torchs(copies, first_seed(seed, c.device));
  at::manual_seed(99);
  const at::Tensor g = at::randn(out.sizes()).to(at::kBFloat16).to(c.device);
  return {out.detach(), gradients_of(out, g, copies)};
}

inline void expect_rounded(const Passes& got, const Passes& want, const std::string& where, double roundings = 8,
                           at::ScalarType type = at::kBFloat16) {
  expect_rounded(got.out, want.out, where + ": output", roundings, type);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    expect_rounded(got.gradients[i], want.gradients[i], where + ": gradient " + std::to_string(i), roundings, type);
  }
}

/// Types as promised, and numbers within rounding of the exact ones.
inline void expect_bf16(const GradientCase& plain, const std::string& method, at::ScalarType type = at::kBFloat16) {
  const GradientCase c = in_bf16(plain, type);
  const Inputs inputs = c.inputs();
  const Passes got = run_case(c, inputs, method, 7);
  const std::string where = c.name + ", " + method;
  EXPECT_EQ(got.out.scalar_type(), type) << where;
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(got.gradients[i].scalar_type(), inputs[i].scalar_type()) << where << i;
  expect_rounded(got, run_torch(c, inputs, 7), where, 8, type);
}

}  // namespace satchel::test
