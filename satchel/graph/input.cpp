#include "satchel/graph/input.h"

#include <ATen/ops/mm.h>

#include "satchel/core/error.h"
#include "satchel/graph/spmm.h"

namespace satchel {

at::Tensor times_transposed(const GraphInput& input, const at::Tensor& weight) {
  if (!input.is_sparse()) return at::mm(input.x, weight.t());
  return spmm(input.sparse, weight.t().contiguous());
}

GraphInput with_aggregated(GraphInput input, const Adjacency& a) {
  if (input.is_sparse()) fail("with_aggregated", "features must be dense", "sparse ones");
  input.aggregated = multiply(a.matrix, input.x);
  input.aggregated_by = a.matrix.column;
  return input;
}

}  // namespace satchel
