// The published activation memory of ResNet-50 (ImageNet, batch 256) and what it is made of. No torch.
#pragma once

#include <string>
#include <vector>

#include "satchel/plan/image_plan.h"

namespace satchel {

/// A figure of the DIVISION paper's table, and the byte model of the program behind it, part by part.
struct PublishedImageRow {
  std::string name;                // "FP32", "ActNN", "DIVISION"
  double published_gib = 0;        // printed as GB; 20.48 is exact in GiB
  std::vector<SavedTensor> parts;  // codes, their `metadata` (and `means`), masks, indices, the batch of `images`
  std::string method;              // the same method here, as parse_method() reads it: plan_image() takes Satchel's own layout for it
};

/// FP32, ActNN, DIVISION: in this order.
///   FP32      what torch keeps: unique inputs of convolutions, BatchNorm inputs, results of ReLUs that no convolution reads (the max-pool
///             and the average do), int64 indices of the max-pool. Exactly 20.48 GiB.
///   the rest  2-bit codes of EACH convolution's input (a map that two read is packed twice), of BatchNorm inputs, their metadata, a bit
///             a ReLU, int8 indices, and the batch itself in float32, which FP32's figure holds as the first input. Within 5 %.
/// Not in it: statistics, the classifier's input, the loss.
std::vector<PublishedImageRow> published_images();

/// The model and the batch that they are about.
ImageShape published_image_model();

}  // namespace satchel
