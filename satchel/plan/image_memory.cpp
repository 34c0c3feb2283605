#include <algorithm>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/plan/image_step.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostBudget = int64_t{1} << 55;  // twice as many images, at 1 bit a value, are within 2^62 bytes in float32
constexpr int64_t kWeightCopies = 3;               // weight, gradient, momentum
constexpr int kSteps = 3;                          // from the second on free blocks are those that a step leaves

}  // namespace

ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& given, int64_t cap) {
  const Method method = with_mean(shape, batch, given);
  const ImageLayers model = layers_of(shape, batch.height, batch.width);
  ImageMemory memory;
  for (const std::vector<SavedTensor>& layer : saves_by_layer(model, batch, method)) {
    memory.saved += total_bytes(layer);
    for (const SavedTensor& line : layer) memory.offloaded += is_offloaded(method, line) ? line.bytes : 0;
  }
  for (const ImageLayer& layer : model.layers) {
    const bool frozen = model.maps[static_cast<size_t>(layer.output)].constant;
    memory.parameters += 4 * (frozen ? 1 : kWeightCopies) * layer.parameters;
  }
  memory.images = 4 * batch.images * model.maps[0].values();
  CachingAllocator allocator(cap, wants_growing_segments(method));
  try {
    CachingAllocator::Tensor workspace;
    ImageSteps steps(model, batch, method, allocator, workspace);
    for (int i = 0; i < kSteps; ++i) steps.run();
    memory.peak = allocator.peak_allocated();
    memory.reserved = allocator.peak_reserved();
  } catch (const CachingAllocator::OutOfMemory&) {
    if (cap == kNoCap) fail(kOp, "a step may take at most 2^62 bytes: fewer or smaller images", std::to_string(batch.images) + " images");
    memory.fits = false;
  }
  return memory;
}

int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget, bool half) {
  if (budget < 1 || budget > kMostBudget) fail(kOp, "a budget must be 1 to 2^55 bytes", budget);
  const auto fits = [&](int64_t images) {
    const BatchShape batch{images, height, width, half};
    return within_budget(shape, batch, method) && memory_of(shape, batch, method, budget).fits;
  };
  if (!fits(1)) return 0;
  int64_t most = 1, least_not = 2;
  while (least_not <= kMostBatch && fits(least_not)) {
    most = least_not;
    least_not *= 2;
  }
  least_not = std::min(least_not, kMostBatch + 1);
  while (least_not - most > 1) {
    const int64_t middle = most + (least_not - most) / 2;
    (fits(middle) ? most : least_not) = middle;
  }
  return most;
}

}  // namespace satchel
