// The one test that every function passes (theory.md 12; tiny-cuda-nn's habit): a case says how to call it and what torch would do.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel::test {

using Inputs = std::vector<at::Tensor>;

struct GradientCase {
  at::Device device;
  std::string name;
  /// Leaves that need gradients; fresh ones every call.
  std::function<Inputs()> inputs;
  /// The function under test. It is called right after manual_seed(seed).
  std::function<at::Tensor(const Inputs&, const SavePolicy&)> ours;
  /// The same from torch's own functions in float64; `seed` is the one that ours draws first after manual_seed(seed).
  std::function<at::Tensor(const Inputs&, const at::Tensor& seed)> torchs;
  std::vector<std::string> exact_methods;  // at 32 bits: gradients equal torch's
  std::vector<std::string> noisy_methods;  // right on average
  /// The gradient of inputs[0] that is expected of a norm, whose formula reads its values twice (theory.md 8); none: torch's.
  std::function<at::Tensor(const Inputs&, const at::Tensor& g, const at::Tensor& seed, const Method&)> expected_first = {};
};

/// Of rows; of convolutions and pools; of norms and activations on maps.
std::vector<GradientCase> autograd_cases(at::Device device = at::kCPU);
std::vector<GradientCase> conv_cases(at::Device device = at::kCPU);
std::vector<GradientCase> map_cases(at::Device device = at::kCPU);
/// All of them.
std::vector<GradientCase> all_cases(at::Device device = at::kCPU);

/// A case with one of its methods, for TEST_P; googletest prints the name.
struct CaseMethod {
  std::string name;
  GradientCase c;
  std::string method;
};
void PrintTo(const CaseMethod& p, std::ostream* out);
/// Of all cases on the CPU, which are made once.
std::vector<CaseMethod> with_exact_methods();
std::vector<CaseMethod> with_noisy_methods();

/// A case's inputs, leaves on `device`: the same every time and on every device.
std::function<Inputs()> fixed(at::Device device, std::function<Inputs()> make);
/// Normal values around `offset`, for such inputs.
at::Tensor values_around(at::IntArrayRef shape, double offset = 0);
/// torch's; `slope` is ELU's α too.
at::Tensor torch_activation(const at::Tensor& x, Activation activation, double slope);

/// Sets torch's generator and gives the seed that the first save will draw.
at::Tensor first_seed(uint64_t seed, at::Device device);

/// What dropout multiplies with: 0 or 1/keep, for that seed, as float64 of this shape.
at::Tensor dropout_factors(const at::Tensor& seed, at::IntArrayRef shape, double p);

/// Gradients of Σ out·g with respect to the inputs.
std::vector<at::Tensor> gradients_of(const at::Tensor& out, const at::Tensor& g, const Inputs& inputs, bool retain = false);

/// The parts of the shared test.
void expect_exact(const GradientCase& c, const std::string& method);
void expect_unbiased(const GradientCase& c, const std::string& method);
void expect_retained(const GradientCase& c, const std::string& method);
void expect_bytes(const GradientCase& c, const std::string& method);
void expect_nothing_without_gradients(const GradientCase& c, const std::string& method);

}  // namespace satchel::test
