// Detectors with torchvision's names of parameters: a state dict goes either way. Their ResNet-50 reads images; a feature pyramid gives
// maps of several strides; heads make of each place's anchors classes and boxes.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "satchel/models/boxes.h"
#include "satchel/models/resnet.h"
#include "satchel/plan/detector_shape.h"

namespace satchel {

struct DetectorOptions {
  std::string name = "retinanet_resnet50_fpn";  // one of detector_names(), plan/detector_shape.h
  int64_t classes = 91;                         // logits of an anchor; of Faster R-CNN class 0 is the background
  int64_t channels = 3;                         // of the images
  int64_t width = 64;                           // channels of the first stage; the pyramid has four times as many
  bool frozen_norm = false;                     // norms are constants, as where pretrained weights are tuned on few images a step
  int trainable = 5;                            // stages of the ResNet that are trained, as ResNetBodyOptions has it
  SavePolicy saving = {};                       // method and allocator of every layer; names are the parameters' prefixes
};
DetectorShape shape_of(const DetectorOptions& options);

/// What a forward pass gives its loss.
struct DetectorOutputs {
  std::vector<at::Tensor> maps;   // with a gradient: logits and boxes
  std::vector<at::Tensor> fixed;  // without one: what they are compared with, where the forward pass had to know it
};

class DetectorImpl : public torch::nn::Module {
 public:
  /// Of padded images (batch × channels × height × width). `targets`: their objects; Faster R-CNN chooses boxes to train on by them.
  virtual DetectorOutputs forward(const at::Tensor& images, const BoxTargets& targets) = 0;
  /// The sum of all losses. The memory of the maps may hold their gradients afterwards.
  virtual at::Tensor loss(DetectorOutputs outputs, const at::Tensor& images, const BoxTargets& targets) = 0;
  /// What is found in images of these heights and widths, without their padding: boxes in their pixels. At most `most` an image.
  virtual std::vector<Detections> detect(const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes, int64_t most) = 0;
  const DetectorOptions& options() const { return options_; }

 protected:
  explicit DetectorImpl(DetectorOptions options) : options_(std::move(options)) {}
  SavePolicy saving(const std::string& name) const;
  void check_images(const at::Tensor& images) const;

 private:
  DetectorOptions options_;
};
TORCH_MODULE(Detector);

/// Weights as torchvision initialises them, from torch's default generator; channels_last. Throws on a name or size that does not fit.
Detector make_detector(const DetectorOptions& options);

/// A convolution that several levels share: `level` tells their saves apart.
at::Tensor conv_at_level(const nn::Conv2d& conv, const at::Tensor& x, const std::string& level);

/// conv → ReLU, so many times, as a Sequential of Sequentials: "conv.0.0", "conv.1.0" …
class ConvTowerImpl : public torch::nn::Module {
 public:
  ConvTowerImpl(int64_t channels, int64_t count, const SavePolicy& saving);
  at::Tensor forward(at::Tensor x, const std::string& level);

 private:
  std::vector<nn::Conv2d> convs_;
  SavePolicy saving_;
};
TORCH_MODULE(ConvTower);

/// What stands above the pyramid's last map: two convolutions of stride 2 (RetinaNet), or every second place of it.
enum class PyramidTop : uint8_t { convolutions, pool };

/// ResNet with a feature pyramid: body.*, fpn.*.
class PyramidBackboneImpl : public torch::nn::Module {
 public:
  /// `first`: the stage whose map is the pyramid's largest.
  PyramidBackboneImpl(const DetectorOptions& options, int first, PyramidTop top);
  /// Maps, the largest first.
  std::vector<at::Tensor> forward(const at::Tensor& images);
  int64_t channels() const { return channels_; }

 private:
  nn::Conv2d add_conv(torch::nn::Module& to, const std::string& list, const std::string& name, const torch::nn::Conv2dOptions& options);
  at::Tensor up_add(const at::Tensor& above, at::Tensor lateral) const;

  SavePolicy saving_;
  int64_t channels_;
  std::vector<int> stages_;
  PyramidTop top_;
  ResNetBody body_ = nullptr;
  std::vector<nn::Conv2d> inner_, layer_;
  nn::Conv2d p6_ = nullptr, p7_ = nullptr;
};
TORCH_MODULE(PyramidBackbone);

class RetinaNetImpl : public DetectorImpl {
 public:
  explicit RetinaNetImpl(const DetectorOptions& options);
  DetectorOutputs forward(const at::Tensor& images, const BoxTargets& targets) override;
  at::Tensor loss(DetectorOutputs outputs, const at::Tensor& images, const BoxTargets& targets) override;
  std::vector<Detections> detect(const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes, int64_t most) override;
  /// Every class is rare at first, or the many anchors of no object would drown the others.
  void start_with_background();

 private:
  struct Maps {
    std::vector<at::Tensor> classes, boxes;  // one a level
  };
  Maps maps_of(const at::Tensor& images);
  /// Of each level.
  std::vector<at::Tensor> anchors_of(const at::Tensor& images, const std::vector<at::Tensor>& maps) const;

  PyramidBackbone backbone_ = nullptr;
  ConvTower class_tower_ = nullptr, box_tower_ = nullptr;
  nn::Conv2d class_logits_ = nullptr, box_reg_ = nullptr;
  std::vector<at::Tensor> base_;  // anchors of a place, one a level
};

}  // namespace satchel
