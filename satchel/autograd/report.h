// What the functions of this library keep for a backward pass, read from the autograd graph itself: nothing is counted on the side.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/core/saved.h"

namespace satchel {

/// Every save that backward from `root` would read, in the order of the forward pass; a shared one once. Saves of torch's own
/// functions are not seen.
std::vector<SavedTensor> saved_tensors(const at::Tensor& root);

}  // namespace satchel
