// Weights from elsewhere: torchvision's state dicts, written as safetensors, and checkpoints of satchel train. Files are untrusted.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "satchel/plan/detector_shape.h"
#include "satchel/plan/image_shape.h"

namespace satchel {

/// What a file's classifier is, next to the one that a run needs.
struct ClassifierFit {
  std::string layer;                // "fc"
  int64_t stored = 0, classes = 0;  // of the file and of the run; stored 0: the file has none
  /// Of another number of classes: it is left out, and learnt anew.
  bool is_left_out() const { return stored > 0 && stored != classes; }
};

/// Copies the file's tensors into an image model of this shape, by name. Stored as F32, F16 or BF16. Where a norm's num_batches_tracked is
/// missing, as in files of old, the model's own stands, as in torch; DenseNet's old names (norm.1 for norm1) are known. A classifier of
/// another number of classes is left out. Models of segmentation also take a ResNet's state dict for their backbone. Throws `[weights]
/// FILE: rule, got value` with the tensor's name and both shapes where one is missing, too many, of another shape or type, or not finite.
ClassifierFit load_weights(torch::nn::Module& model, const ImageShape& shape, const std::string& path);

/// … into a detector: torchvision's own state dict of it, or a ResNet's for its backbone. Frozen norms leave out num_batches_tracked, as
/// torchvision's do. Of Faster R-CNN the layer that makes a box for each class goes with the classifier.
ClassifierFit load_weights(torch::nn::Module& model, const DetectorShape& shape, const std::string& path);

/// What load_weights() would do with the classifier, from the file alone.
ClassifierFit classifier_fit(const ImageShape& shape, const std::string& path);
ClassifierFit classifier_fit(const DetectorShape& shape, const std::string& path);

}  // namespace satchel
