// Made-up images that train like real ones, the same on every machine for the same options.
//
//   synthetic-images:                                        all defaults: 10 classes of 3×32×32, 10,000 images and 2,000 to test
//   synthetic-images:classes=10,size=32,count=10000[,test=count/5][,channels=3][,seed=0]
//
// A class is a pattern of a few slow waves in each channel. An image is its class's pattern, shifted by up to an eighth, at 50 to 150 %
// of the contrast, mixed with a rival's by a share of up to 60 %, plus noise. Images that are mixed by more than half (9 %) look like
// their rival and bound what any model can reach.
#pragma once

#include <cstdint>
#include <string_view>

#include "satchel/data/image_data.h"

namespace satchel {

struct SyntheticImageOptions {
  int64_t classes = 10, channels = 3, size = 32;
  int64_t count = 10000, test = 2000;  // images; labels take turns
  uint64_t seed = 0;
};

/// What stands after "synthetic-images:".
SyntheticImageOptions parse_synthetic_images(std::string_view text);

ImageSets make_synthetic_images(const SyntheticImageOptions& options);

}  // namespace satchel
