// Trains a transformer of torch's own modules, with torch's saves and with packed ones. The guard is the only line that differs.
#include "satchel/autograd/packing.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/adam.h>

#include <cstdio>
#include <iostream>
#include <optional>

namespace {

/// Tells four kinds of sequences apart: 12 steps × batch × 32 values of a kind's pattern under noise.
struct Classifier : torch::nn::Module {
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear head{nullptr};

  Classifier() {
    torch::nn::TransformerEncoderLayerOptions layer(32, 4);
    layer.dim_feedforward(128).dropout(0).activation(torch::kGELU);
    encoder = register_module("encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderLayer(layer), 2));
    head = register_module("head", torch::nn::Linear(32, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return head(encoder(x).mean(0)); }
};

struct Result {
  double loss = 0;
  satchel::PackingReport report;
};

Result train(bool packs) {
  torch::manual_seed(1);
  Classifier model;
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-3));
  const at::Tensor patterns = at::randn({4, 12, 1, 32}), labels = at::arange(64).remainder(4);
  Result result;
  for (int step = 0; step < 30; ++step) {
    const at::Tensor x = patterns.index_select(0, labels).squeeze(2).transpose(0, 1) + at::randn({12, 64, 32});
    std::optional<satchel::Packing> packing;
    if (packs) packing.emplace();  // satchel::PackingOptions{.local = 2, .flow = 4, .attention = 8}
    const at::Tensor loss = at::cross_entropy_loss(model.forward(x), labels);
    if (packs) result.report = packing->report();
    packing.reset();
    optimizer.zero_grad(), loss.backward(), optimizer.step();
    result.loss = loss.item<double>();
  }
  return result;
}

}  // namespace

int main() {
  at::set_num_threads(1);  // a model this small is not worth waiting for a second one
  const Result plain = train(false), packed = train(true);
  std::cout << packed.report;
  std::printf("loss after 30 steps: torch's saves %.4f, packed %.4f\n", plain.loss, packed.loss);
  return packed.loss < 0.5 && packed.report.before() > 4 * packed.report.after() ? 0 : 1;
}
