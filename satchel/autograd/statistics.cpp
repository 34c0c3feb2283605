#include "satchel/autograd/statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/shared.h"
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

/// Rows of a sample that share statistics, where channels do not: GroupNorm's samples, LayerNorm's single rows.
int64_t span_of(const NormAxes& axes) { return axes.groups > 0 ? axes.span : 1; }

/// Whole samples' rows as samples × rows of each × groups × channels of each. A row of LayerNorm is a sample of one group.
at::Tensor in_groups(const at::Tensor& rows, const NormAxes& axes) {
  const int64_t span = span_of(axes), groups = std::max<int64_t>(axes.groups, 1);
  return rows.view({rows.size(0) / span, span, groups, rows.size(1) / groups});
}
/// … whose mean is taken over rows and channels of each.
at::Tensor group_means(const at::Tensor& groups) { return groups.mean(at::IntArrayRef{1, 3}, /*keepdim=*/true); }

/// The part of each group's numbers that belongs to `rows` rows from `first` on.
at::Tensor part_of(const at::Tensor& numbers, const NormAxes& axes, int64_t first, int64_t rows) {
  return numbers.narrow(0, first / span_of(axes), rows / span_of(axes));
}

struct Moments {
  at::Tensor mean, var;
};

/// From a mean that may be off, means of the differences from it and of their squares. Of equal values the result is their own number.
Moments moments_about(const at::Tensor& near, const at::Tensor& apart, const at::Tensor& squares) {
  return {at::add(near, apart), at::sub(squares, at::square(apart)).clamp_min_(0)};
}

/// Of every channel over rows. On the CPU two passes in float32 take a tenth of var_mean's time.
Moments channel_moments(const at::Tensor& x) {
  constexpr int64_t rows = 0;  // the dimension
  if (x.is_cuda()) {
    auto [var, mean] = at::var_mean(x.to(at::kFloat), rows, /*correction=*/0, /*keepdim=*/true);
    return {mean, var};
  }
  const at::Tensor near = x.mean(rows, /*keepdim=*/true, at::kFloat), apart = at::zeros_like(near), squares = at::zeros_like(near);
  for_stretches_of(x.size(0), x.size(1), false, [&](int64_t first, int64_t last) {
    const at::Tensor some = at::sub(x.narrow(0, first, last - first), near);
    apart.add_(some.sum(rows, /*keepdim=*/true));
    squares.add_(some.square_().sum(rows, /*keepdim=*/true));
  });
  const double count = static_cast<double>(x.size(0));
  return moments_about(near, apart.div_(count), squares.div_(count));
}

/// Of every group of every sample, likewise.
Moments group_moments(const at::Tensor& x, const NormAxes& axes) {
  if (x.is_cuda()) {
    auto [var, mean] = at::var_mean(in_groups(x, axes).to(at::kFloat), at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
    return {mean, var};
  }
  std::vector<at::Tensor> mean, var;  // x has rows
  for_stretches_of(
      x.size(0), x.size(1), false,
      [&](int64_t first, int64_t last) {
        const at::Tensor values = in_groups(x.narrow(0, first, last - first), axes).to(at::kFloat);
        const at::Tensor near = group_means(values), some = at::sub(values, near), apart = group_means(some);
        auto [own_mean, own_var] = moments_about(near, apart, group_means(some.square_()));
        mean.push_back(own_mean);
        var.push_back(own_var);
      },
      span_of(axes));
  return {at::cat(mean), at::cat(var)};
}

/// Of the batch.
Statistics channel_statistics(const at::Tensor& x, const NormWeights& w, const NormAxes& axes, const NormOptions& options) {
  if (axes.span > 0 && x.is_cuda()) {
    const ColumnMoments moments = column_moments(x, {w.running_mean, w.running_var, options.eps, options.momentum});
    return {moments.mean.unsqueeze(0), moments.rstd.unsqueeze(0)};
  }
  auto [mean, var] = channel_moments(x);
  if (w.running_mean.defined()) {
    const double rows = static_cast<double>(x.size(0)), m = options.momentum;
    w.running_mean.mul_(1 - m).add_(mean.squeeze(0), m);
    w.running_var.mul_(1 - m).add_(var.squeeze(0), m * rows / (rows - 1));
  }
  return {mean, var.add_(options.eps).rsqrt_()};
}

}  // namespace

Statistics statistics_of(const at::Tensor& x, const NormWeights& weights, const NormAxes& axes, const NormOptions& options) {
  const at::NoGradGuard no_grad;
  if (axes.by_channel()) {
    if (options.training) return channel_statistics(x, weights, axes, options);
    return {weights.running_mean.unsqueeze(0), weights.running_var.add(options.eps).rsqrt_().unsqueeze(0)};
  }
  if (axes.centred) {
    auto [mean, var] = group_moments(x, axes);
    return {mean, var.add_(options.eps).rsqrt_()};
  }
  const at::Tensor squares = group_means(in_groups(x, axes).to(at::kFloat).square());
  return {at::zeros_like(squares), squares.add(options.eps).rsqrt_()};
}

