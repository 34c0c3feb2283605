// Batches of images on a device, one ahead of the step that reads them. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/data/image_loader.h"
#include "satchel/train/image_train.h"

namespace satchel {

struct ImageTensors {
  at::Tensor images, labels;     // float32 count × channels × height × width, int64[count]
  std::vector<int64_t> indices;  // places in the data set
  int64_t count() const { return static_cast<int64_t>(indices.size()); }
};

/// Throws `[train] rule, got value` unless there is something to train on, and the test set is of the same kind.
void validate(const ImageSets& data);

ImageLoaderOptions training_options(const ImageSets& data, const ImageTrainOptions& options);
ImageLoaderOptions testing_options(const ImageSets& data, const ImageTrainOptions& options);

class ImageFeed {
 public:
  /// `data` must outlive it.
  ImageFeed(const ImageData& data, const ImageLoaderOptions& options, at::Device device, bool channels_last);

  const ImageLoader& loader() const { return loader_; }
  /// Begins an epoch, at one of its batches.
  void start(int64_t epoch, int64_t batch = 0);
  /// False after the epoch's last batch. On CUDA the copy goes through pinned memory in the order of the current stream; the host does
  /// not wait for it.
  bool next(ImageTensors& batch);

 private:
  at::Tensor on_device(const void* values, at::IntArrayRef sizes, at::ScalarType type) const;

  ImageLoader loader_;
  at::Device device_;
  at::MemoryFormat order_;
  ImageBatch host_;
};

}  // namespace satchel
