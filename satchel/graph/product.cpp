// A·x is summed in the order of kernels/sparse.h on either device, whatever the number of threads; 16 bits in float32.
#include "satchel/graph/product.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "satchel/autograd/node.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/kernels/cpu/cpu.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"

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

/// The lists of groups and of long rows, which only a GPU reads.
void add_lists(const Csr& a, Sparse& s) {
  if (!a.long_row.defined() || !a.group_row.defined() || a.group_row.numel() < 1)
    fail(kOp, "a matrix on CUDA must have its lists of rows, as csr.h's functions make them", "none");
  s.groups = a.group_row.numel() - 1;
  s.group_row = line<int32_t>(a, a.group_row, s.groups + 1, "group_row");
  if (a.group_order.defined()) {
    s.ordered_groups = a.group_order.numel();
    s.large_groups = a.large_groups;
    s.group_order = line<int32_t>(a, a.group_order, s.ordered_groups, "group_order");
    if (s.large_groups < 0 || s.large_groups > s.ordered_groups || s.ordered_groups > s.groups)
      fail(kOp, "large_groups must be groups of group_order", s.large_groups);
  }
  if (a.long_row.numel() == 0) return;
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

/// Rows [first, last) as a matrix of its own.
Sparse part_of(Sparse s, const Csr& a, int64_t first, int64_t last) {
  if (first == 0 && last == a.rows) return s;
  s.start += first;
  if (s.row_scale != nullptr) s.row_scale += first;
  s.rows = last - first;
  s.first_row = first;
  if (s.group_row == nullptr) return s;
  if (a.long_list == nullptr || a.group_list == nullptr) fail(kOp, "parts of a matrix need its lists of rows on the host", "none");
  const auto begin = a.group_list->begin(), end = a.group_list->end();
  const auto from_group = std::upper_bound(begin, end, first) - 1, to_group = std::lower_bound(from_group, end, last);
  s.group_row += from_group - begin;
  s.groups = to_group - from_group;
  s.group_order = nullptr;
  s.ordered_groups = s.large_groups = 0;
  if (s.long_rows == 0) return s;
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

/// y, and what goes into it beside A·x.
struct Target {
  at::Tensor y;
  at::Tensor plus = {};
};

/// x as the kernel reads it fastest: rows of a product with about as many rows are copied where they do not lie in words of 8 bytes, as 47
/// columns of 16 bits, so that they lie in words of 16.
at::Tensor in_words(const Sparse& s, const at::Tensor& x) {
  constexpr int64_t kWord = 16;
  const int64_t size = x.element_size(), width = x.size(1);
  const auto lies_in = [&](int64_t bytes) {
    return x.stride(0) * size % bytes == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
  };
  const int64_t padded = ceil_div(width * size, kWord) * kWord / size;
  if (width * size <= kWord || s.rows < x.size(0) / 2 || (width * size % 8 == 0 && lies_in(8)) || (x.stride(0) >= padded && lies_in(kWord)))
    return x;
  const at::Tensor rows = at::empty({x.size(0), padded}, x.options()).narrow(1, 0, width);
  return rows.copy_(x);
}

void run_there(const Sparse& s, const at::Tensor& given, const Target& to, const Place& place) {
  const at::Tensor x = in_words(s, given);
  cuda::ProductSides sides;
  sides.type = dtype_of(x.scalar_type());
  sides.width = x.size(1);
  sides.x = x.const_data_ptr();
  sides.x_stride = x.stride(0);
  sides.y = to.y.mutable_data_ptr();
  sides.y_stride = to.y.stride(0);
  if (to.plus.defined()) {
    sides.plus = to.plus.const_data_ptr();
    sides.plus_stride = to.plus.stride(0);
  }
  const at::Tensor scratch = at::empty({cuda::multiply_scratch_values(s, sides.width)}, x.options().dtype(at::kFloat));
  cuda::multiply(s, sides, scratch.mutable_data_ptr<float>(), place.stream());
}

/// The CPU's kernel knows float32 row after row; the rest is copies.
void run_here(const Sparse& s, const at::Tensor& x, const Target& to) {
  const at::Tensor source = x.to(at::kFloat).contiguous();
  const int64_t width = x.size(1);
  const bool direct = to.y.is_contiguous() && to.y.scalar_type() == at::kFloat && !to.plus.defined();
  const at::Tensor sums = direct ? to.y : at::empty({s.rows, width}, source.options());
  multiply_here(s, source.const_data_ptr<float>(), width, sums.mutable_data_ptr<float>());
  if (direct) return;
  to.y.copy_(to.plus.defined() ? at::add(to.plus, sums) : sums);
}

void run(const Sparse& s, const at::Tensor& x, const Target& to) {
  const Place place(x.device(), kOp);
  if (to.y.numel() == 0) return;
  place.cuda() ? run_there(s, x, to, place) : run_here(s, x, to);
}

Sparse check_product(const Csr& a, const at::Tensor& x) {
  check_tensor(x, kOp);
  Sparse s = sparse_of(a);
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kHalf && x.scalar_type() != at::kBFloat16)
    fail(kOp, "x must be float32, float16 or bfloat16", c10::toString(x.scalar_type()));
  if (x.device() != a.device()) fail(kOp, "x must be on the matrix's device", x.device());
  if (x.dim() != 2 || x.size(0) != a.columns) fail(kOp, "x must have " + std::to_string(a.columns) + " rows", x.sizes());
  if (x.is_cuda()) add_lists(a, s);
  return s;
}

void check_part(const Csr& a, const at::Tensor& x, int64_t first, int64_t last, const at::Tensor& out) {
  if (first < 0 || last < first || last > a.rows) fail(kOp, "rows must be 0 to " + std::to_string(a.rows), std::max(first, last));
  if (!has_plain_rows(x)) fail(kOp, "x must have rows without gaps", "other strides");
  if (out.dim() != 2 || out.size(0) != last - first || out.size(1) != x.size(1) || !has_plain_rows(out) || out.device() != x.device() ||
      out.scalar_type() != x.scalar_type()) {
    fail(kOp, "out must be of x's type and hold the rows asked for, without gaps in them", out.sizes());
  }
}

}  // namespace

