#include "satchel/tensor/split_product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/split_product.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/order.h"

namespace satchel {
namespace {

constexpr const char* kOp = "split_product";
// Below these sizes a tile is mostly padding, or too few tiles for the chip.
constexpr int64_t kFewestRows = 2048, kFewestColumns = 48;

bool wants_split(const at::Tensor& x, int64_t rows) {
  if (!x.is_cuda() || x.scalar_type() != at::kFloat || rows < kFewestRows || allows_tf32()) return false;
  const Place place(x.device(), kOp);
  return cuda::split_fits();
}

cuda::SplitFactor factor_of(const std::vector<at::Tensor>& factors) {
  cuda::SplitFactor f;
  f.count = static_cast<int>(factors.size());
  f.columns = factors[0].size(1);
  for (size_t i = 0; i < factors.size(); ++i) {
    f.depth[i] = factors[i].size(0);
    f.b[i] = factors[i].const_data_ptr<float>();
    f.by_depth[i] = factors[i].stride(0), f.by_column[i] = factors[i].stride(1);
  }
  return f;
}

bool is_like(const at::Tensor& x, const at::Tensor& factor) {
  return x.device() == factor.device() && x.scalar_type() == factor.scalar_type();
}

void check_factors(const std::vector<at::Tensor>& factors, const at::Tensor& bias) {
  if (factors.empty() || factors.size() > 2) fail(kOp, "there must be one or two factors", factors.size());
  for (const at::Tensor& f : factors) {
    if (f.dim() != 2 || f.size(1) != factors[0].size(1) || !is_like(f, factors[0]))
      fail(kOp, "factors must be matrices of one type, on one device, of equally many columns");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != factors[0].size(1) || !is_like(bias, factors[0])))
    fail(kOp, "bias must have the factors' type and device and a value a column", bias.numel());
}

void check_rows(const std::vector<at::Tensor>& factors, const std::vector<at::Tensor>& rows, const at::Tensor& to) {
  if (rows.size() != factors.size()) fail(kOp, "there must be as many matrices of rows as factors", rows.size());
  if (to.dim() != 2 || to.size(1) != factors[0].size(1) || !is_like(to, factors[0]))
    fail(kOp, "the result must have the factors' type, device and columns", to.size(-1));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].dim() != 2 || rows[i].size(1) != factors[i].size(0) || !is_like(rows[i], factors[0]))
      fail(kOp, "rows must have their factor's type and device and be as long as it is deep", rows[i].size(-1));
    if (rows[i].size(0) != to.size(0)) fail(kOp, "rows and result must be as many", rows[i].size(0));
  }
}

cuda::TallPair pair_of(const at::Tensor& a, const at::Tensor& b) {
  return {b.size(0), a.const_data_ptr<float>(), b.const_data_ptr<float>(), a.size(0), b.size(1), a.stride(1), b.stride(0)};
}

}  // namespace

bool allows_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
}

bool splits_product(const at::Tensor& factor, int64_t depth, int64_t rows) {
  return factor.dim() == 2 && std::min(factor.size(1), depth) >= kFewestColumns && wants_split(factor, rows);
}

RowProduct::RowProduct(std::vector<at::Tensor> factors, at::Tensor bias, int64_t rows)
    : factors_(std::move(factors)), bias_(std::move(bias)) {
  check_factors(factors_, bias_);
  int64_t depth = 0;
  for (const at::Tensor& f : factors_) depth += f.size(0);
  if (!splits_product(factors_[0], depth, rows)) return;
  const Place place(factors_[0].device(), kOp);
  const cuda::SplitFactor f = factor_of(factors_);
  pieces_ = at::empty({cuda::split_factor_bytes(f)}, factors_[0].options().dtype(at::kByte));
  cuda::split_factor(f, pieces_.mutable_data_ptr(), place.stream());
}

bool RowProduct::writes_in_place() const { return is_split() && factors_[0].size(1) <= cuda::kSplitColumns; }

void RowProduct::write(at::Tensor& to, const std::vector<at::Tensor>& rows) const {
  check_rows(factors_, rows, to);
  const bool plain = has_plain_rows(to) && std::all_of(rows.begin(), rows.end(), has_plain_rows);
  for (const at::Tensor& r : rows) {
    const bool over = to.numel() > 0 && r.const_data_ptr() == to.const_data_ptr();
    if (over && !(writes_in_place() && plain && r.stride(0) == to.stride(0)))
      fail(kOp, "rows must not be written over but where writes_in_place(), each in its own place");
  }
  if (!is_split() || !plain) {
    bias_.defined() ? at::addmm_out(to, bias_, rows[0], factors_[0]) : at::mm_out(to, rows[0], factors_[0]);
    if (rows.size() == 2) to.addmm_(rows[1], factors_[1]);
    return;
  }
  const Place place(to.device(), kOp);
  cuda::SplitRows from;
  from.rows = to.size(0);
  for (size_t i = 0; i < rows.size(); ++i) {
    from.a[i] = rows[i].const_data_ptr<float>();
    from.stride[i] = rows[i].stride(0);
  }
  const at::Tensor bias = bias_.defined() ? bias_.contiguous() : bias_;
  cuda::split_product(from, factor_of(factors_), pieces_.const_data_ptr(), bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                      to.mutable_data_ptr<float>(), to.stride(0), place.stream());
}

at::Tensor RowProduct::operator()(const std::vector<at::Tensor>& rows) const {
  at::Tensor to = at::empty({rows.at(0).size(0), factors_[0].size(1)}, factors_[0].options());
  write(to, rows);
  return to;
}

bool splits_gradient(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kFarthest = 1 << 24;  // values from row to row
  return a.dim() == 2 && b.dim() == 2 && b.scalar_type() == at::kFloat && a.stride(0) == 1 && b.stride(1) == 1 &&
         a.stride(1) <= kFarthest && b.stride(0) <= kFarthest && a.size(1) == b.size(0) && a.device() == b.device() &&
         std::min(a.size(0), b.size(1)) >= kFewestColumns && wants_split(a, b.size(0));
}

void split_gradient_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (!splits_gradient(a, b)) fail(kOp, "splits_gradient must be true of both matrices");
  if (sums.scalar_type() != at::kFloat || sums.device() != b.device() || !sums.is_contiguous() || sums.dim() != 2 ||
      sums.size(0) != a.size(0) || sums.size(1) != b.size(1))
    fail(kOp, "sums must be float32 in one piece, of the product's shape and device");
  const Place place(b.device(), kOp);
  const cuda::TallPair pair = pair_of(a, b);
  const at::Tensor scratch = at::empty({cuda::split_gradient_scratch_bytes(pair)}, b.options().dtype(at::kByte));
  cuda::split_gradient(pair, add, sums.mutable_data_ptr<float>(), scratch.mutable_data_ptr(), place.stream());
}

}  // namespace satchel
