// From an image of a data set to the numbers a model reads: crop, resize, flip, normalise. Which crop and whether to flip is a pure
// function of seed, epoch and sample. Private.
#pragma once

#include <cstdint>
#include <vector>

#include "satchel/data/dice.h"
#include "satchel/data/image_loader.h"

namespace satchel {

/// Purposes of images, apart from those of graphs.
constexpr Purpose kImageOrder{32}, kImageCrop{33}, kImageFlip{34}, kImagePattern{35}, kImageShape{36}, kImageNoise{37};
constexpr Purpose kSceneOrder{38}, kSceneCrop{39}, kScenePlaces{40}, kSceneClutter{41}, kSceneNoise{42};

struct Box {
  int64_t top = 0, left = 0, height = 0, width = 0;
  bool operator==(const Box&) const = default;
};

/// Resizes `from` of the image to height × width and gives `part` of the result. Triangle filter, wider where it shrinks, in whole
/// numbers: what Pillow's (and torchvision's) bilinear gives.
Image resized(const Image& image, const Box& from, int64_t height, int64_t width, const Box& part);

/// 8 to 100 % of the area at 3:4 to 4:3, anywhere; the largest middle box of such a shape where ten draws do not fit.
Box draw_area(int64_t height, int64_t width, const Dice& dice, uint32_t sample);

/// The seed of everything drawn in an epoch.
uint64_t epoch_seed(uint64_t seed, int64_t epoch);

class Augment {
 public:
  /// Throws `[loader] rule, got value` for options that do not fit the data.
  Augment(const ImageData& data, const ImageLoaderOptions& options);

  /// Image `index` as channels × height × width floats.
  void operator()(int64_t index, uint64_t epoch_seed, float* out) const;

  int64_t height() const { return height_; }
  int64_t width() const { return width_; }

 private:
  /// The place of the output in the image, which may hang over its edges (black there).
  void place(const uint8_t* pixels, int64_t height, int64_t width, int64_t top, int64_t left, bool flip, float* out) const;

  const ImageData& data_;
  Crop crop_;
  bool flip_;
  int64_t padding_, resize_, height_, width_;
  std::vector<float> table_;  // channels × 256: what a byte becomes
};

}  // namespace satchel
