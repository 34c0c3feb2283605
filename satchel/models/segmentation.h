// FCN and DeepLabV3 on dilated ResNets, as torchvision builds them.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <string>
#include <vector>

#include "satchel/models/resnet.h"

namespace satchel {

/// A convolution, its norm and their ReLU.
struct ConvNormRelu {
  nn::Conv2d conv = nullptr;
  nn::BatchNorm2d norm = nullptr;
  at::Tensor operator()(const at::Tensor& x) { return norm->forward_act(conv->forward(x), Activation::relu); }
};

/// 3×3 convolution to a quarter of the channels, norm, ReLU, dropout, 1×1 convolution to the classes.
class FcnHeadImpl : public torch::nn::Module {
 public:
  /// `saving.name` is the head's own: "classifier".
  FcnHeadImpl(int64_t channels, int64_t classes, double dropout, const SavePolicy& saving);
  at::Tensor forward(const at::Tensor& x);

 private:
  SavePolicy saving_;
  double dropout_;
  ConvNormRelu first_;
  nn::Conv2d last_ = nullptr;
};
TORCH_MODULE(FcnHead);

/// Windows of four reaches and the map's mean beside each other (atrous spatial pyramid pooling), then as FcnHead.
class DeepLabHeadImpl : public torch::nn::Module {
 public:
  DeepLabHeadImpl(int64_t channels, int64_t width, int64_t classes, double dropout, const SavePolicy& saving);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor pyramid(const at::Tensor& x);

  SavePolicy saving_;
  double dropout_;
  std::vector<ConvNormRelu> parts_;  // the last one of the mean
  ConvNormRelu project_, first_;
  nn::Conv2d last_ = nullptr;
};
TORCH_MODULE(DeepLabHead);

/// In evaluation mode forward() gives logits of the images' own size, batch × classes × height × width. In training mode it gives what
/// pixel_loss() reads (autograd/pixel_loss.h): logits at an eighth of that size, with the auxiliary head's behind them where there is one,
/// batch × heads·classes × height/8 × width/8. The large ones would be kept otherwise.
class SegmentationImpl : public ImageModelImpl {
 public:
  explicit SegmentationImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& images) override;

 private:
  ResNetBody backbone_;
  FcnHead fcn_ = nullptr;  // one of them
  DeepLabHead deeplab_ = nullptr;
  FcnHead aux_ = nullptr;
};

}  // namespace satchel
