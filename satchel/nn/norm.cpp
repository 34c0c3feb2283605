#include "satchel/nn/norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <ostream>
#include <string>
#include <utility>

#include "satchel/autograd/norm_act.h"
#include "satchel/core/error.h"

namespace satchel::nn {
namespace {

/// As torch has them at first, where they are defined: γ and variances 1, β and means 0.
void reset_numbers(const at::Tensor& ones, const at::Tensor& zeros) {
  const at::NoGradGuard no_grad;
  if (ones.defined()) ones.fill_(1);
  if (zeros.defined()) zeros.zero_();
}

/// weight and bias under torch's names; undefined parameters where there are none.
template <class M>
void register_affine(M& module, bool affine, at::IntArrayRef shape) {
  module.weight = module.register_parameter("weight", affine ? at::empty(shape) : at::Tensor(), affine);
  module.bias = module.register_parameter("bias", affine ? at::empty(shape) : at::Tensor(), affine);
}

constexpr const char* kOps[] = {"", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"};

/// The dimensions that torch's module of this name takes.
template <size_t D>
void check_dimensions(const at::Tensor& x) {
  const int64_t dims = x.defined() ? x.dim() : 0;
  const bool right = dims == static_cast<int64_t>(D) + 2 || (D == 1 && dims == 2);
  if (!right) fail(kOps[D], D == 1 ? "x must have 2 or 3 dimensions" : "x must have " + std::to_string(D + 2) + " dimensions", dims);
}

}  // namespace

template <size_t D, class Derived>
BatchNormImplBase<D, Derived>::BatchNormImplBase(const torch::nn::BatchNormOptions& given, SavePolicy how, bool is_frozen)
    : options(given), saving(std::move(how)), frozen(is_frozen) {
  BatchNormImplBase::reset();
}

template <size_t D, class Derived>
void BatchNormImplBase<D, Derived>::reset() {
  const int64_t channels = options.num_features();
  if (channels < 1) fail(kOps[D], "num_features must be 1 or more", channels);
  if (frozen) {
    if (!options.affine() || !options.track_running_stats()) fail(kOps[D], "a frozen norm must have weights and statistics", "none");
    weight = this->register_buffer("weight", at::ones({channels}));
    bias = this->register_buffer("bias", at::zeros({channels}));
    running_mean = this->register_buffer("running_mean", at::zeros({channels}));
    running_var = this->register_buffer("running_var", at::ones({channels}));
    return;
  }
  register_affine(*this, options.affine(), {channels});
  const bool tracks = options.track_running_stats();
  running_mean = this->register_buffer("running_mean", tracks ? at::zeros({channels}) : at::Tensor());
  running_var = this->register_buffer("running_var", tracks ? at::ones({channels}) : at::Tensor());
  num_batches_tracked = this->register_buffer("num_batches_tracked", tracks ? at::zeros({}, at::kLong) : at::Tensor());
  reset_parameters();
}

template <size_t D, class Derived>
void BatchNormImplBase<D, Derived>::reset_running_stats() {
  if (!options.track_running_stats()) return;
  reset_numbers(running_var, running_mean);
  if (num_batches_tracked.defined()) num_batches_tracked.zero_();
}

template <size_t D, class Derived>
void BatchNormImplBase<D, Derived>::reset_parameters() {
  reset_running_stats();
  reset_numbers(weight, bias);
}

template <size_t D, class Derived>
NormOptions BatchNormImplBase<D, Derived>::begin(const at::Tensor& x) {
  check_dimensions<D>(x);
  const bool training = this->is_training() && !frozen, counts = training && num_batches_tracked.defined();
  if (counts) num_batches_tracked.add_(1);
  double momentum = options.momentum().value_or(0);
  if (counts && !options.momentum()) momentum = 1.0 / num_batches_tracked.template item<double>();  // the mean of all batches
  return {options.eps(), momentum, training || !options.track_running_stats()};
}

template <size_t D, class Derived>
at::Tensor BatchNormImplBase<D, Derived>::line(const at::Tensor& x) const {
  check_dimensions<D>(x);
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = options.num_features();
  const at::Tensor scale = weight * (running_var + options.eps()).rsqrt(), shift = bias - running_mean * scale;
  return x.mul(scale.reshape(sizes)).add_(shift.reshape(sizes));
}

template <size_t D, class Derived>
at::Tensor BatchNormImplBase<D, Derived>::forward(at::Tensor x) {
  if (is_line()) return line(x);
  return batch_norm(x, weights(), begin(x), saving);
}

template <size_t D, class Derived>
at::Tensor BatchNormImplBase<D, Derived>::forward_act(at::Tensor x, Activation activation, const at::Tensor& skip,
                                                      const std::shared_ptr<SharedGradient>& skip_gradient) {
  if (activation == Activation::none && !skip.defined()) return forward(std::move(x));
  if (is_line()) {
    at::Tensor y = line(x);
    if (skip.defined()) y.add_(skip);
    if (activation == Activation::relu) return y.relu_();
    satchel::NormActOptions alone;
    alone.norm = Norm::none;
    alone.activation = activation;
    return norm_act(y, {}, alone, saving);
  }
  satchel::NormActOptions call;
  call.activation = activation;
  call.statistics = begin(x);
  call.skip_gradient = skip_gradient;
  return skip.defined() ? norm_add_act(std::move(x), weights(), skip, call, saving) : norm_act(std::move(x), weights(), call, saving);
}

template <size_t D, class Derived>
at::Tensor BatchNormImplBase<D, Derived>::forward_sum(ConvOfSum conv, at::Tensor skip,
                                                      const std::shared_ptr<SharedGradient>& skip_gradient) {
  if (is_line()) return forward_act(satchel::conv(conv.x, conv.weight, {}, conv.options, conv.saving), Activation::relu, skip);
  satchel::NormActOptions call;
  call.statistics = begin(skip);
  call.skip_gradient = skip_gradient;
  return conv_norm_add_act(std::move(conv), weights(), std::move(skip), call, saving);
}

template <size_t D, class Derived>
at::Tensor BatchNormImplBase<D, Derived>::forward_to_sum(at::Tensor x) {
  if (frozen) return forward(std::move(x));
  satchel::NormActOptions call;
  call.activation = Activation::none;
  call.only_added = true;
  call.statistics = begin(x);
  return norm_act(std::move(x), weights(), call, saving);
}

template <size_t D, class Derived>
void BatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "satchel::nn::BatchNorm" << D << "d(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=" << (options.momentum() ? std::to_string(*options.momentum()) : "None") << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ", method=" << saving.method.name << ")";
}

template class BatchNormImplBase<1, BatchNorm1dImpl>;
template class BatchNormImplBase<2, BatchNorm2dImpl>;
template class BatchNormImplBase<3, BatchNorm3dImpl>;

LayerNormImpl::LayerNormImpl(const torch::nn::LayerNormOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {
  LayerNormImpl::reset();
}

void LayerNormImpl::reset() {
  if (options.normalized_shape().empty()) fail("LayerNorm", "normalized_shape must have 1 size or more", 0);
  register_affine(*this, options.elementwise_affine(), options.normalized_shape());
  reset_parameters();
}

void LayerNormImpl::reset_parameters() { reset_numbers(weight, bias); }

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  return layer_norm(x, options.normalized_shape(), {weight, bias, {}, {}}, {options.eps()}, saving);
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "satchel::nn::LayerNorm(" << at::IntArrayRef(options.normalized_shape()) << ", eps=" << options.eps()
         << ", elementwise_affine=" << options.elementwise_affine() << ", method=" << saving.method.name << ")";
}

RMSNormImpl::RMSNormImpl(RMSNormOptions given, SavePolicy how) : options(std::move(given)), saving(std::move(how)) { RMSNormImpl::reset(); }

void RMSNormImpl::reset() {
  if (options.normalized_shape.empty()) fail("RMSNorm", "normalized_shape must have 1 size or more", 0);
  weight = register_parameter("weight", options.elementwise_affine ? at::empty(options.normalized_shape) : at::Tensor(),
                              options.elementwise_affine);
  reset_parameters();
}

void RMSNormImpl::reset_parameters() { reset_numbers(weight, {}); }

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return rms_norm(x, options.normalized_shape, weight, options.eps, saving); }

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "satchel::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape) << ", eps=" << options.eps
         << ", elementwise_affine=" << options.elementwise_affine << ", method=" << saving.method.name << ")";
}

