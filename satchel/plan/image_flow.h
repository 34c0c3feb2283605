// What flows between the layers of an image model: how many values stand at a time, forward and backward. No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "satchel/plan/image_shape.h"

namespace satchel {

/// The values of one image that stand between layers while each runs: made and still to be read, its own output among them. The images
/// themselves are not counted. A norm and its ReLU as one function (shared methods) work in the memory of what they read.
std::vector<int64_t> alive_values(const ImageLayers& model, bool shared);

/// The values of one image's gradients that stand while each layer's backward runs: what it reads, what it makes, and what waits for other
/// readers of the same map. Two of the widest maps' stand where a block narrows them: the gradient of its long branch waits for the
/// short one's.
std::vector<int64_t> gradient_values(const ImageLayers& model, bool plain);

}  // namespace satchel
