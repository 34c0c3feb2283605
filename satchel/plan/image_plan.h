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
/// For fp32: what torch's functions keep, each map once. Where bits are shared out, the lines of a step whose gradients are looked at,
/// before the first share-out.
std::vector<SavedTensor> plan_image(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// The method with the mean in place of its budget: the most bits of shared maps with which plan_image() takes no more bytes; without a
/// budget the method itself. Throws where even 2 bits take more.
Method with_mean(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// Does the method's budget, if it has one, pay 2 bits? Else with_mean() throws.
bool within_budget(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// What a training step with SGD and momentum holds. Not counted: the loss and cuDNN's workspaces.
struct ImageMemory {
  int64_t saved = 0;       // plan_image(): all of it, when forward has ended
  int64_t swapped = 0;     // … of which in host memory, in none of the sums below
  int64_t parameters = 0;  // weights, gradients and momentum: three times 4 bytes
  int64_t images = 0;      // the batch, where no layer keeps it as it is
  int64_t fullest = 0;     // the most that saves, the maps between layers (in backward their gradients) and decoded values take at once
  int64_t slack = 0;       // the widest map: about what torch's allocator has free in pieces too small for one (docs/results.md: of 16 GB
                           // fp32, actnn and satchel filled all but 0.5, 2.5 and 3.4 GiB, their widest maps 0.5, 2.4 and 3.1)
  int64_t total() const { return parameters + images + fullest; }
  int64_t reserved() const { return total() + slack; }
};
ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& method);

constexpr int64_t kMostBatch = 1 << 20;

/// The largest batch within_budget() whose memory_of().reserved() is at most `budget` bytes: an estimate. 0 where not even one image
/// fits, at most kMostBatch.
int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget);

}  // namespace satchel
