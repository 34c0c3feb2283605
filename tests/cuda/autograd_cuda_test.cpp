// The shared gradient test of every function, on CUDA.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "satchel/autograd/conv.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/core/method.h"
#include "tests/autograd/gradient.h"
#include "tests/cuda/cuda_fixture.h"

namespace satchel::test {
namespace {

/// Convolutions in full float32, by algorithms that repeat to the bit.
class CudaGradients : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
  }
  void TearDown() override {
    at::globalContext().setAllowTF32CuDNN(true);
    at::globalContext().setDeterministicCuDNN(false);
  }
};

TEST_F(CudaGradients, EqualTorchAt32Bits) {
  for (const GradientCase& c : all_cases(at::kCUDA)) {
    for (const std::string& method : c.exact_methods) expect_exact(c, method);
  }
}

TEST_F(CudaGradients, AreRightOnAverage) {
  for (const GradientCase& c : all_cases(at::kCUDA)) {
    for (const char* method : {"satchel", "satchel,bits=3", "blockwise"}) {
      if (std::find(c.noisy_methods.begin(), c.noisy_methods.end(), method) != c.noisy_methods.end()) expect_unbiased(c, method);
    }
  }
}

/// The end of a residual block whose maps are large enough for parts of the batch.
std::vector<at::Tensor> block_end_gradients(at::ScalarType type, bool whole) {
  at::manual_seed(7);
  const at::TensorOptions here = at::TensorOptions(at::kCUDA);
  const auto leaf = [&](at::Tensor t) { return t.to(type).detach().requires_grad_(); };
  const auto line = [&](double value) { return at::full({256}, value, here).requires_grad_(); };
  const int64_t samples = type == at::kFloat ? 96 : 190;
  const at::Tensor x = leaf(at::randn({samples, 64, 56, 56}, here).contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor skip = leaf(at::randn({samples, 256, 56, 56}, here).contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor weight = leaf(at::randn({256, 64, 1, 1}, here) / 8);
  const NormWeights before{at::ones({64}, here), at::zeros({64}, here), {}, {}}, after{line(0.5), line(0.1), {}, {}};
  const SavePolicy saving{parse_method("satchel"), "layer", {}};
  at::Tensor h = conv(norm_act(x * 1, before, {}, saving), weight, {}, {}, saving);
  const at::Tensor held = whole ? h : at::Tensor();  // another reader may come: then the gradient is handed over whole
  const at::Tensor z = norm_add_act(std::move(h), after, skip, {}, saving);
  at::manual_seed(8);
  z.backward(at::randn(z.sizes(), here).to(type).contiguous(at::MemoryFormat::ChannelsLast));
  return {x.grad(), skip.grad(), weight.grad(), after.gamma.grad(), after.beta.grad()};
}

TEST_F(CudaGradients, ByPartsOfTheBatchAreThoseOfTheWhole) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const std::vector<at::Tensor> whole = block_end_gradients(type, true), parts = block_end_gradients(type, false);
    const double tolerance = type == at::kFloat ? 1e-5 : 1e-2;  // products in another order, rounded to the type
    for (size_t i = 0; i < whole.size(); ++i) {
      const double off = (whole[i].to(at::kFloat) - parts[i].to(at::kFloat)).abs().max().item<double>();
      EXPECT_LE(off, tolerance * whole[i].abs().max().item<double>()) << type << ", gradient " << i;
    }
    EXPECT_TRUE(at::equal(whole[1], parts[1])) << "the skip's";
  }
}

TEST_F(CudaGradients, AreTheSameAgainWithRetainGraph) {
  for (const GradientCase& c : all_cases(at::kCUDA)) {
    if (c.name.starts_with("pad ")) continue;  // torch's own gradient of a padding adds in any order on CUDA
    for (const std::string& method : c.noisy_methods) expect_retained(c, method);
  }
}

}  // namespace
}  // namespace satchel::test
