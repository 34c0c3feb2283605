// ResNets, as torchvision builds them: the body, which other models read by stages, and the classifier.
#pragma once

#include <array>
#include <span>
#include <string>
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
    int64_t in, planes, out, stride, dilation;  // dilation: of a bottleneck's 3×3 convolution
    bool bottleneck;
    bool frozen_norm = false;
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
  bool frozen_norm_;
  std::vector<nn::Conv2d> convs_;
  std::vector<nn::BatchNorm2d> norms_;
  nn::Conv2d skip_conv_ = nullptr;  // where the sum needs the input in other sizes
  nn::BatchNorm2d skip_norm_ = nullptr;
};
TORCH_MODULE(ResNetBlock);

struct ResNetBodyOptions {
  std::string name = "resnet50";  // of a ResNet, plan/image_shape.h
  int64_t channels = 3, width = 64;
  bool small_stem = false;
  std::array<bool, 3> dilate = {};  // stages 2, 3 and 4: windows spread out instead of every second place left out
  SavePolicy saving = {};           // `name` is a prefix: "backbone." gives "backbone.layer1.0.conv1"
  bool frozen_norm = false;         // norms are constants (nn::BatchNorm2d::frozen)
  int trainable = 5;                // stages that are trained, from the last one back, the stem being the fifth; those below keep nothing
};

/// Stem and stages: conv1, bn1, layer1 … layer4.
class ResNetBodyImpl : public torch::nn::Module {
 public:
  explicit ResNetBodyImpl(const ResNetBodyOptions& options);
  /// The last stage's map of images batch × channels × height × width.
  at::Tensor forward(const at::Tensor& images);
  /// The maps of some stages, 1 to 4 and rising; stages after the last of them do not run.
  std::vector<at::Tensor> stages(const at::Tensor& images, std::span<const int> wanted);
  int64_t channels_of(int stage) const { return channels_.at(static_cast<size_t>(stage - 1)); }

 private:
  void add_stages();
  void freeze_stages();
  SavePolicy named(const std::string& name) const;

  ResNetBodyOptions options_;
  nn::Conv2d conv1_;
  nn::BatchNorm2d bn1_;
  std::vector<std::vector<ResNetBlock>> stages_;
  std::vector<int64_t> channels_;  // that a stage gives
};
TORCH_MODULE(ResNetBody);

class ResNetImpl : public ImageModelImpl {
 public:
  explicit ResNetImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  ResNetBody body_;  // its layers are this module's own, so that names are torchvision's
  nn::Linear fc_ = nullptr;
};

}  // namespace satchel
