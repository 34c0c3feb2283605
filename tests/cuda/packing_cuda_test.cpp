// The guard on CUDA tensors: forms as on the CPU, and a row whose node only a GPU makes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "satchel/autograd/packing.h"
#include "satchel/autograd/seeds.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

struct Result {
  std::map<std::string, std::string> kept;
  int64_t before, after;
  at::Tensor gradient;
};

/// Convolution, norm, ReLU, pool, linear, GELU, layer norm, attention.
Result run(at::Device device, bool packs) {
  at::manual_seed(1);
  const SeedRun seeds(3);
  const auto weight = [&](at::IntArrayRef shape) { return (at::randn(shape) / 8).to(device).requires_grad_(); };
  const at::Tensor x = at::randn({8, 3, 32, 32}).to(device), w = weight({16, 3, 3, 3}), v = weight({64, 16 * 16}),
                   one = at::ones({16}).to(device);
  const Packing packing(packs ? PackingOptions{} : PackingOptions{.local = 32, .flow = 32, .attention = 32});
  at::Tensor h = at::relu(at::batch_norm(at::conv2d(x, w, {}, 1, 1), one, one, {}, {}, true, 0.1, 1e-5, true));
  h = at::gelu(at::linear(at::max_pool2d(h, {2}).flatten(2), v));  // 8 × 16 × 64
  h = at::layer_norm(h, {64}).view({8, 4, 4, 64}).transpose(1, 2);
  at::scaled_dot_product_attention(h, h * 2, h + 1).square().sum().backward();
  std::map<std::string, std::string> kept;
  for (const PackingLine& line : packing.report().lines) kept[line.node + "." + line.field] = line.kept;
  return {kept, packing.report().before(), packing.report().after(), w.grad().to(at::kCPU)};
}

TEST(PackingCuda, KeepsFourTimesLessAndGivesGradients) {
  const Result exact = run(at::kCUDA, false), packed = run(at::kCUDA, true);
  EXPECT_GT(packed.before, 4 * packed.after);
  EXPECT_LT((packed.gradient - exact.gradient).norm().item<double>(), 0.5 * exact.gradient.norm().item<double>());
  EXPECT_EQ(packed.kept.at("ConvolutionBackward0.input"), "2 bits");
  EXPECT_EQ(packed.kept.at("ReluBackward0.result"), "mask");
  EXPECT_EQ(packed.kept.at("GeluBackward0.self"), "slope, 4 bits");
  EXPECT_EQ(packed.kept.at("MaxPool2DWithIndicesBackward0.result1"), "index, 10 bits");
}

TEST(PackingCuda, PacksTheFusedRmsNorm) {
  const at::Tensor x = at::randn({64, 96}).to(at::kCUDA), w = at::randn({96, 96}).to(at::kCUDA).requires_grad_();
  const Packing packing;
  const at::Tensor loss = std::get<0>(at::_fused_rms_norm(at::mm(x, w), {96}, {}, 1e-5)).square().sum();
  std::map<std::string, std::string> kept;
  for (const PackingLine& line : packing.report().lines) kept[line.node + "." + line.field] = line.kept;
  EXPECT_EQ(kept.at("FusedRmsNormBackward0.input"), "4 bits");
  loss.backward();
}

TEST(PackingCuda, KeepsWhatTheCpuKeeps) {
  const Result cpu = run(at::kCPU, true), cuda = run(at::kCUDA, true);
  for (const char* row : {"ConvolutionBackward0.input", "ReluBackward0.result", "GeluBackward0.self"}) {
    ASSERT_TRUE(cpu.kept.contains(row) && cuda.kept.contains(row)) << row;
    EXPECT_EQ(cuda.kept.at(row), cpu.kept.at(row)) << row;
  }
}

}  // namespace
}  // namespace satchel::test
