// The rules of graph layers, each once. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"

namespace satchel {

/// x: nodes × columns of the weight, float32, float16 or bfloat16; weight and bias float32; all on the adjacency's device; bias one
/// number a row of the weight, or undefined.
void check_layer(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op);
void check_layer(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op);

}  // namespace satchel
