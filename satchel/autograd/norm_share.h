// Norm → activation → dropout with one save, for the functions that come to it: norm_act(), and a relu() that follows a norm. Private to
// this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/norm_node.h"

namespace satchel {

/// All is checked, and the method shares. Statistics and a seed that the call knows are used. Without a norm (options.norm none) x, width,
/// axes and saving are read of the call. `spare`: what spare_memory() gave for x.
at::Tensor shared_norm_act(const NormCall& call, const NormActOptions& options, const at::Tensor& spare = {});

/// relu(x) with one save, its ReLU form, for the next layer as well; taken over from the norm that waits where x is its output. x is
/// checked, and gradients are recorded.
at::Tensor shared_relu(const at::Tensor& x, const Saving& saving);
/// … leaky_relu(x) where x is the output of the norm that waits; else nothing.
std::optional<at::Tensor> after_norm(const at::Tensor& x, Activation activation, double slope);

/// x's memory to write over, where a recorded function made x and nobody but the caller of this holds it; else undefined. A node that
/// saved its own output, or a view, would show in the storage's count.
at::Tensor spare_memory(const at::Tensor& x);

}  // namespace satchel
