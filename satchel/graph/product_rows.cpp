#include "satchel/graph/product_rows.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace satchel {
namespace {

/// A tensor of its own in memory that others share.
at::Tensor placed(const at::Tensor& memory, int64_t from, int64_t rows, int64_t width) {
  at::Tensor t = at::empty({0}, memory.options());
  t.set_(memory.storage(), from, {rows, width}, {width, 1});
  return t;
}

}  // namespace

ProductRows::ProductRows(const Csr& a, const at::Tensor& x, int64_t width, int64_t stretch) : a_(a), x_(x) {
  const int64_t rows = a.rows, own = x.size(1);
  if (!x.is_cuda()) {
    if (width > 0) result_ = at::empty({rows, width}, x.options());
    product_ = at::empty({std::min(stretch, rows), own}, x.options());
    if (x.scalar_type() != at::kFloat) x_ = x.to(at::kFloat), product_ = product_.to(at::kFloat);
    return;
  }
  // Result rows up to (k + 1)·stretch must end before product row k·stretch, for every k: the first and the last decide.
  constexpr int64_t kAligned = 64;  // values: every vector width of the kernels
  const int64_t ahead = std::max(std::min(stretch, rows) * width, rows * width - (rows - std::min(stretch, rows)) * own);
  const int64_t from = width > 0 ? (std::max<int64_t>(ahead, 0) + kAligned - 1) / kAligned * kAligned : 0;
  const at::Tensor memory = at::empty({std::max(from + rows * own, rows * width)}, x.options());
  product_ = placed(memory, from, rows, own);
  if (width > 0) result_ = placed(memory, 0, rows, width);
  multiply_rows(a, x, 0, rows, product_);
}

at::Tensor ProductRows::read(int64_t first, int64_t last) {
  if (x_.is_cuda()) return product_.narrow(0, first, last - first);
  const at::Tensor rows = product_.narrow(0, 0, last - first);
  multiply_rows(a_, x_, first, last, rows);
  return result_.defined() ? rows.to(result_.scalar_type()) : rows;
}

}  // namespace satchel
