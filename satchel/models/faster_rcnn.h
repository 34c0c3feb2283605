// Faster R-CNN: proposals from every place of the pyramid's maps, then a class and a box for each of the best.
#pragma once

#include <vector>

#include "satchel/models/detection.h"
#include "satchel/nn/linear.h"

namespace satchel {

class FasterRcnnImpl : public DetectorImpl {
 public:
  explicit FasterRcnnImpl(const DetectorOptions& options);
  DetectorOutputs forward(const at::Tensor& images, const BoxTargets& targets) override;
  at::Tensor loss(DetectorOutputs outputs, const at::Tensor& images, const BoxTargets& targets) override;
  std::vector<Detections> detect(const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes, int64_t most) override;

 private:
  struct Maps {
    std::vector<at::Tensor> features, objectness, codes;  // one a level
  };
  /// Boxes of all images, and whose they are.
  struct Regions {
    at::Tensor boxes, image;  // float32 count × 4, int64
  };
  Maps maps_of(const at::Tensor& images);
  std::vector<at::Tensor> anchors_of(const at::Tensor& images, const std::vector<at::Tensor>& maps) const;
  /// The best boxes of each image, float32 rows; without gradients.
  std::vector<at::Tensor> proposals_of(const Maps& maps, const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes,
                                       int64_t candidates, int64_t most) const;
  /// Logits and codes of regions: count × classes, count × 4·classes.
  std::pair<at::Tensor, at::Tensor> heads_of(const Maps& maps, const at::Tensor& images, const Regions& regions);

  PyramidBackbone backbone_ = nullptr;
  ConvTower rpn_conv_ = nullptr;
  nn::Conv2d rpn_logits_ = nullptr, rpn_boxes_ = nullptr;
  nn::Linear fc6_ = nullptr, fc7_ = nullptr, class_score_ = nullptr, box_pred_ = nullptr;
  std::vector<at::Tensor> base_;  // anchors of a place, one a level
};

}  // namespace satchel
