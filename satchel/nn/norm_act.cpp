#include "satchel/nn/norm_act.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <ostream>
#include <utility>

#include "satchel/core/error.h"

namespace satchel::nn {

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
  const at::NoGradGuard no_grad;
  for (const at::Tensor& t : {weights_.gamma, weights_.running_var}) {
    if (t.defined()) t.fill_(1);
  }
  for (const at::Tensor& t : {weights_.beta, weights_.running_mean}) {
    if (t.defined()) t.zero_();
  }
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
