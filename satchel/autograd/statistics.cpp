#include "satchel/autograd/statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string>
#include <utility>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {

void check_activations(const at::Tensor& x, const char* op) {
  if (!x.defined()) fail(op, "x must be given", "nothing");
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf) {
    fail(op, "x must be float32, bfloat16 or float16", c10::toString(x.scalar_type()));
  }
}

void check_weight(const at::Tensor& x, const at::Tensor& w, int64_t count, const char* name, const char* op) {
  if (!w.defined()) return;
  if (w.numel() != count || w.scalar_type() != at::kFloat || w.device() != x.device() || !w.is_contiguous()) {
    fail(op, std::string(name) + " must be " + std::to_string(count) + " contiguous float32 numbers on x's device",
         w.toString() + " of " + std::to_string(w.numel()));
  }
}

void check_channels(const at::Tensor& x, const at::Tensor& w, const char* name, const char* op) {
  if (w.defined() && w.numel() != x.size(1)) {
    fail(op, "x must have " + std::to_string(w.numel()) + " channels (dimension 1), as " + name + " has numbers", x.sizes());
  }
}

void check_norm(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options, const char* op) {
  const bool right_shape = x.defined() && (x.dim() == 2 || (norm != Norm::layer && is_image(x)));
  if (!right_shape) {
    fail(op, norm == Norm::layer ? "x must be rows × channels" : "x must be rows × channels or a map N×C×…",
         x.defined() ? std::to_string(x.dim()) + " dimensions" : "nothing");
  }
  check_activations(x, op);
  const int64_t channels = x.size(1);
  const auto check = [&](const at::Tensor& w, const char* name) {
    check_channels(x, w, name, op);
    check_weight(x, w, channels, name, op);
  };
  if (norm != Norm::none) check(weights.gamma, "gamma");
  if (norm != Norm::none) check(weights.beta, "beta");
  if (norm != Norm::batch) return;
  if (weights.running_mean.defined() != weights.running_var.defined())
    fail(op, "running mean and variance must be given together", "one of them");
  check(weights.running_mean, "running mean");
  check(weights.running_var, "running variance");
  if (!options.training && !weights.running_mean.defined()) fail(op, "evaluation needs running statistics", "none");
  const int64_t rows = channels == 0 ? x.size(0) : x.numel() / channels;
  if (options.training && rows < 2) {
    fail(op, x.dim() == 2 ? "training needs at least two rows" : "training needs more than 1 value a channel", rows);
  }
}

namespace {

/// Whole samples' rows as samples × rows of each × groups × channels of each.
at::Tensor in_groups(const at::Tensor& rows, const NormAxes& axes) {
  return rows.view({rows.size(0) / axes.span, axes.span, axes.groups, rows.size(1) / axes.groups});
}

/// The part of each row's or group's numbers that belongs to `rows` rows from `first` on.
at::Tensor part_of(const at::Tensor& numbers, const NormAxes& axes, int64_t first, int64_t rows) {
  const int64_t span = axes.groups > 0 ? axes.span : 1;
  return numbers.narrow(0, first / span, rows / span);
}

Statistics moments_of_channels(const at::Tensor& x, const NormWeights& w, const NormOptions& options) {
  const ColumnMoments moments = column_moments(x, {w.running_mean, w.running_var, options.eps, options.momentum});
  return {moments.mean.unsqueeze(0), moments.rstd.unsqueeze(0)};
}

}  // namespace

