#include "satchel/graph/product_rows.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "satchel/autograd/shared.h"
#include "satchel/core/layout.h"

namespace satchel {
namespace {

/// A tensor of its own in memory that others share.
at::Tensor placed(const at::Tensor& memory, int64_t from, int64_t rows, int64_t width) {
  at::Tensor t = at::empty({0}, memory.options());
  t.set_(memory.storage(), from, {rows, width}, {width, 1});
  return t;
}

}  // namespace

ProductRows::ProductRows(const Csr& a, const at::Tensor& x, int64_t width) : a_(a), type_(x.scalar_type()), x_(x) {
  const int64_t rows = a.rows, own = x.size(1);
  if (!x.is_cuda()) {
    stretch_ = stretch_rows(rows, std::max(own, width), false);
    x_ = x.to(at::kFloat);
    if (width > 0) result_ = at::empty({rows, width}, x.options());
    return;
  }
  if (width == 0) {
    stretch_ = rows;
    product_ = at::empty({rows, own}, x.options());
    multiply_rows(a, x, 0, rows, product_);
    return;
  }
  // Enough rows for several waves of a product's tiles, an eighth of a large matrix at least.
  const int64_t values = (28 << 20) / static_cast<int64_t>(x.element_size());
  const int64_t most = std::max<int64_t>(ceil_div(values, std::max<int64_t>(std::max(own, width), 1)), ceil_div(rows, 8));
  stretch_ = std::min(rows, ceil_div(ceil_div(rows, std::max<int64_t>(ceil_div(rows, most), 1)), 8) * 8);
  // Result rows up to (k + 1)·stretch must end before product row k·stretch, for every k: the first and the last decide.
  constexpr int64_t kAligned = 64;  // values: every vector width of the kernels
  const int64_t ahead = std::max(stretch_ * width, rows * width - (rows - stretch_) * own);
  const int64_t from = ceil_div(std::max<int64_t>(ahead, 0), kAligned) * kAligned;
  const at::Tensor memory = at::empty({std::max(from + rows * own, rows * width)}, x.options());
  product_ = placed(memory, from, rows, own);
  result_ = placed(memory, 0, rows, width);
  multiply_rows(a, x, 0, rows, product_);
}

at::Tensor ProductRows::read(int64_t first, int64_t last) {
  if (x_.is_cuda()) return product_.narrow(0, first, last - first);
  if (!product_.defined() || product_.size(0) < last - first) product_ = at::empty({last - first, x_.size(1)}, x_.options());
  const at::Tensor rows = product_.narrow(0, 0, last - first);
  multiply_rows(a_, x_, first, last, rows);
  return rows.to(type_);
}

void ProductRows::write(int64_t first, int64_t last, const Write& write) {
  const int64_t some = x_.is_cuda() ? stretch_ : last - first;
  for (int64_t from = first; from < last; from += some) {
    const int64_t to = std::min(from + some, last), there = x_.is_cuda() ? from : from - first;
    at::Tensor rows = result_.narrow(0, from, to - from);
    write(from, to, product_.narrow(0, there, to - from).to(type_), rows);
  }
}

void ProductRows::write_all(const Write& run) {
  for (int64_t first = 0; first < a_.rows; first += stretch_) {
    const int64_t last = std::min(first + stretch_, a_.rows);
    read(first, last);
    write(first, last, run);
  }
}

}  // namespace satchel