at::Tensor multiply(const Csr& a, const at::Tensor& x) {
  const Sparse s = check_product(a, x);
  const at::Tensor given = x.detach().resolve_neg(), in = has_plain_rows(given) ? given : given.contiguous();
  at::Tensor out = at::empty({a.rows, in.size(1)}, in.options());
  run(s, in, {out});
  return out;
}

void multiply_rows(const Csr& a, const at::Tensor& x, int64_t first, int64_t last, const at::Tensor& out) {
  const Sparse s = check_product(a, x);
  check_part(a, x, first, last, out);
  run(part_of(s, a, first, last), x, {out});
}

at::Tensor multiply_plus(const Csr& a, const at::Tensor& x, const at::Tensor& plus) {
  const Sparse s = check_product(a, x);
  if (!has_plain_rows(x)) fail(kOp, "x must have rows without gaps", "other strides");
  if (plus.dim() != 2 || plus.size(0) != a.rows || plus.size(1) != x.size(1) || !has_plain_rows(plus) || plus.device() != x.device() ||
      plus.scalar_type() != x.scalar_type()) {
    fail(kOp, "what is added must be of A·x's shape and type", plus.sizes());
  }
  at::Tensor out = at::empty({a.rows, x.size(1)}, x.options());
  run(s, x, {out, plus});
  return out;
}

namespace {

/// A tensor of its own in memory that others share.
at::Tensor placed(const at::Tensor& memory, int64_t from, int64_t rows, int64_t width) {
  at::Tensor t = at::empty({0}, memory.options());
  t.set_(memory.storage(), from, {rows, width}, {width, 1});
  return t;
}

}  // namespace

