// Norm → activation → dropout as a module: what stands between two layers, with one save.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/norm_act.h"

namespace satchel::nn {

struct NormActOptions {
  int64_t channels = 0;
  Norm norm = Norm::batch;
  Activation activation = Activation::relu;
  double slope = 0.01;  // LeakyReLU's
  double alpha = 1;     // ELU's
  double dropout = 0;
  double eps = 1e-5, momentum = 0.1;
  Saving saving = {};
};

/// Parameters and buffers as torch's BatchNorm1d and LayerNorm name them: weight, bias, running_mean, running_var.
class NormActImpl : public torch::nn::Module {
 public:
  explicit NormActImpl(const NormActOptions& options);
  void reset_parameters();
  /// The next layer's input from rows × channels. forward(std::move(x)) may reuse x's memory.
  at::Tensor forward(at::Tensor x);
  void pretty_print(std::ostream& stream) const override;

  NormActOptions options;

 private:
  NormWeights weights_;
};
TORCH_MODULE(NormAct);

}  // namespace satchel::nn
