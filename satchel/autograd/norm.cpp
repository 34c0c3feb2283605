#include "satchel/autograd/norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <c10/util/accumulate.h>

#include <cmath>
#include <string>

#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

bool torch_serves(const at::Tensor& x, const NormWeights& weights, const SavePolicy& saving) {
  return is_baseline(saving.method) || !needs_grad(x, weights.gamma, weights.beta);
}

/// torch's batch_norm takes float32 weights with rows of another type; its layer_norm and group_norm on CUDA do not.
at::Tensor as_x(const at::Tensor& w, const at::Tensor& x) { return w.defined() ? w.to(x.scalar_type()) : w; }

at::Tensor line_of(const at::Tensor& w) { return w.defined() && w.dim() != 1 ? w.reshape({-1}) : w; }

/// layer_norm, or, not centred, rms_norm over the last dimensions, which are `shape`.
at::Tensor tail_norm(const at::Tensor& given, at::IntArrayRef shape, const NormWeights& weights, const NormOptions& options,
                     const SavePolicy& saving, bool centred) {
  const char* op = centred ? "layer_norm" : "rms_norm";
  const at::Tensor x = given.to(precise_type(given));
  const auto tail = static_cast<int64_t>(shape.size());
  if (tail == 0 || x.dim() < tail || x.sizes().slice(static_cast<size_t>(x.dim() - tail)) != shape) {
    fail(op, "the last sizes of x must be the shape to normalise over", x.sizes());
  }
  const int64_t width = c10::multiply_integers(shape);
  check_weight(x, weights.gamma, width, "gamma", op);
  check_weight(x, weights.beta, width, "beta", op);
  if (torch_serves(x, weights, saving) || x.numel() == 0) {
    const at::Tensor gamma = as_x(weights.gamma, x), beta = as_x(weights.beta, x);
    return centred ? at::layer_norm(x, shape, gamma, beta, options.eps) : at::rms_norm(x, shape, gamma, options.eps);
  }
  const NormWeights lines{line_of(weights.gamma), line_of(weights.beta), {}, {}};
  return norm_alone({x, lines, {Norm::layer, 0, 0, centred}, options, saving, width});
}

}  // namespace

at::Tensor batch_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const SavePolicy& saving) {
  check_norm(x, weights, Norm::batch, options, "batch_norm");
  if (torch_serves(x, weights, saving)) {
    return at::batch_norm(x, weights.gamma, weights.beta, weights.running_mean, weights.running_var, options.training, options.momentum,
                          options.eps, /*cudnn_enabled=*/true);
  }
  return norm_alone(norm_call(x, weights, Norm::batch, 0, options, saving));
}

at::Tensor layer_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const SavePolicy& saving) {
  check_norm(x, weights, Norm::layer, options, "layer_norm");
  return layer_norm(x, {x.size(1)}, weights, options, saving);
}

at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef shape, const NormWeights& weights, const NormOptions& options,
                      const SavePolicy& saving) {
  check_activations(x, "layer_norm");
  return tail_norm(x, shape, weights, options, saving, /*centred=*/true);
}

at::Tensor rms_norm(const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& gamma, double eps, const SavePolicy& saving) {
  check_activations(x, "rms_norm");
  if (!(eps >= 0) || !std::isfinite(eps)) fail("rms_norm", "eps must be finite and at least 0", eps);
  return tail_norm(x, shape, {gamma, {}, {}, {}}, {eps}, saving, /*centred=*/false);
}

at::Tensor group_norm(const at::Tensor& given, int64_t groups, const NormWeights& weights, const NormOptions& options,
                      const SavePolicy& saving) {
  constexpr const char* op = "group_norm";
  check_activations(given, op);
  const at::Tensor x = given.to(precise_type(given));
  if (x.dim() != 2 && !is_image(x)) fail(op, "x must be rows × channels or a map N×C×…", std::to_string(x.dim()) + " dimensions");
  const int64_t channels = x.size(1);
  check_channels(x, weights.gamma, "gamma", op);
  check_channels(x, weights.beta, "beta", op);
  if (groups < 1 || channels % groups != 0) fail(op, "channels must be a multiple of groups, which must be 1 or more", groups);
  check_weight(x, weights.gamma, channels, "gamma", op);
  check_weight(x, weights.beta, channels, "beta", op);
  if (torch_serves(x, weights, saving) || x.numel() == 0) {
    return at::group_norm(x, groups, as_x(weights.gamma, x), as_x(weights.beta, x), options.eps, /*cudnn_enabled=*/true);
  }
  return norm_alone(norm_call(x, weights, Norm::batch, groups, options, saving));
}

}  // namespace satchel