ProductRows::ProductRows(const Csr& a, const at::Tensor& x, int64_t width, bool in_place) : a_(a), type_(x.scalar_type()), x_(x) {
  const int64_t rows = a.rows, own = x.size(1);
  if (!x.is_cuda()) {
    stretch_ = stretch_rows(rows, std::max(own, width), false);
    x_ = x.to(at::kFloat);
    if (width > 0) result_ = at::empty({rows, width}, x.options());
    return;
  }
  if (width == 0 || (in_place && width == own)) {
    stretch_ = rows;
    product_ = at::empty({rows, own}, x.options());
    if (width > 0) result_ = product_;
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

namespace {

std::string sizes_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::string text = std::string(c10::toString(t.scalar_type())) + " [";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "] on " + t.device().str();
}

/// `half`: 16 bits will do too.
void check_matrix(const at::Tensor& t, int64_t rows, int64_t columns, const Adjacency& a, const char* name, const char* op,
                  bool half = false) {
  const auto known = [&](at::ScalarType type) { return type == at::kFloat || (half && (type == at::kHalf || type == at::kBFloat16)); };
  const bool fits = t.defined() && t.dim() == 2 && (rows < 0 || t.size(0) == rows) && (columns < 0 || t.size(1) == columns) &&
                    known(t.scalar_type()) && t.device() == a.matrix.device();
  if (fits) return;
  const auto size = [](int64_t n) { return n < 0 ? std::string("any") : std::to_string(n); };
  fail(op,
       std::string(name) + " must be float32" + (half ? ", float16 or bfloat16 [" : " [") + size(rows) + ", " + size(columns) + "] on " +
           a.matrix.device().str(),
       sizes_of(t));
}

void check_bias(const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  if (!bias.defined()) return;
  if (bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.scalar_type() == at::kFloat && bias.device() == weight.device()) return;
  fail(op, "bias must be float32 [" + std::to_string(weight.size(0)) + "] on " + weight.device().str(), sizes_of(bias));
}

}  // namespace

at::Tensor bias_gradient(const at::Tensor& g, bool norm_follows) {
  return norm_follows ? at::zeros({g.size(1)}, g.options().dtype(at::kFloat)) : column_sums(g);
}

bool aggregates_first(const Adjacency& a, int64_t in, int64_t out) {
  if (!a.targets.defined()) return out >= in;
  const int64_t entries = a.matrix.entries();
  return entries * in + a.outputs() * (in + out) <= a.nodes() * (in + out) + entries * out;
}

void check_layer(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  check_matrix(weight, -1, -1, a, "weight", op);
  check_matrix(x, a.nodes(), weight.size(1), a, "x", op, true);
  check_no_autocast(x, op);
  check_bias(weight, bias, op);
}

void check_layer(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  if (!input.is_sparse()) {
    if (input.x.requires_grad() && at::GradMode::is_enabled()) {
      fail(op, "a data set needs no gradient (pass x as a tensor where it does)", "features that require one");
    }
    if (input.aggregated.defined() && !input.aggregated_by.is_matrix(a.matrix)) {
      fail(op, "aggregated features must be made with this adjacency, unchanged since (with_aggregated)", "another's");
    }
    if (input.aggregated.defined() && !input.aggregated_by.is_features(input.x)) {
      fail(op, "aggregated features must be made of these features, unchanged since (with_aggregated)", "those of others");
    }
    check_layer(input.x, a, weight, bias, op);
    if (input.aggregated.defined()) {
      check_matrix(input.aggregated, -1, input.x.size(1), a, "aggregated x", op, true);
      if (input.aggregated.size(0) < 1 || input.aggregated.size(0) > a.outputs())
        fail(op, "aggregated features must be of 1 to " + std::to_string(a.outputs()) + " nodes", input.aggregated.size(0));
      if (input.aggregated.scalar_type() != input.x.scalar_type())
        fail(op, "aggregated features must have the features' type", c10::toString(input.aggregated.scalar_type()));
    }
    return;
  }
  if (input.sparse.matrix.rows != a.nodes()) fail(op, "x must have " + std::to_string(a.nodes()) + " rows", input.sparse.matrix.rows);
  check_matrix(weight, -1, -1, a, "weight", op);
  if (input.sparse.matrix.columns != weight.size(1))
    fail(op, "x must have " + std::to_string(weight.size(1)) + " columns", input.sparse.matrix.columns);
  check_bias(weight, bias, op);
}

}  // namespace satchel
