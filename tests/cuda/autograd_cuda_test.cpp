// The shared gradient test of every function, on CUDA.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/autograd/gradient.h"
#include "tests/cuda/cuda_fixture.h"

namespace satchel::test {
namespace {

TEST_F(Cuda, GradientsEqualTorchAt32Bits) {
  for (const GradientCase& c : autograd_cases(at::kCUDA)) {
    for (const std::string& method : c.exact_methods) expect_exact(c, method);
  }
}

TEST_F(Cuda, GradientsAreRightOnAverage) {
  for (const GradientCase& c : autograd_cases(at::kCUDA)) {
    for (const char* method : {"satchel", "blockwise"}) {
      if (std::find(c.noisy_methods.begin(), c.noisy_methods.end(), method) != c.noisy_methods.end()) expect_unbiased(c, method);
    }
  }
}

TEST_F(Cuda, GradientsAreTheSameAgainWithRetainGraph) {
  for (const GradientCase& c : autograd_cases(at::kCUDA)) {
    for (const std::string& method : c.noisy_methods) expect_retained(c, method);
  }
}

}  // namespace
}  // namespace satchel::test