Statistics statistics_of(const at::Tensor& x, const NormWeights& weights, const NormAxes& axes, const NormOptions& options) {
  const at::NoGradGuard no_grad;
  const bool batch = axes.by_channel();
  if (batch && !options.training) {
    return {weights.running_mean.unsqueeze(0), weights.running_var.add(options.eps).rsqrt_().unsqueeze(0)};
  }
  if (batch && axes.span > 0 && x.is_cuda()) return moments_of_channels(x, weights, options);
  if (axes.groups > 0) {
    auto [var, mean] = at::var_mean(in_groups(x, axes).to(at::kFloat), at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
    return {mean, var.add_(options.eps).rsqrt_()};
  }
  if (!axes.centred) {
    const at::Tensor squares = x.to(at::kFloat).square().mean(at::IntArrayRef{1}, /*keepdim=*/true);
    return {at::zeros_like(squares), squares.add(options.eps).rsqrt_()};
  }
  auto [var, mean] = at::var_mean(x.to(at::kFloat), at::IntArrayRef{batch ? 0 : 1}, /*correction=*/0, /*keepdim=*/true);
  if (batch && weights.running_mean.defined()) {
    const double rows = static_cast<double>(x.size(0)), m = options.momentum;
    weights.running_mean.mul_(1 - m).add_(mean.squeeze(0), m);
    weights.running_var.mul_(1 - m).add_(var.squeeze(0), m * rows / (rows - 1));
  }
  return {mean, var.add_(options.eps).rsqrt_()};
}

at::Tensor normalised(const at::Tensor& x, const Statistics& s, const NormAxes& axes, int64_t first) {
  if (axes.by_channel()) return at::sub(x, s.mean).mul_(s.rstd);  // the statistics' type wins over x's
  const at::Tensor mean = part_of(s.mean, axes, first, x.size(0)), rstd = part_of(s.rstd, axes, first, x.size(0));
  if (!axes.centred) return at::mul(x, rstd);
  if (axes.groups == 0) return at::sub(x, mean).mul_(rstd);
  return at::sub(in_groups(x, axes), mean).mul_(rstd).view(x.sizes());
}

Affine folded(const Statistics& s, const at::Tensor& gamma, const at::Tensor& beta) {
  const at::Tensor rstd = s.rstd.squeeze(0), scale = gamma.defined() ? at::mul(gamma.detach(), rstd) : rstd.contiguous();
  const at::Tensor offset = at::mul(s.mean.squeeze(0), scale).neg_();
  return {scale, beta.defined() ? offset.add_(beta.detach()) : offset};
}

namespace {

/// Rows of g in float32: g's own memory, or a copy of another type that store() puts back.
struct RowStretch {
  at::Tensor own, rows;

  explicit RowStretch(const at::Tensor& part) : own(part), rows(part.to(at::kFloat)) {}
  void store() const {
    if (!rows.is_same(own)) own.copy_(rows);
  }
};

void add_sums(const NormGradients& sums, const at::Tensor& g, const at::Tensor& x) {
  sums.beta.add_(g.sum(0));
  sums.gamma.add_(at::mul(g, x).sum(0));
}

/// What x̂_i·mean(g·x̂) has too much of on average, as a share of g_i, is made up for: the codes' variance over the number of values.
/// `squares` is the mean of x̂² of each statistic.
void make_up_(const at::Tensor& g, const at::Tensor& squares, const at::Tensor& rstd, std::optional<double> eps, int64_t count) {
  if (!eps || count == 0) return;
  const at::Tensor variance = squares.sub(1).add_(at::square(rstd), *eps);
  g.mul_(variance.div_(static_cast<double>(count)).add_(1));
}

/// Each row's own statistics: g and x̂ of the same rows.
void layer_back_(const at::Tensor& g, const at::Tensor& x, const NormBack& back, const at::Tensor& rstd) {
  if (back.gamma.defined()) g.mul_(back.gamma);
  const at::Tensor along = at::mul(g, x).mean(1, /*keepdim=*/true);
  const at::Tensor offset = back.axes.centred ? g.mean(1, /*keepdim=*/true) : at::Tensor();
  if (back.eps) make_up_(g, at::square(x).mean(1, /*keepdim=*/true), rstd, back.eps, x.size(1));
  g.sub_(x.mul_(along));
  if (offset.defined()) g.sub_(offset);
  g.mul_(rstd);
}

/// Each group's own: g and x̂ of the same samples.
void group_back_(const at::Tensor& rows, const at::Tensor& values, const NormBack& back, const at::Tensor& rstd) {
  if (back.gamma.defined()) rows.mul_(back.gamma);
  const at::Tensor g = in_groups(rows, back.axes), x = in_groups(values, back.axes);
  const at::Tensor along = at::mul(g, x).mean(at::IntArrayRef{1, 3}, /*keepdim=*/true), offset = g.mean(at::IntArrayRef{1, 3}, true);
  if (back.eps) make_up_(g, at::square(x).mean(at::IntArrayRef{1, 3}, true), rstd, back.eps, x.size(1) * x.size(3));
  g.sub_(x.mul_(along)).sub_(offset).mul_(rstd);
}

/// BatchNorm's of a map's rows on CUDA from values that stand decoded, of any of the three types.
NormGradients map_back_(const at::Tensor& g, const NormBack& back, bool needs_x, const Stretches& stretches) {
  const int64_t channels = g.size(1);
  const auto floats = g.options().dtype(at::kFloat);
  const at::Tensor ones = at::ones({channels}, floats);
  const bool raw = back.mean.defined();  // values are x's own, else normalised: mean 0, deviation 1
  const at::Tensor mean = raw ? back.mean.reshape({channels}) : at::zeros({channels}, floats), rstd = back.rstd.reshape({channels});
  const at::Tensor gamma = back.gamma.defined() ? back.gamma : ones;
  const at::Tensor sum_g = at::zeros({channels}, floats), sum_gx = at::zeros({channels}, floats);
  const auto part = [&](int64_t first, int64_t last) { return g.narrow(0, first, last - first); };
  const auto values = [&](int64_t first, int64_t last) { return back.values(first, last, g.scalar_type()).to(g.scalar_type()); };
  stretches([&](int64_t first, int64_t last) {
    const auto some = at::batch_norm_backward_reduce(part(first, last), values(first, last), mean, raw ? rstd : ones, gamma,
                                                     /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
    sum_g.add_(std::get<0>(some));
    sum_gx.add_(std::get<1>(some));
  });
  const NormGradients sums{raw ? at::mul(sum_gx, rstd) : sum_gx, sum_g};
  if (!needs_x) return sums;
  // γ·rstd·(g − Σg/N − x̂·Σ(g·x̂)/N) as a line in g and in what the values are, x̂ or x = mean + x̂/rstd.
  const double share = 1.0 / static_cast<double>(g.size(0));
  const at::Tensor scale = at::mul(gamma, rstd);
  at::Tensor along = at::mul(scale, sums.gamma).mul_(-share), offset = at::mul(scale, sum_g).mul_(-share);
  if (raw) {
    along.mul_(rstd);
    offset.sub_(at::mul(along, mean));
  }
  stretches([&](int64_t first, int64_t last) { norm_rows_back_(part(first, last), values(first, last), scale, along, offset); });
  return sums;
}

}  // namespace

NormGradients norm_back_(const at::Tensor& g, const NormBack& back, bool needs_x, const Stretches& stretches) {
  const NormAxes& axes = back.axes;
  const bool channels = axes.by_channel();
  if (channels && axes.span > 0 && back.training && g.is_cuda()) return map_back_(g, back, needs_x, stretches);
  const auto floats = g.options().dtype(at::kFloat);
  const NormGradients sums{at::zeros({g.size(1)}, floats), at::zeros({g.size(1)}, floats)};
  const auto part = [&](int64_t first, int64_t last) { return RowStretch(g.narrow(0, first, last - first)); };
  const auto values = [&](int64_t first, int64_t last) {
    const at::Tensor x = back.values(first, last, at::kFloat);
    return back.mean.defined() ? normalised(x, {back.mean, back.rstd}, axes, first) : x;
  };
  stretches([&](int64_t first, int64_t last) {
    const at::Tensor x = values(first, last);
    const RowStretch some = part(first, last);
    add_sums(sums, some.rows, x);
    if (!needs_x || channels) return;
    const at::Tensor rstd = part_of(back.rstd, axes, first, last - first);
    if (axes.groups > 0) {
      group_back_(some.rows, x, back, rstd);
    } else {
      layer_back_(some.rows, x, back, rstd);
    }
    some.store();
  });
  if (!needs_x || !channels) return sums;
  const at::Tensor scale = back.gamma.defined() ? at::mul(back.gamma, back.rstd.squeeze(0)) : back.rstd.squeeze(0);
  if (!back.training) {
    g.mul_(scale);
    return sums;
  }
  const double rows = static_cast<double>(g.size(0));
  const at::Tensor along = sums.gamma.div(rows), offset = sums.beta.div(rows);
  stretches([&](int64_t first, int64_t last) {
    const RowStretch some = part(first, last);
    some.rows.sub_(values(first, last).mul_(along).add_(offset)).mul_(scale);
    some.store();
  });
  return sums;
}

}  // namespace satchel
