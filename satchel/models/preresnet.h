// ResNet-56 and ResNet-164 for CIFAR with norm and ReLU in front of each convolution (He et al., Identity mappings in deep residual
// networks): a 3×3 stem, three stages of 16, 32 and 64 channels, a norm at the end. Of 56 layers blocks have two convolutions, of 164
// layers three.
//
// torchvision has no such networks. Parameters are named as ActNN's program names them, whose tables they are in, and as torchvision would:
// conv1, layer1.0.bn1, layer1.0.conv1, …, layer2.0.downsample.0, bn, fc.
#pragma once

#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"

namespace satchel {

/// norm → ReLU → conv twice or, with a bottleneck, three times, and the block's input added. Where sizes change, a 1×1 convolution of the
/// first ReLU's result is added instead.
class PreResNetBlockImpl : public torch::nn::Module {
 public:
  struct Sizes {
    int64_t in, planes, out, stride;
    bool bottleneck;
  };
  /// `saving.name` is the block's own: "layer1.0".
  PreResNetBlockImpl(const Sizes& sizes, const SavePolicy& saving);
  at::Tensor forward(const at::Tensor& x);

 private:
  struct ConvSizes {
    int64_t in, out, window, stride;
  };
  void add_step(const ConvSizes& sizes);
  SavePolicy named(const std::string& name) const;

  SavePolicy saving_;
  std::vector<nn::BatchNorm2d> norms_;
  std::vector<nn::Conv2d> convs_;
  nn::Conv2d downsample_ = nullptr;
};
TORCH_MODULE(PreResNetBlock);

class PreResNetImpl : public ImageModelImpl {
 public:
  explicit PreResNetImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  nn::Conv2d conv1_ = nullptr;
  std::vector<PreResNetBlock> blocks_;
  nn::BatchNorm2d bn_ = nullptr;
  nn::Linear fc_ = nullptr;
};

}  // namespace satchel