GroupNormImpl::GroupNormImpl(const torch::nn::GroupNormOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {
  GroupNormImpl::reset();
}

void GroupNormImpl::reset() {
  if (options.num_groups() < 1 || options.num_channels() < 1 || options.num_channels() % options.num_groups() != 0) {
    fail("GroupNorm", "num_channels must be a multiple of num_groups, both 1 or more",
         std::to_string(options.num_channels()) + " and " + std::to_string(options.num_groups()));
  }
  register_affine(*this, options.affine(), {options.num_channels()});
  reset_parameters();
}

void GroupNormImpl::reset_parameters() { reset_numbers(weight, bias); }

at::Tensor GroupNormImpl::forward(const at::Tensor& x) {
  if (!x.defined() || x.dim() < 2 || x.size(1) != options.num_channels()) {
    fail("GroupNorm", "x must have " + std::to_string(options.num_channels()) + " channels", x.defined() ? x.dim() < 2 ? 0 : x.size(1) : 0);
  }
  return group_norm(x, options.num_groups(), {weight, bias, {}, {}}, {options.eps()}, saving);
}

void GroupNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "satchel::nn::GroupNorm(" << options.num_groups() << ", " << options.num_channels()
         << ", eps=" << options.eps() << ", affine=" << options.affine() << ", method=" << saving.method.name << ")";
}

NormActImpl::NormActImpl(const NormActOptions& given) : options(given) {
  if (options.channels < 1) fail("norm_act", "channels must be at least 1", options.channels);
  check_dropout(options.dropout, "norm_act");
  if (options.norm == Norm::none) return;
  weights_.gamma = register_parameter("weight", at::ones({options.channels}));
  weights_.beta = register_parameter("bias", at::zeros({options.channels}));
  if (options.norm != Norm::batch) return;
  weights_.running_mean = register_buffer("running_mean", at::zeros({options.channels}));
  weights_.running_var = register_buffer("running_var", at::ones({options.channels}));
}

void NormActImpl::reset_parameters() {
  reset_numbers(weights_.gamma, weights_.beta);
  reset_numbers(weights_.running_var, weights_.running_mean);
}

at::Tensor NormActImpl::forward(at::Tensor x) {
  const satchel::NormActOptions call{options.norm,  options.activation, options.slope,
                                     options.alpha, options.dropout,    {options.eps, options.momentum, is_training()}};
  return norm_act(std::move(x), weights_, call, options.saving);
}

void NormActImpl::pretty_print(std::ostream& stream) const {
  static constexpr const char* kNorms[] = {"none", "batch", "layer"};
  static constexpr const char* kActivations[] = {"none", "relu", "leaky_relu", "elu"};
  stream << "satchel::nn::NormAct(" << options.channels << ", norm=" << kNorms[static_cast<int>(options.norm)]
         << ", activation=" << kActivations[static_cast<int>(options.activation)] << ", dropout=" << options.dropout
         << ", method=" << options.saving.method.name << ")";
}

}  // namespace satchel::nn
