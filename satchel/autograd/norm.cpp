// The public functions of norms: they check, and hand to torch or to the epilogue.
#include "satchel/autograd/norm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <c10/util/accumulate.h>

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/core/error.h"
#include "satchel/core/stretch.h"

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

/// x's memory to write over, where a recorded function made x and nobody but the caller of this holds it; else undefined. A node that
/// saved its own output, or a view, would show in the storage's count.
at::Tensor spare_memory(const at::Tensor& x) {
  const bool alone = x.use_count() == 1 && x.storage().use_count() == 1 && x.grad_fn() != nullptr && !x.is_view();
  return alone && (is_image(x) ? is_channels_last(x) : x.is_contiguous()) ? x.variable_data() : at::Tensor();
}

/// Norm and activation as the options have them. The result may be written over x, where the caller of norm_act() has given x away.
EpilogueCall fused_call(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  EpilogueCall call = norm_call(x, weights, options.norm, 0, options.statistics, saving);
  call.spare = spare;
  call.activation = options.activation;
  call.slope = options.activation == Activation::relu ? 0 : options.activation == Activation::leaky_relu ? options.slope : 1;
  call.alpha = options.alpha;
  return call;
}

}  // namespace

at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "norm_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  check_dropout(options.dropout, op);
  if (!std::isfinite(options.slope)) fail(op, "slope must be finite", options.slope);
  if (!(options.alpha >= 0) || !std::isfinite(options.alpha)) fail(op, "alpha must be finite and at least 0", options.alpha);
  if (options.only_added && options.activation != Activation::none)
    fail(op, "the activation must be none where only_added is set", "another");
  if (options.only_added && options.dropout != 0) fail(op, "dropout must be 0 where only_added is set", options.dropout);
  const bool empty = options.norm == Norm::none && options.activation == Activation::none;
  // The fused norms of images that keep each function's own know no ELU.
  const bool own_elu = options.activation == Activation::elu && is_image(x) && !reads_producer(saving.method);
  if (is_baseline(saving.method) || empty || own_elu || x.numel() == 0 || !needs_grad(x, weights.gamma, weights.beta)) {
    return by_function(x, weights, options, saving);
  }
  EpilogueCall call = fused_call(x, weights, options, saving);
  call.next_reads = !options.only_added;
  if (options.only_added && x.is_cuda() && reads_producer(saving.method)) {
    const EpilogueKernel& kernel = epilogue_kernel(call, keeps_of(saving.method, call.site()), call.as_rows(x));
    if (std::string_view(kernel.name) == "unfused") {
      call.spare.reset();
      return norm_alone(std::move(call));  // fewer maps of float32 at once
    }
  }
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
  EpilogueCall call = fused_call(x, weights, options, saving);
  call.skip = skip;
  if (skip.requires_grad()) call.skip_gradient = options.skip_gradient;
  return epilogue(std::move(call));
}

namespace {

/// Is the sum of a fresh convolution and this skip made by parts? `call` is norm_add's, with an x of no memory.
bool sums_by_parts(const EpilogueCall& call) {
  if (!call.spare.defined() || part_samples(call.sizes) >= call.sizes[0]) return false;
  const std::vector<Keep> keeps = keeps_of(call.saving.method, call.site());
  const Keep* sum = find(keeps, Kind::shared);
  if (sum == nullptr || sum->mean_bits != 0) return false;
  const at::Tensor rows = sizes_only({call.x.numel() / call.width, call.width}, call.x.options());
  return std::string_view(epilogue_kernel(call, keeps, rows).name) == "norm_add";
}

}  // namespace

at::Tensor conv_norm_add_act(ConvOfSum given, const NormWeights& weights, at::Tensor skip, const NormActOptions& options,
                             const SavePolicy& saving) {
  auto& [x, weight, how, conv_saving] = given;
  const bool large =
      skip.defined() && skip.is_cuda() && static_cast<int64_t>(skip.nbytes()) >= kConvByPartsFrom && is_image(skip) && is_image(x);
  const bool fits = large && options.training() && options.norm == Norm::batch && options.activation == Activation::relu &&
                    options.dropout == 0 && layer_type(x) == skip.scalar_type() && needs_grad(x, weight) &&
                    !is_baseline(conv_saving.method) && !is_baseline(saving.method) && !how.transposed && x.dim() == weight.dim() &&
                    x.device() == skip.device();
  if (fits && at::IntArrayRef(conv_sizes(x, weight, how)) == skip.sizes()) {  // else norm_add_act() says what is wrong
    EpilogueCall call = norm_call(sizes_only(skip.sizes(), skip.options()).variable_data().requires_grad_(), weights, Norm::batch, 0,
                                  options.statistics, saving);
    call.spare = spare_memory(skip);
    call.activation = Activation::relu;
    call.slope = 0;
    call.skip = skip;
    if (sums_by_parts(call)) {
      check_norm(call.x, weights, Norm::batch, options.statistics, "norm_add_act");
      ConvParts parts = conv_parts(x, weight, how, conv_saving);
      call.x = parts.out;
      call.samples = std::move(parts.samples);
      if (skip.requires_grad()) call.skip_gradient = options.skip_gradient;
      return epilogue(std::move(call));
    }
  }
  at::Tensor y = conv(x, weight, {}, how, conv_saving);
  x.reset();
  return norm_add_act(std::move(y), weights, skip, options, saving);
}

}  // namespace satchel
