#include "satchel/nn/linear.h"

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>
#include <ostream>
#include <utility>

#include "satchel/autograd/linear.h"
#include "satchel/core/error.h"

namespace satchel::nn {

LinearImpl::LinearImpl(const torch::nn::LinearOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {
  if (options.in_features() < 1) fail("linear", "in_features must be at least 1", options.in_features());
  if (options.out_features() < 1) fail("linear", "out_features must be at least 1", options.out_features());
  LinearImpl::reset();
}

void LinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out_features(), options.in_features()}));
  if (options.bias()) {
    bias = register_parameter("bias", at::empty({options.out_features()}));
  } else {
    bias = register_parameter("bias", {}, /*requires_grad=*/false);
  }
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));  // torch's choice: uniform within 1/√in
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
  torch::nn::init::uniform_(bias, -bound, bound);
}

at::Tensor LinearImpl::forward(const at::Tensor& x) { return linear(x, weight, bias, saving); }

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::Linear(in_features=" << options.in_features() << ", out_features=" << options.out_features()
         << ", bias=" << std::boolalpha << options.bias() << ", method=" << saving.method.name << ")";
}

}  // namespace satchel::nn
