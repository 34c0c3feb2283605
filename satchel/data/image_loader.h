// Batches of images made ahead by background threads. Order and augmentation are a pure function of seed, epoch and sample: the
// number of threads changes nothing.
//
//   ImageLoader loader(sets.train, training_options(sets, 128, seed));
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     loader.start(epoch);
//     while (loader.next(batch)) …
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "satchel/data/image_data.h"

namespace satchel {

enum class Crop : uint8_t {
  whole,   // the image as it is
  padded,  // as large as the image, anywhere in it with `padding` black pixels on each side (CIFAR)
  centre,  // shorter side resized to `resize`, the middle taken (ImageNet, testing)
  area,    // 8 to 100 % of the area at 3:4 to 4:3, anywhere, resized (ImageNet, training)
};

struct ImageLoaderOptions {
  int64_t batch = 128;
  bool shuffle = false;
  bool drop_last = false;  // leave out a last batch that is not full
  Crop crop = Crop::whole;
  int64_t padding = 4;                 // Crop::padded
  int64_t size = 224;                  // height and width of what Crop::centre and Crop::area give
  int64_t resize = 256;                // Crop::centre; at least size
  bool flip = false;                   // left and right exchanged for half of the samples
  std::vector<float> mean, deviation;  // (value/255 − mean)/deviation; one a channel, or none: 0 and 1
  int threads = 0;                     // 0: one a core, at most 16
  int64_t ahead = 3;                   // batches made before they are asked for
  uint64_t seed = 0;
};

/// What images of that kind are usually trained and tested with: shuffled, drop_last, cropped and (three channels) flipped; whole or
/// centre.
ImageLoaderOptions training_options(const ImageSets& sets, int64_t batch, uint64_t seed);
ImageLoaderOptions testing_options(const ImageSets& sets, int64_t batch);

struct ImageBatch {
  int64_t count = 0, channels = 0, height = 0, width = 0;
  std::vector<float> images;             // count × channels × height × width
  std::vector<int64_t> labels, indices;  // count; indices: places in the data set
};

class ImageLoader {
 public:
  /// `data` must outlive the loader. Throws `[loader] rule, got value` for options that do not fit it.
  ImageLoader(const ImageData& data, ImageLoaderOptions options);
  ~ImageLoader();
  ImageLoader(const ImageLoader&) = delete;
  ImageLoader& operator=(const ImageLoader&) = delete;

  /// Begins an epoch, whatever is left of the one before.
  void start(int64_t epoch);
  /// The next batch of the epoch; false after the last one (and before start). Memory of the batch handed in is used again. Throws
  /// what a thread threw while it made this batch, and then again until start().
  bool next(ImageBatch& batch);

  int64_t batches() const;  // of an epoch
  int64_t images() const;   // of an epoch: without those that drop_last leaves out
  int64_t channels() const;
  int64_t height() const;
  int64_t width() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace satchel
