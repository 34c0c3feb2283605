// What torch's own functions keep for a backward pass. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

#include "satchel/core/saved.h"

namespace satchel {

/// A line of kind "torch" for each piece of memory that these nodes of torch's hold, under the name of the node that holds it first.
/// Memory counts once, as a whole, as large as it is. Parameters do not count, nor tensors without a gradient that somebody else holds,
/// as a data set and its labels: they stand anyway. Nor do single numbers of the program. A node that does not tell what it holds has a
/// line of kind "not counted" and 0 bytes.
std::vector<SavedTensor> torch_saves(const std::vector<torch::autograd::Node*>& nodes);

/// The tensors that one of torch's nodes holds, each once.
struct NodeSaves {
  torch::autograd::Node* node;
  std::vector<at::Tensor> tensors;
  bool tells = true;  // false: not all of them are known
};
NodeSaves saves_of(torch::autograd::Node* node);

/// Is this thread asking a node for what it holds? Hooks then give their packed bytes instead of values.
bool is_counting_saves();

}  // namespace satchel
