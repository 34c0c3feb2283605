#include "satchel/autograd/statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {

void check_norm(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options, const char* op) {
  if (!x.defined() || x.dim() != 2)
    fail(op, "x must be rows × channels", x.defined() ? std::to_string(x.dim()) + " dimensions" : "nothing");
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
    fail(op, "x must be float32 or bfloat16", c10::toString(x.scalar_type()));
  }
  check_no_autocast(x, op);
  const auto check = [&](const at::Tensor& w, const char* name) {
    if (!w.defined() || w.dim() != 1 || w.size(0) != x.size(1) || w.scalar_type() != at::kFloat || w.device() != x.device() ||
        !w.is_contiguous()) {
      fail(op, std::string(name) + " must be " + std::to_string(x.size(1)) + " contiguous float32 numbers on x's device",
           w.defined() ? w.toString() + " of " + std::to_string(w.numel()) : "nothing");
    }
  };
  if (norm != Norm::none) check(weights.gamma, "gamma");
  if (norm != Norm::none) check(weights.beta, "beta");
  if (norm != Norm::batch) return;
  if (weights.running_mean.defined() != weights.running_var.defined())
    fail(op, "running mean and variance must be given together", "one of them");
  if (weights.running_mean.defined()) check(weights.running_mean, "running mean");
  if (weights.running_var.defined()) check(weights.running_var, "running variance");
  if (!options.training && !weights.running_mean.defined()) fail(op, "evaluation needs running statistics", "none");
  if (options.training && x.size(0) < 2) fail(op, "training needs at least two rows", x.size(0));
}

Statistics statistics_of(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options) {
  const at::NoGradGuard no_grad;
  if (norm == Norm::batch && !options.training) {
    return {weights.running_mean.unsqueeze(0), weights.running_var.add(options.eps).rsqrt_().unsqueeze(0)};
  }
  auto [var, mean] = at::var_mean(x.to(at::kFloat), at::IntArrayRef{norm == Norm::batch ? 0 : 1}, /*correction=*/0, /*keepdim=*/true);
  if (norm == Norm::batch && weights.running_mean.defined()) {
    const double rows = static_cast<double>(x.size(0)), m = options.momentum;
    weights.running_mean.mul_(1 - m).add_(mean.squeeze(0), m);
    weights.running_var.mul_(1 - m).add_(var.squeeze(0), m * rows / (rows - 1));
  }
  return {mean, var.add_(options.eps).rsqrt_()};
}

at::Tensor normalised(const at::Tensor& x, const Statistics& s) {
  return at::sub(x, s.mean).mul_(s.rstd);  // the statistics' type wins over bfloat16
}

namespace {

/// Rows of g in float32: g's own memory, or a copy of bfloat16 that store() puts back.
struct Stretch {
  at::Tensor own, rows;

  explicit Stretch(const at::Tensor& part) : own(part), rows(part.to(at::kFloat)) {}
  void store() const {
    if (!rows.is_same(own)) own.copy_(rows);
  }
};

void add_sums(const NormGradients& sums, const at::Tensor& g, const at::Tensor& x) {
  sums.beta.add_(g.sum(0));
  sums.gamma.add_(at::mul(g, x).sum(0));
}

/// Each row's own statistics: g and x̂ of the same rows.
void layer_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& rstd) {
  g.mul_(gamma);
  const at::Tensor along = at::mul(g, x).mean(1, /*keepdim=*/true), offset = g.mean(1, /*keepdim=*/true);
  g.sub_(x.mul_(along)).sub_(offset).mul_(rstd);
}

}  // namespace

NormGradients norm_back_(const at::Tensor& g, const NormBack& back, bool needs_x,
                         const std::function<void(const std::function<void(int64_t, int64_t)>&)>& stretches) {
  const auto floats = g.options().dtype(at::kFloat);
  const NormGradients sums{at::zeros({g.size(1)}, floats), at::zeros({g.size(1)}, floats)};
  const auto part = [&](int64_t first, int64_t last) { return Stretch(g.narrow(0, first, last - first)); };
  stretches([&](int64_t first, int64_t last) {
    const at::Tensor x = back.values(first, last);
    const Stretch some = part(first, last);
    add_sums(sums, some.rows, x);
    if (!needs_x || back.norm != Norm::layer) return;
    layer_back_(some.rows, x, back.gamma, back.rstd.narrow(0, first, last - first));
    some.store();
  });
  if (!needs_x || back.norm == Norm::layer) return sums;
  const at::Tensor scale = at::mul(back.gamma, back.rstd.squeeze(0));
  if (!back.training) {
    g.mul_(scale);
    return sums;
  }
  const double rows = static_cast<double>(g.size(0));
  const at::Tensor along = sums.gamma.div(rows), offset = sums.beta.div(rows);
  stretches([&](int64_t first, int64_t last) {
    const Stretch some = part(first, last);
    some.rows.sub_(back.values(first, last).mul_(along).add_(offset)).mul_(scale);
    some.store();
  });
  return sums;
}

}  // namespace satchel
