// Batches of images on a device, one ahead of the step that reads them. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/data/image_loader.h"
#include "satchel/train/image_train.h"

namespace satchel {

struct ImageTensors {
  at::Tensor images, labels;     // float32 count × channels × height × width; int64[count], or uint8 count × height × width of masks
  std::vector<int64_t> indices;  // places in the data set
  int64_t count() const { return static_cast<int64_t>(indices.size()); }
};

/// Throws `[train] rule, got value` unless there is something to train on, and the test set is of the same kind.
void validate(const ImageSets& data);

ImageLoaderOptions training_options(const ImageSets& data, const ImageTrainOptions& options);
ImageLoaderOptions testing_options(const ImageSets& data, const ImageTrainOptions& options);

/// Batches of an epoch, whatever they are made of.
class BatchFeed {
 public:
  virtual ~BatchFeed() = default;
  /// Begins an epoch, at one of its batches.
  virtual void start(int64_t epoch, int64_t batch) = 0;
  /// False after the epoch's last batch. On CUDA the copy goes through pinned memory in the order of the current stream; the host does
  /// not wait for it.
  virtual bool next(ImageTensors& batch) = 0;
  virtual int64_t batches() const = 0;  // of an epoch
  virtual int64_t images() const = 0;   // of an epoch
  virtual int64_t height() const = 0;
  virtual int64_t width() const = 0;
};

/// A copy of values in the host's memory on a device.
at::Tensor copied_to(at::Device device, const void* values, at::IntArrayRef sizes, at::ScalarType type);

class ImageFeed : public BatchFeed {
 public:
  /// `data` must outlive it.
  ImageFeed(const ImageData& data, const ImageLoaderOptions& options, at::Device device, bool channels_last);

  const ImageLoader& loader() const { return loader_; }
  void start(int64_t epoch, int64_t batch = 0) override;
  bool next(ImageTensors& batch) override;
  int64_t batches() const override { return loader_.batches(); }
  int64_t images() const override { return loader_.images(); }
  int64_t height() const override { return loader_.height(); }
  int64_t width() const override { return loader_.width(); }

 private:
  ImageLoader loader_;
  at::Device device_;
  at::MemoryFormat order_;
  ImageBatch host_;
};

}  // namespace satchel
