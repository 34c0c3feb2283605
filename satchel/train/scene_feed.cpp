#include "satchel/train/scene_feed.h"

namespace satchel {

SceneFeed::SceneFeed(const SceneData& data, const SceneLoaderOptions& options, at::Device device, bool channels_last)
    : loader_(data, options),
      size_(options.size),
      device_(device),
      order_(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous) {}

void SceneFeed::start(int64_t epoch, int64_t batch) {
  loader_.start(epoch);
  for (int64_t i = 0; i < batch; ++i) loader_.next(host_);
}

bool SceneFeed::next(ImageTensors& batch) {
  if (!loader_.next(host_)) return false;
  const SceneBatch& h = host_;
  batch.images = copied_to(device_, h.images.data(), {h.count, h.channels, h.height, h.width}, at::kFloat).contiguous(order_);
  batch.labels = h.masks.empty() ? at::Tensor() : copied_to(device_, h.masks.data(), {h.count, h.height, h.width}, at::kByte);
  batch.indices = h.indices;
  return true;
}

}  // namespace satchel
