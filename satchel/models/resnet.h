// ResNet-18, 34, 50 and 152, as torchvision builds them.
#pragma once

#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"

namespace satchel {

/// conv → norm → ReLU twice or, with a bottleneck, three times; the last ReLU is of the sum with the block's input.
class ResNetBlockImpl : public torch::nn::Module {
 public:
  struct Sizes {
    int64_t in, planes, out, stride;
    bool bottleneck;
  };
  /// `saving.name` is the block's own: "layer1.0".
  ResNetBlockImpl(const Sizes& sizes, const SavePolicy& saving);
  at::Tensor forward(at::Tensor x);

 private:
  nn::Conv2d add_conv(const std::string& name, const torch::nn::Conv2dOptions& options);
  nn::BatchNorm2d add_norm(const std::string& name, int64_t channels);
  void add_downsample(const Sizes& sizes);
  SavePolicy named(const std::string& name) const;

  SavePolicy saving_;
  std::vector<nn::Conv2d> convs_;
  std::vector<nn::BatchNorm2d> norms_;
  nn::Conv2d skip_conv_ = nullptr;  // where the sum needs the input in other sizes
  nn::BatchNorm2d skip_norm_ = nullptr;
};
TORCH_MODULE(ResNetBlock);

class ResNetImpl : public ImageModelImpl {
 public:
  explicit ResNetImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  void add_stages();

  nn::Conv2d conv1_;
  nn::BatchNorm2d bn1_;
  std::vector<ResNetBlock> blocks_;
  nn::Linear fc_ = nullptr;
};

}  // namespace satchel
