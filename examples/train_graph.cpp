// Trains a GraphSAGE of one's own on a graph of one's own. One line chooses what is kept for backward.
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adam.h>

#include <cstdio>

#include "satchel/satchel.h"

int main() {
  torch::manual_seed(1);
  const satchel::SavePolicy saving{satchel::parse_method("satchel")};  // or fp32, exact, blockwise, "satchel,bits=3" …

  // 4,000 nodes in four communities: three edges of four stay inside, and the features are almost noise.
  const at::Tensor label = at::arange(4000).remainder(4), from = at::randint(4000, {20000});
  const at::Tensor to = (from + 4 * at::randint(1, 1000, {20000}) + (at::rand({20000}) < 0.25)).remainder(4000).to(at::kLong);
  const satchel::Adjacency a = satchel::mean_adjacency(satchel::made_symmetric(satchel::csr_from_coo(from, to, 4000, 4000)));
  const satchel::GraphInput x{.x = at::randn({4000, 32}) + at::one_hot(label, 32)};

  satchel::SageConv first(satchel::SageOptions{.in = 32, .out = 64, .saving = saving});
  satchel::nn::NormAct between(satchel::nn::NormActOptions{.channels = 64, .dropout = 0.5, .saving = saving});  // and BatchNorm, ReLU
  satchel::SageConv second(satchel::SageOptions{.in = 64, .out = 4, .saving = saving});
  torch::nn::ModuleList net(first, between, second);
  const auto logits = [&] { return second(between(first->forward_data(x, a)), a); };

  torch::optim::Adam optimizer(net->parameters(), 0.01);
  for (int epoch = 1; epoch <= 30; ++epoch) {
    const at::Tensor loss = satchel::cross_entropy(logits(), label, at::arange(2000));
    if (epoch == 1) std::printf("kept for backward: %ld bytes\n", satchel::total_bytes(satchel::saved_tensors(loss)));
    optimizer.zero_grad(), loss.backward(), optimizer.step();
  }
  net->eval();
  const double right = logits().argmax(1).eq(label).narrow(0, 2000, 2000).to(at::kFloat).mean().item<double>();
  std::printf("%.1f %% of the unseen nodes are right\n", 100 * right);
  return right > 0.8 ? 0 : 1;
}
