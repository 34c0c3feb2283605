// The gradient of a layer's weights from its packed input: gᵀ·z without z (tensor/norm_act.h), CUDA, where the kernel fits. Private to the
// library.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/tensor/chain.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Does the kernel serve these gradients (one or two, rows × columns, all of one width and of one type: float32, float16 or bfloat16)?
bool fuses_norm_act_product(const Packed& code, const std::vector<at::Tensor>& gs);

/// gᵀ·z for every g: columns × channels in float32, z as norm_act_input() gives it in g's type. 16 bits go through the tensor cores,
/// float32 too where torch's own products may use TF32. The order of the sums depends on sizes and types alone.
std::vector<at::Tensor> norm_act_product(const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                                         const std::vector<at::Tensor>& gs);

}  // namespace satchel
