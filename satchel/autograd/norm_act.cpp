#include "satchel/autograd/norm_act.h"

#include <ATen/ops/add.h>

#include <cmath>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

/// Function by function.
at::Tensor by_function(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  at::Tensor y = x;
  if (options.norm == Norm::batch) y = batch_norm(x, weights, options.statistics, saving);
  if (options.norm == Norm::layer) y = layer_norm(x, weights, options.statistics, saving);
  switch (options.activation) {
    case Activation::relu: y = relu(y, saving); break;
    case Activation::leaky_relu: y = leaky_relu(y, options.slope, saving); break;
    case Activation::elu: y = elu(y, options.alpha, saving); break;
    case Activation::none: break;
  }
  return dropout(y, options.dropout, options.training(), saving);
}

}  // namespace

at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "norm_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  check_dropout(options.dropout, op);
  if (!std::isfinite(options.slope)) fail(op, "slope must be finite", options.slope);
  if (!(options.alpha >= 0) || !std::isfinite(options.alpha)) fail(op, "alpha must be finite and at least 0", options.alpha);
  const bool empty = options.norm == Norm::none && options.activation == Activation::none;
  // The fused norms of images that keep each function's own know no ELU.
  const bool own_elu = options.activation == Activation::elu && is_image(x) && !reads_producer(saving.method);
  if (is_baseline(saving.method) || empty || own_elu || x.numel() == 0 || !needs_grad(x, weights.gamma, weights.beta)) {
    return by_function(x, weights, options, saving);
  }
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  EpilogueCall call = norm_call(x, weights, options.norm, 0, options.statistics, saving);
  call.activation = options.activation;
  call.slope = options.activation == Activation::relu ? 0 : options.activation == Activation::leaky_relu ? options.slope : 1;
  call.alpha = options.alpha;
  call.next_reads = !(options.only_added && options.activation == Activation::none);
  call.spare = spare;
  const double p = options.training() ? options.dropout : 0;
  // The fused kernels of images that keep each function's own know no dropout.
  const bool apart = call.is_image() && !reads_producer(saving.method);
  call.dropout = apart ? 0 : p;
  const at::Tensor z = epilogue(std::move(call));
  return apart ? dropout(z, p, true, saving) : z;
}

at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const SavePolicy& saving) {
  constexpr const char* op = "norm_add_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  if (options.norm != Norm::batch) fail(op, "the norm must be a BatchNorm", "another");
  if (options.activation != Activation::relu && options.activation != Activation::none) {
    fail(op, "the activation must be ReLU or none", "another");
  }
  if (options.dropout != 0) fail(op, "dropout must be 0", options.dropout);
  const bool fits = skip.defined() && skip.sizes() == x.sizes() && skip.device() == x.device();
  if (!fits) fail(op, "skip must have x's sizes and device", skip.defined() ? skip.toString() : "nothing");
  const bool relus = options.activation == Activation::relu, same_type = skip.scalar_type() == x.scalar_type();
  const bool recorded = needs_grad(x, weights.gamma, weights.beta, skip) && !is_baseline(saving.method);
  // In evaluation the norm may keep nothing at all: a norm of its own knows. A sum alone keeps nothing.
  if (!recorded || !relus || !same_type || !options.training() || x.numel() == 0) {
    at::Tensor y = batch_norm(x, weights, options.statistics, saving);  // fresh, and kept by nobody
    const at::Tensor sum = same_type ? y.add_(skip) : at::add(y, skip);
    return relus ? relu(sum, saving) : sum;
  }
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  EpilogueCall call = norm_call(x, weights, Norm::batch, 0, options.statistics, saving);
  call.skip = skip;
  call.activation = Activation::relu;
  call.slope = 0;
  call.spare = spare;
  return epilogue(std::move(call));
}

}  // namespace satchel
