// What a backward pass would read, from the autograd graph itself: nothing is counted on the side.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/core/saved.h"

namespace satchel {

/// Every save that backward from `root` would read: those of this library in the order of the forward pass, a shared one once, and then
/// those of torch's own functions (kind "torch", under the node's name). Memory that several of torch's functions hold counts once;
/// parameters and data that stand anyway do not count.
std::vector<SavedTensor> saved_tensors(const at::Tensor& root);

/// Those of this library alone, as plans list them.
std::vector<SavedTensor> packed_tensors(const at::Tensor& root);

}  // namespace satchel
