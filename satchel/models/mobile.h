// MobileNetV2 and EfficientNet-B0, as torchvision builds them: blocks that widen, filter each channel by itself, in EfficientNet multiply
// channels by a gate that is made from their means (squeeze-and-excitation), and narrow again without an activation.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"
#include "satchel/plan/mobile_shape.h"

namespace satchel {

class MobileImpl : public ImageModelImpl {
 public:
  explicit MobileImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  /// conv → norm, and the activation's name: none where it has none.
  struct Step {
    nn::Conv2d conv = nullptr;
    nn::BatchNorm2d norm = nullptr;
    std::string act;
  };
  struct Gate {
    nn::Conv2d fc1 = nullptr, fc2 = nullptr;
    std::string at;
  };
  struct Block {
    MobileBlock shape;
    std::vector<Step> wide;  // widens, where the block does, and filters
    Gate gate;
    Step narrow;
  };
  struct ConvSizes {
    int64_t in, out, window = 1, stride = 1, groups = 1;
  };

  /// Registers the module under a path of names, "features.1.conv.0.0".
  template <class Layer>
  Layer add(const std::string& path, Layer module);
  /// `conv`, `norm` and `act` are paths.
  Step add_step(const std::string& conv, const std::string& norm, const std::string& act, const ConvSizes& sizes);
  Gate add_gate(const std::string& at, int64_t channels, int64_t squeezed);
  Block add_block(const MobileBlock& shape);

  at::Tensor run(Step& step, at::Tensor x) const;
  at::Tensor run(Gate& gate, const at::Tensor& x) const;
  at::Tensor run(Block& block, const at::Tensor& x) const;
  at::Tensor activate(const at::Tensor& x, const std::string& name) const;

  bool silu_;
  Step stem_, head_;
  std::vector<Block> blocks_;
  nn::Linear classifier_ = nullptr;
};

}  // namespace satchel
