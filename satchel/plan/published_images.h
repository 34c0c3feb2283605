// The published activation memory of ResNet-50 and Wide ResNet-50-2 (ImageNet), and what it is made of. No torch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "satchel/plan/image_plan.h"

namespace satchel {

/// A column of the DIVISION paper's table: GB as it prints them. 20.48 is exact in GiB.
struct PublishedImageSetting {
  const char* model;
  int64_t batch;
  std::optional<double> fp32;  // none: it did not fit
  double actnn, division;
};
/// ResNet-50 of 64, 256 and 512 images, Wide ResNet-50-2 of 256.
std::span<const PublishedImageSetting> published_image_settings();

/// A figure of that table, and the byte model of the program behind it, part by part.
struct PublishedImageRow {
  std::string name;                     // "FP32", "ActNN", "DIVISION"
  std::optional<double> published_gib;  // none: it did not fit
  std::vector<SavedTensor> parts;       // codes, their `metadata` (and `means`), masks, indices, the batch of `images`
  std::string method;                   // the same method here, as parse_method() reads it: plan_image() takes Satchel's own layout for it
};

/// FP32, ActNN, DIVISION: in this order, of ResNet-50 with 256 images or of another column.
///   FP32      what torch keeps: unique inputs of convolutions, BatchNorm inputs, results of ReLUs that no convolution reads (the max-pool
///             and the average do), int64 indices of the max-pool. Exactly 20.48 GiB, and 26.75; of 64 images 5.12, printed as 5.14.
///   the rest  2-bit codes of EACH convolution's input (a map that two read is packed twice), of BatchNorm inputs, their metadata, a bit
///             a ReLU, int8 indices, and the batch itself in float32, which FP32's figure holds as the first input. Within 5 %.
/// Not in it: statistics, the classifier's input, the loss.
std::vector<PublishedImageRow> published_images(const PublishedImageSetting& setting = published_image_settings()[1]);

/// The model that they are about.
ImageShape published_image_model(const PublishedImageSetting& setting = published_image_settings()[1]);

}  // namespace satchel
