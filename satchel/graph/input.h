// A data set's features as the first layer reads them. They stand before a step and after it: layers keep references.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/graph/csr.h"

namespace satchel {

struct GraphInput {
  at::Tensor x = {};           // nodes × features; undefined where they are sparse
  Adjacency sparse = {};       // X and Xᵀ, where they are sparse
  at::Tensor aggregated = {};  // A·X, computed once; undefined where it would take too much memory, or X is sparse

  at::Tensor aggregated_by = {};  // A's columns: which adjacency that was

  bool is_sparse() const { return !x.defined(); }
  int64_t nodes() const { return is_sparse() ? sparse.matrix.rows : x.size(0); }
  int64_t features() const { return is_sparse() ? sparse.matrix.columns : x.size(1); }
};

/// X·Wᵀ, sparse or dense, with a gradient.
at::Tensor times_transposed(const GraphInput& input, const at::Tensor& weight);

/// Adds A·X to dense features.
GraphInput with_aggregated(GraphInput input, const Adjacency& a);

}  // namespace satchel
