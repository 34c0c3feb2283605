// ELU → dropout → next layer with one save: ELU's output. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/saving.h"

namespace satchel {

at::Tensor elu_dropout(const at::Tensor& x, double alpha, double p, const Saving& saving);

}  // namespace satchel
