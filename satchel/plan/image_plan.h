// What an image model keeps for backward under a method, layer by layer, from sizes alone; and the largest batch that fits. No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "satchel/core/method.h"
#include "satchel/core/saved.h"
#include "satchel/plan/image_shape.h"

namespace satchel {

/// The batch that a step reads: float32 images.
struct BatchShape {
  int64_t images = 256, height = 224, width = 224;
  bool operator==(const BatchShape&) const = default;
};

/// Each line as the autograd room reports it when the model has run: same names, kinds and bytes, same order. Without the loss.
/// For fp32: what torch's functions keep, each map once.
std::vector<SavedTensor> plan_image(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// What a training step with SGD and momentum holds. Not counted: the loss, cuDNN's workspaces, the allocator's slack.
struct ImageMemory {
  int64_t saved = 0;       // plan_image(): all of it, when forward has ended
  int64_t parameters = 0;  // weights, gradients and momentum: three times 4 bytes
  int64_t images = 0;      // the batch, where no layer keeps it as it is
  int64_t fullest = 0;     // the most that saves, the maps between layers (in backward their gradients) and decoded values take at once
  int64_t total() const { return parameters + images + fullest; }
};
ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// The largest batch whose memory_of() is at most `budget` bytes; 0 where not even one image fits, at most 2^20.
int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget);

}  // namespace satchel
