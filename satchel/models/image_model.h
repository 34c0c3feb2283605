// Image classifiers with torchvision's names of parameters: a state dict goes either way.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "satchel/autograd/save_policy.h"
#include "satchel/plan/image_shape.h"

namespace satchel {

struct ImageModelOptions {
  std::string name = "resnet18";       // of image_model_names() or segmentation_model_names(), plan/image_shape.h
  int64_t classes = 10, channels = 3;  // logits; channels of the images
  bool small_stem = false;             // for small images (CIFAR): 3×3 stride 1 and no pool; VGG: averaged to 1×1, not 7×7
  int64_t width = 64;                  // channels of the first stage
  std::optional<double> dropout = {};  // in front of the classifier's linear layers; not given: VGG's .5, else none
  SavePolicy saving = {};              // method and bit shares of every layer; names are the parameters' prefixes
  bool aux = false;                    // segmentation: an auxiliary head on the third stage, in training
};

/// The sizes in the options, as plan_image() takes them.
ImageShape shape_of(const ImageModelOptions& options);

/// A model that gives logits, batch × classes, from batch × channels × height × width (segmentation: segmentation.h). plan_image() tells
/// what it keeps.
class ImageModelImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  const ImageModelOptions& options() const { return options_; }

 protected:
  explicit ImageModelImpl(ImageModelOptions options) : options_(std::move(options)) {}
  /// What a layer of this name is told about saving.
  SavePolicy saving(const std::string& name) const;
  /// Throws unless x is a batch of images of as many channels as the options say.
  void check_images(const at::Tensor& x) const;
  /// Max-pool 3×3 of every second place, but with a small stem x itself.
  at::Tensor pool_stem(const at::Tensor& x, const std::string& name) const;
  /// Averages over side × side parts of each map, as rows.
  at::Tensor average(const at::Tensor& x, int64_t side) const;
  /// Dropout in front of the last layer, in training.
  at::Tensor drop(const at::Tensor& x) const;

 private:
  ImageModelOptions options_;
};
TORCH_MODULE(ImageModel);

/// Weights as torchvision initialises them, from torch's default generator; channels_last. Throws on a name or size that does not fit.
ImageModel make_image_model(const ImageModelOptions& options);

}  // namespace satchel
