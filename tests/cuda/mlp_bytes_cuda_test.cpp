// A transformer's MLP keeps a sixth of torch's bytes or less, on the GPU as on the CPU.
#include "cuda_fixture.h"
#include "tests/nn/mlp_bytes.h"

namespace satchel {
namespace {

TEST_F(Cuda, MlpBytesAreASixthOfTorchsOrLess) { test::expect_few_mlp_bytes(test::kMlpRows, at::kCUDA, at::kFloat); }
TEST_F(Cuda, MlpBytesAreASixthOfTorchsOrLessInBf16) { test::expect_few_mlp_bytes(test::kMlpRows, at::kCUDA, at::kBFloat16); }

}  // namespace
}  // namespace satchel
