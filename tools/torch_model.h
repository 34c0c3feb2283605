// The same graph model in torch's own functions: what bench graph measures against.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/models/graph_model.h"

namespace satchel::tool {

/// A sparse CSR tensor of torch's on `device`, entries multiplied out where they are.
at::Tensor torch_csr(const Csr& a, at::Device device, at::ScalarType type = at::kFloat);

/// A and Aᵀ as torch has them. Its own gradient of A·x converts Aᵀ in every step, four times as slow: here both stand ready.
struct TorchAdjacency {
  at::Tensor matrix, transpose;
};

/// Both, with values of the type that torch multiplies in: with an amp its 16 bits on CUDA; the CPU's product is float32's only.
TorchAdjacency torch_adjacency(const Adjacency& a, at::Device device, Amp amp);

/// Logits in training mode from the parameters and buffers of `model`, by torch::linear, batch_norm, relu, dropout … With the
/// model's amp the types are those that autocast would choose: products in 16 bits, layer_norm in float32, all else in the type
/// it gets, so that sage's logits have 16 bits too.
at::Tensor torch_forward(const GraphModel& model, const at::Tensor& x, const TorchAdjacency& a);

}  // namespace satchel::tool
