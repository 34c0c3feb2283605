// VGG-16 with and without BatchNorm, as torchvision builds it.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"

namespace satchel {

class VggImpl : public ImageModelImpl {
 public:
  explicit VggImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  /// A convolution and what follows it; `at` is the number in `features` of its norm or ReLU.
  struct Step {
    nn::Conv2d conv = nullptr;
    nn::BatchNorm2d norm = nullptr;
    size_t at = 0;
    bool pooled = false;
  };
  void add_features();
  void add_classifier();
  at::Tensor run(Step& step, const at::Tensor& x);

  torch::nn::Sequential features_, classifier_;
  std::vector<Step> steps_;
  std::vector<nn::Linear> linears_;
};

}  // namespace satchel
