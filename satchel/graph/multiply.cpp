// A·x on either device, summed in the order of kernels/sparse.h whatever the number of threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "satchel/core/error.h"
#include "satchel/graph/csr.h"
#include "satchel/kernels/cpu/cpu.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

constexpr const char* kOp = "multiply";

/// Memory of a line of `count` numbers on the matrix's device; null where the tensor is undefined.
template <class T>
const T* line(const Csr& a, const at::Tensor& t, int64_t count, const std::string& name) {
  if (!t.defined()) return nullptr;
  if (t.scalar_type() != c10::CppTypeToScalarType<T>::value) {
    fail(kOp, name + " must be " + c10::toString(c10::CppTypeToScalarType<T>::value), c10::toString(t.scalar_type()));
  }
  if (t.device() != a.device()) fail(kOp, name + " must be on the matrix's device", t.device());
  if (t.layout() != at::kStrided || t.dim() != 1 || t.numel() != count || !t.is_contiguous()) {
    fail(kOp, name + " must be one line of " + std::to_string(count) + " numbers", t.sizes());
  }
  return t.const_data_ptr<T>();
}

Sparse sparse_of(const Csr& a) {
  if (a.rows < 0 || a.columns < 0) fail(kOp, "rows and columns must be 0 or more", std::min(a.rows, a.columns));
  if (!a.start.defined() || !a.column.defined()) fail(kOp, "matrix must have start and column", "an undefined tensor");
  Sparse s;
  s.rows = a.rows;
  s.columns = a.columns;
  s.start = line<int64_t>(a, a.start, a.rows + 1, "start");
  s.column = line<int32_t>(a, a.column, a.entries(), "column");
  s.value = line<float>(a, a.value, a.entries(), "value");
  s.row_scale = line<float>(a, a.row_scale, a.rows, "row_scale");
  s.column_scale = line<float>(a, a.column_scale, a.columns, "column_scale");
  return s;
}

/// The list of long rows, which only a GPU reads.
void add_long_rows(const Csr& a, Sparse& s) {
  if (!a.long_row.defined() || a.long_row.numel() == 0) return;
  s.long_rows = a.long_row.numel();
  s.long_stretches = a.long_stretches;
  s.long_row = line<int32_t>(a, a.long_row, s.long_rows, "long_row");
  if (!a.long_start.defined()) fail(kOp, "long_start must be defined where long_row is", "an undefined tensor");
  s.long_start = line<int64_t>(a, a.long_start, s.long_rows + 1, "long_start");
  // A long row has two stretches at least, and only its last one may be short of kStretch entries.
  if (s.long_stretches < 2 * s.long_rows || s.long_stretches - s.long_rows > a.entries() / kStretch) {
    fail(kOp, "long_stretches must be the last number of long_start", s.long_stretches);
  }
}

/// The first row of part p of `parts` that have about as many rows and entries together.
int64_t part_begin(const Sparse& a, int64_t p, int64_t parts) {
  const int64_t total = a.start[a.rows] - a.start[0] + a.rows, wanted = total / parts * p + total % parts * p / parts;
  int64_t low = 0, high = a.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.start[middle] - a.start[0] + middle < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return p == parts ? a.rows : low;
}

void multiply_here(const Sparse& a, const float* x, int64_t width, float* y) {
  constexpr int64_t kLeastPart = 1 << 16;  // numbers to add: about 10 µs of one core
  const int64_t work = (a.start[a.rows] - a.start[0] + a.rows) * width;
  const int64_t parts = std::clamp<int64_t>(work / kLeastPart, 1, at::get_num_threads());
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    best_cpu_kernel().multiply(a, x, width, y, part_begin(a, first, parts), part_begin(a, last, parts));
  });
}

/// Rows [first, last) as a matrix of its own. Without a list on the host hubs are summed by one team of lanes each.
Sparse part_of(Sparse s, const Csr& a, int64_t first, int64_t last) {
  s.start += first;
  if (s.row_scale != nullptr) s.row_scale += first;
  s.rows = last - first;
  s.first_row = first;
  if (s.long_rows == 0 || a.long_list == nullptr) {
    s.long_rows = s.long_stretches = 0;
    return s;
  }
  const auto at = [&](int64_t row) {
    return std::lower_bound(a.long_list->begin(), a.long_list->end(), row, [](const LongRow& l, int64_t r) { return l.row < r; });
  };
  const auto from = at(first), to = at(last);
  const int64_t skipped = from - a.long_list->begin();
  s.long_rows = to - from;
  s.long_row += skipped;
  s.long_start += skipped;
  s.first_stretch = from->stretch;
  s.long_stretches = to->stretch - from->stretch;
  return s;
}

void run(const Sparse& s, const at::Tensor& x, const at::Tensor& out, const Place& place) {
  const int64_t width = x.size(1);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  if (!place.cuda()) return multiply_here(s, from, width, to);
  const at::Tensor scratch = at::empty({cuda::multiply_scratch_values(s, width)}, x.options());
  cuda::multiply(s, from, width, to, scratch.mutable_data_ptr<float>(), place.stream());
}

Sparse check_product(const Csr& a, const at::Tensor& x) {
  check_tensor(x, kOp);
  Sparse s = sparse_of(a);
  if (x.scalar_type() != at::kFloat) fail(kOp, "x must be float32", c10::toString(x.scalar_type()));
  if (x.device() != a.device()) fail(kOp, "x must be on the matrix's device", x.device());
  if (x.dim() != 2 || x.size(0) != a.columns) fail(kOp, "x must have " + std::to_string(a.columns) + " rows", x.sizes());
  if (x.is_cuda()) add_long_rows(a, s);
  return s;
}

}  // namespace

at::Tensor multiply(const Csr& a, const at::Tensor& x) {
  const Sparse s = check_product(a, x);
  const Place place(x.device(), kOp);
  const at::Tensor in = x.detach().resolve_neg().contiguous();
  at::Tensor out = at::empty({a.rows, in.size(1)}, in.options());
  if (out.numel() > 0) run(s, in, out, place);
  return out;
}

void multiply_rows(const Csr& a, const at::Tensor& x, int64_t first, int64_t last, const at::Tensor& out) {
  const Sparse s = check_product(a, x);
  if (first < 0 || last < first || last > a.rows) fail(kOp, "rows must be 0 to " + std::to_string(a.rows), std::max(first, last));
  if (!x.is_contiguous()) fail(kOp, "x must be contiguous", "other strides");
  if (out.dim() != 2 || out.size(0) != last - first || out.size(1) != x.size(1) || !out.is_contiguous() || out.device() != x.device() ||
      out.scalar_type() != at::kFloat) {
    fail(kOp, "out must be contiguous float32 of the rows asked for", out.sizes());
  }
  const Place place(x.device(), kOp);
  if (out.numel() > 0) run(part_of(s, a, first, last), x, out, place);
}

}  // namespace satchel
