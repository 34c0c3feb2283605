// The same graph model in torch's own functions: what bench graph measures against.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/models/graph_model.h"

namespace satchel::tool {

/// A sparse CSR tensor of torch's, entries multiplied out.
at::Tensor torch_csr(const Csr& a);

/// A and Aᵀ as torch has them. Its own gradient of A·x converts Aᵀ in every step, four times as slow: here both stand ready.
struct TorchAdjacency {
  at::Tensor matrix, transpose;
};

/// Logits in training mode from the parameters and buffers of `model`, by torch::linear, batch_norm, relu, dropout …
at::Tensor torch_forward(const GraphModel& model, const at::Tensor& x, const TorchAdjacency& a);

}  // namespace satchel::tool
