#include "satchel/autograd/norm_act.h"

#include <cmath>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/elu_dropout.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_chain.h"
#include "satchel/autograd/norm_low_pass.h"
#include "satchel/autograd/norm_map.h"
#include "satchel/autograd/norm_node.h"
#include "satchel/autograd/norm_share.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

at::Tensor activated(const at::Tensor& x, const NormActOptions& options, const Saving& saving) {
  switch (options.activation) {
    case Activation::relu: return relu(x, saving);
    case Activation::leaky_relu: return leaky_relu(x, options.slope, saving);
    case Activation::elu: return elu(x, options.alpha, saving);
    case Activation::none: return x;
  }
  return x;
}

/// The norm by itself; what comes after it is known not to share with it.
at::Tensor norm_of(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  if (options.norm == Norm::none) return x;
  if (!saving.method.plain && records(x, weights.gamma, weights.beta)) {
    return recorded_norm(norm_call(x, weights, options.norm, 0, options.statistics, saving), /*waits=*/false);
  }
  return options.norm == Norm::batch ? batch_norm(x, weights, options.statistics, saving)
                                     : layer_norm(x, weights, options.statistics, saving);
}

/// Layer by layer on maps: norm and activation as one function, with the lines of both.
bool serves_by_map(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  const bool right_kind =
      options.norm == Norm::batch && (options.activation == Activation::relu || options.activation == Activation::leaky_relu);
  return right_kind && is_map(x) && !saving.method.plain && !saving.method.shared && records(x, weights.gamma, weights.beta);
}

at::Tensor act_by_map(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving,
                      const at::Tensor& spare) {
  const double slope = options.activation == Activation::relu ? 0 : options.slope;
  if (serves_norm_map(x, weights, options.statistics, saving)) {
    return norm_map(x, weights, options.statistics, {/*activates=*/true, slope}, saving, spare);
  }
  return recorded_norm_act(norm_call(x, weights, options.norm, 0, options.statistics, saving), slope);
}

}  // namespace

at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  constexpr const char* op = "norm_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  check_dropout(options.dropout, op);
  if (!std::isfinite(options.slope)) fail(op, "slope must be finite", options.slope);
  if (!(options.alpha >= 0) || !std::isfinite(options.alpha)) fail(op, "alpha must be finite and at least 0", options.alpha);
  const double p = options.training() ? options.dropout : 0;
  const bool evaluates = !options.training() && !records(x, weights.gamma, weights.beta);
  const bool nothing_to_share = options.norm == Norm::none && options.activation == Activation::none;
  if (fuses_norm_low_pass(x, weights, options, saving)) {
    const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
    return dropout(norm_low_pass(x, weights, options, saving, spare), p, true, saving);
  }
  // Methods that keep each function's own: the same saves in one pass each way.
  if (fuses_norm_chain(x, weights, options, saving)) return norm_chain(x, weights, options, saving, spare_memory(x));
  if (serves_by_map(x, weights, options, saving)) {
    const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
    return dropout(act_by_map(x, weights, options, saving, spare), p, true, saving);
  }
  if (saving.method.plain || !saving.method.shared || evaluates || nothing_to_share) {
    return dropout(activated(norm_of(x, weights, options, saving), options, saving), p, true, saving);
  }
  if (options.activation == Activation::elu) {
    const at::Tensor h = norm_of(x, weights, options, saving);
    return records(h) ? elu_dropout(h, options.alpha, p, saving) : dropout(elu(h, options.alpha, saving), p, true, saving);
  }
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  return shared_norm_act(norm_call(x, weights, options.norm, 0, options.statistics, saving), options, spare);
}

}  // namespace satchel
