// Batches of scenes with masks on a device, one ahead of the step that reads them. Private to this room and tools.
#pragma once

#include <cstdint>

#include "satchel/data/scene_loader.h"
#include "satchel/train/image_feed.h"

namespace satchel {

class SceneFeed : public BatchFeed {
 public:
  /// `data` must outlive it.
  SceneFeed(const SceneData& data, const SceneLoaderOptions& options, at::Device device, bool channels_last);

  void start(int64_t epoch, int64_t batch = 0) override;
  /// Labels are the masks, undefined where the data have none.
  bool next(ImageTensors& batch) override;
  int64_t batches() const override { return loader_.batches(); }
  int64_t images() const override { return loader_.scenes(); }
  /// Of crops.
  int64_t height() const override { return size_; }
  int64_t width() const override { return size_; }
  /// What the last batch was made of.
  const SceneBatch& host() const { return host_; }

 private:
  SceneLoader loader_;
  int64_t size_;
  at::Device device_;
  at::MemoryFormat order_;
  SceneBatch host_;
};

}  // namespace satchel
