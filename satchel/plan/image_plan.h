// What an image model keeps for backward under a method, layer by layer, from sizes alone; and the largest batch that fits. No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "satchel/core/keep.h"
#include "satchel/core/saved.h"
#include "satchel/plan/image_shape.h"

namespace satchel {

/// The batch that a step reads: float32 images. `half`: autocast to bf16 or fp16.
struct BatchShape {
  int64_t images = 256, height = 224, width = 224;
  bool half = false;
  bool operator==(const BatchShape&) const = default;
};

/// Each line as the autograd room reports it when the model has run: same names, kinds and bytes, same order. Without the loss.
/// For fp32: what torch's functions keep, each map once. Where bits are allocated per sample, the lines of a step whose gradients are
/// looked at, before the first allocation.
std::vector<SavedTensor> plan_image(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// The method with the mean in place of its budget: the most bits of shared maps with which plan_image() takes no more bytes; without a
/// budget the method itself. Throws where even 2 bits take more.
Method with_mean(const ImageShape& shape, const BatchShape& batch, const Method& method);

/// Does the method's budget, if it has one, pay 2 bits? Else with_mean() throws.
bool within_budget(const ImageShape& shape, const BatchShape& batch, const Method& method);

constexpr int64_t kMostBatch = 1 << 20;
constexpr int64_t kNoCap = int64_t{1} << 62;

/// What training steps with SGD and momentum take of a GPU's memory, from sizes alone: steps are gone through tensor by tensor
/// (image_step.h) with a model of torch's caching allocator (caching_allocator.h). Not counted: cuDNN's workspaces.
struct ImageMemory {
  bool fits = true;        // under the cap; else all below but what needs no steps is 0
  int64_t saved = 0;       // plan_image(): all of it, when forward has ended
  int64_t offloaded = 0;   // … of which in host memory
  int64_t parameters = 0;  // weights, gradients and momentum: three times 4 bytes
  int64_t images = 0;      // the batch
  int64_t peak = 0;        // the most that tensors take at once: saves, maps and their gradients, decoded values, and the two lines above
  int64_t reserved = 0;    // the most that the allocator takes for them: its free pieces between tensors are the difference
};
/// Under a cap of so many bytes, as `satchel bench batch` and MemoryCap set it, the allocator gives back what it can before it gives up.
ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& method, int64_t cap = kNoCap);

/// The largest batch within_budget() whose steps fit into `budget` bytes, found by halving: free pieces differ from batch to batch, so that
/// a larger one may fit too. 0 where not even one image fits, at most kMostBatch.
int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget, bool half = false);

}  // namespace satchel
