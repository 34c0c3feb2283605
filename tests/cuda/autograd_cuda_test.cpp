// The shared gradient test of every function, on CUDA.
#include <gtest/gtest.h>

#include <algorithm>

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

TEST_F(CudaGradients, AreTheSameAgainWithRetainGraph) {
  for (const GradientCase& c : all_cases(at::kCUDA)) {
    if (c.name.starts_with("pad ")) continue;  // torch's own gradient of a padding adds in any order on CUDA
    for (const std::string& method : c.noisy_methods) expect_retained(c, method);
  }
}

}  // namespace
}  // namespace satchel::test
