#include "satchel/autograd/norm_add.h"

#include <ATen/ops/add.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {

at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const Saving& saving) {
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
  const bool recorded = records(x, weights.gamma, weights.beta, skip) && !is_baseline(saving.method);
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