at::Tensor normalised(const at::Tensor& x, const Statistics& s, const NormAxes& axes, int64_t first) {
  if (axes.by_channel()) return at::sub(x, s.mean).mul_(s.rstd);  // the statistics' type wins over x's
  const at::Tensor mean = part_of(s.mean, axes, first, x.size(0)), rstd = part_of(s.rstd, axes, first, x.size(0));
  const at::Tensor groups = in_groups(x, axes);
  return (axes.centred ? at::sub(groups, mean).mul_(rstd) : at::mul(groups, rstd)).view(x.sizes());
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

/// Each row's or group's own statistics: g and x̂ of the same rows.
void group_back_(const at::Tensor& rows, const at::Tensor& values, const NormBack& back, const at::Tensor& rstd) {
  if (back.gamma.defined()) rows.mul_(back.gamma);
  const at::Tensor g = in_groups(rows, back.axes), x = in_groups(values, back.axes);
  const at::Tensor along = group_means(at::mul(g, x)), offset = back.axes.centred ? group_means(g) : at::Tensor();
  if (back.eps && x.numel() > 0) {
    // What x̂_i·mean(g·x̂) has too much of on average, as a share of g_i: the codes' variance over the number of values.
    const at::Tensor variance = group_means(at::square(x)).sub_(1).add_(at::square(rstd), *back.eps);
    g.mul_(variance.div_(static_cast<double>(x.size(1) * x.size(3))).add_(1));
  }
  g.sub_(x.mul_(along));
  if (offset.defined()) g.sub_(offset);
  g.mul_(rstd);
}

/// Calls run(first, last) for stretches of g's rows.
template <class Run>
void for_parts(const at::Tensor& g, const NormBack& back, const Run& run) {
  for_stretches_of(g.size(0), g.size(1), g.is_cuda(), run, back.unit);
}

/// BatchNorm's of a map's rows on CUDA from values that stand decoded, of any of the three types.
NormGradients map_back_(const at::Tensor& g, const NormBack& back, bool needs_x) {
  const int64_t channels = g.size(1);
  const auto floats = g.options().dtype(at::kFloat);
  const at::Tensor ones = at::ones({channels}, floats);
  const bool raw = back.mean.defined();  // values are x's own, else normalised: mean 0, deviation 1
  const at::Tensor mean = raw ? back.mean.reshape({channels}) : at::zeros({channels}, floats), rstd = back.rstd.reshape({channels});
  const at::Tensor gamma = back.gamma.defined() ? back.gamma : ones;
  const at::Tensor sum_g = at::zeros({channels}, floats), sum_gx = at::zeros({channels}, floats);
  const auto part = [&](int64_t first, int64_t last) { return g.narrow(0, first, last - first); };
  const auto values = [&](int64_t first, int64_t last) { return back.values(first, last, g.scalar_type()).to(g.scalar_type()); };
  for_parts(g, back, [&](int64_t first, int64_t last) {
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
  for_parts(g, back, [&](int64_t first, int64_t last) { norm_rows_back_(part(first, last), values(first, last), scale, along, offset); });
  return sums;
}

}  // namespace

NormGradients norm_back_(const at::Tensor& g, const NormBack& back, bool needs_x) {
  const NormAxes& axes = back.axes;
  const bool channels = axes.by_channel();
  if (channels && axes.span > 0 && back.training && g.is_cuda()) return map_back_(g, back, needs_x);
  const auto floats = g.options().dtype(at::kFloat);
  const NormGradients sums{at::zeros({g.size(1)}, floats), at::zeros({g.size(1)}, floats)};
  const auto part = [&](int64_t first, int64_t last) { return RowStretch(g.narrow(0, first, last - first)); };
  const auto values = [&](int64_t first, int64_t last) {
    const at::Tensor x = back.values(first, last, at::kFloat);
    return back.mean.defined() ? normalised(x, {back.mean, back.rstd}, axes, first) : x;
  };
  for_parts(g, back, [&](int64_t first, int64_t last) {
    const at::Tensor x = values(first, last);
    const RowStretch some = part(first, last);
    add_sums(sums, some.rows, x);
    if (!needs_x || channels) return;
    group_back_(some.rows, x, back, part_of(back.rstd, axes, first, last - first));
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
  for_parts(g, back, [&](int64_t first, int64_t last) {
    const RowStretch some = part(first, last);
    some.rows.sub_(values(first, last).mul_(along).add_(offset)).mul_(scale);
    some.store();
  });
  return sums;
}

}  // namespace satchel
