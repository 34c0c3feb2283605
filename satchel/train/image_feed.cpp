#include "satchel/train/image_feed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"

namespace satchel {
namespace {

constexpr uint32_t kData = 2;  // rank of the seed of order and augmentation

}  // namespace

void validate(const ImageSets& data) {
  const ImageData &train = data.train, &test = data.test;
  if (train.count() < 1) fail("train", "data must have images to train on", train.count());
  if (train.classes < 2) fail("train", "data must have at least 2 classes", train.classes);
  if (test.count() == 0) return;
  if (test.channels != train.channels)
    fail("train", "test images must have " + std::to_string(train.channels) + " channels", test.channels);
  if (test.classes > train.classes) fail("train", "test images must be of the " + std::to_string(train.classes) + " classes", test.classes);
}

ImageLoaderOptions training_options(const ImageSets& data, const ImageTrainOptions& o) {
  ImageLoaderOptions l = training_options(data, o.batch, derive_seed(o.seed, 0, kData, 0));
  if (!o.augment) {
    l.crop = data.train.in_files() ? Crop::centre : Crop::whole;
    l.flip = false;
  }
  if (o.image > 0) l.size = o.image;
  if (o.image > 0) l.resize = o.image * 8 / 7;  // 256 of 224, as for ImageNet
  l.threads = static_cast<int>(o.loaders);
  return l;
}

ImageLoaderOptions testing_options(const ImageSets& data, const ImageTrainOptions& o) {
  ImageLoaderOptions l = testing_options(data, o.batch);
  if (o.image > 0) l.size = o.image;
  if (o.image > 0) l.resize = o.image * 8 / 7;
  l.threads = static_cast<int>(o.loaders);
  return l;
}

ImageFeed::ImageFeed(const ImageData& data, const ImageLoaderOptions& options, at::Device device, bool channels_last)
    : loader_(data, options), device_(device), order_(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous) {}

at::Tensor copied_to(at::Device device, const void* values, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor host = at::empty(sizes, at::TensorOptions().dtype(type).pinned_memory(device.is_cuda()));
  if (host.nbytes() > 0) std::memcpy(host.mutable_data_ptr(), values, host.nbytes());
  return host.to(device, /*non_blocking=*/true);  // torch's pinned memory waits for the copy before it is used again
}

void ImageFeed::start(int64_t epoch, int64_t batch) {
  loader_.start(epoch);
  for (int64_t i = 0; i < batch; ++i) loader_.next(host_);
}

bool ImageFeed::next(ImageTensors& batch) {
  if (!loader_.next(host_)) return false;
  batch.images =
      copied_to(device_, host_.images.data(), {host_.count, host_.channels, host_.height, host_.width}, at::kFloat).contiguous(order_);
  batch.labels = copied_to(device_, host_.labels.data(), {host_.count}, at::kLong);
  batch.indices = host_.indices;
  return true;
}

}  // namespace satchel
