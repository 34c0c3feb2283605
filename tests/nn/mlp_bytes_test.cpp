// A transformer's MLP keeps a sixth of torch's bytes or less.
#include "tests/nn/mlp_bytes.h"

namespace satchel::test {
namespace {

TEST(MlpBytes, AreASixthOfTorchsOrLess) { expect_few_mlp_bytes(kMlpRows, at::kCPU, at::kFloat); }
TEST(MlpBytes, AreASixthOfTorchsOrLessInBf16) { expect_few_mlp_bytes(kMlpRows, at::kCPU, at::kBFloat16); }

}  // namespace
}  // namespace satchel::test
