// DenseNet-121, as torchvision builds it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"

namespace satchel {

class DenseNetImpl : public ImageModelImpl {
 public:
  explicit DenseNetImpl(const ImageModelOptions& options);
  at::Tensor forward(const at::Tensor& x) override;

 private:
  /// norm → ReLU → conv.
  struct Step {
    nn::BatchNorm2d norm = nullptr;
    nn::Conv2d conv = nullptr;
  };
  /// Steps in pairs, each of which reads all maps before it; the transition that halves them (not after the last).
  struct Stage {
    std::vector<Step> layers;
    Step transition;
    std::string pool;
  };
  struct Sizes {
    int64_t in, out, window;
  };
  Step add_step(torch::nn::Module& to, const std::string& at, const std::string& number, const Sizes& sizes);
  int64_t add_block(Stage& stage, const std::string& number, int64_t channels, int64_t count);
  int64_t add_transition(Stage& stage, const std::string& number, int64_t channels);
  static at::Tensor run(Step& step, at::Tensor x);
  static at::Tensor dense(Stage& stage, const at::Tensor& x);

  std::shared_ptr<torch::nn::Module> features_;
  nn::Conv2d conv0_ = nullptr;
  nn::BatchNorm2d norm0_ = nullptr, norm5_ = nullptr;
  std::vector<Stage> stages_;
  nn::Linear classifier_ = nullptr;
};

}  // namespace satchel
