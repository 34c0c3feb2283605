#include "satchel/graph/input.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <string>
#include <utility>

#include "satchel/autograd/input.h"
#include "satchel/core/error.h"
#include "satchel/graph/spmm.h"
#include "satchel/tensor/order.h"

namespace satchel {
namespace {

/// On a GPU, where rows end with a word of 16 bytes: A·x reads x by whole words, and A·X is being written in what follows. On the CPU the
/// copy of X would be memory for little.
bool serves_beside(const at::Tensor& x) { return x.is_cuda() && !x.requires_grad() && x.size(1) * x.element_size() % 16 == 0; }

int64_t version_of(const at::Tensor& t) { return t.defined() && !t.is_inference() ? t._version() : 0; }

}  // namespace

AggregateSource::Part::Part(const at::Tensor& t) : tensor(t.defined() ? t.detach() : t), version(version_of(t)) {}

bool AggregateSource::Part::is(const at::Tensor& t) const {
  if (!t.defined() || !tensor.defined()) return t.defined() == tensor.defined();
  return t.const_data_ptr() == tensor.const_data_ptr() && t.sizes() == tensor.sizes() && t.strides() == tensor.strides() &&
         t.scalar_type() == tensor.scalar_type() && t.device() == tensor.device() && version_of(t) == version;
}

std::vector<at::Tensor> AggregateSource::tensors_of(const Csr& a) { return {a.start, a.column, a.value, a.row_scale, a.column_scale}; }

AggregateSource::AggregateSource(const Csr& a, const at::Tensor& x) : x_(x) {
  for (const at::Tensor& t : tensors_of(a)) matrix_.emplace_back(t);
}

bool AggregateSource::is_matrix(const Csr& a) const {
  const std::vector<at::Tensor> tensors = tensors_of(a);
  if (matrix_.size() != tensors.size()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!matrix_[i].is(tensors[i])) return false;
  }
  return true;
}

at::Tensor times_transposed(const GraphInput& input, const at::Tensor& weight) {
  if (!input.is_sparse()) return at::mm(input.x, weight.t());
  return spmm(input.sparse, weight.t().contiguous());
}

GraphInput with_aggregated(GraphInput input, const Adjacency& a) { return with_aggregated(std::move(input), a, a.outputs()); }

GraphInput with_aggregated(GraphInput input, const Adjacency& a, int64_t rows) {
  constexpr const char* op = "with_aggregated";
  if (input.is_sparse()) fail(op, "features must be dense", "sparse ones");
  if (rows < 1 || rows > a.outputs()) fail(op, "rows must be 1 to " + std::to_string(a.outputs()), rows);
  const int64_t width = input.x.size(1);
  if (rows == input.x.size(0) && serves_beside(input.x)) {
    const at::Tensor both = at::empty({rows, 2 * width}, input.x.options());
    input.x = both.narrow(1, 0, width).copy_(input.x);
    input.aggregated = both.narrow(1, width, width);
  } else {
    input.x = with_plain_rows(input.x);
    input.aggregated = at::empty({rows, width}, input.x.options());
  }
  multiply_rows(a.matrix, input.x, 0, rows, input.aggregated);
  input.aggregated_by = AggregateSource(a.matrix, input.x);
  return input;
}

at::Tensor side_by_side(const at::Tensor& x, const at::Tensor& aggregated) {
  if (!x.defined() || !aggregated.defined() || x.dim() != 2 || !x.is_alias_of(aggregated)) return {};
  const int64_t width = x.size(1), both = 2 * width;
  const bool beside = x.sizes() == aggregated.sizes() && x.scalar_type() == aggregated.scalar_type() && x.stride(0) == both &&
                      aggregated.stride(0) == both && x.stride(1) == 1 && aggregated.stride(1) == 1 &&
                      aggregated.storage_offset() == x.storage_offset() + width;
  return beside ? x.detach().as_strided({x.size(0), both}, {both, 1}) : at::Tensor();
}

void for_aggregated(const at::Tensor& aggregated, const at::Tensor& x, const Csr& a,
                    const std::function<void(int64_t first, int64_t last, const at::Tensor& rows)>& run) {
  const int64_t kept = aggregated.size(0);
  run(0, kept, aggregated);
  if (kept == a.rows) return;
  const at::Tensor others = at::empty({a.rows - kept, x.size(1)}, x.options());
  multiply_rows(a, x, kept, a.rows, others);
  run(kept, a.rows, others);
}

at::Tensor aggregated_product(const at::Tensor& g, const at::Tensor& aggregated, const at::Tensor& x, const Csr& a) {
  at::Tensor sum;
  for_aggregated(aggregated, with_plain_rows(x), a, [&](int64_t first, int64_t last, const at::Tensor& rows) {
    const at::Tensor part = product(g.narrow(0, first, last - first).t(), rows);
    sum = sum.defined() ? sum.add_(part) : part;
  });
  return sum;
}

}  // namespace satchel
