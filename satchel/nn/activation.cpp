#include "satchel/nn/activation.h"

#include <ostream>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/smooth.h"

namespace satchel::nn {

ReLUImpl::ReLUImpl(const torch::nn::ReLUOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {}

at::Tensor ReLUImpl::forward(const at::Tensor& x) { return relu(x, saving); }

void ReLUImpl::pretty_print(std::ostream& stream) const { stream << "satchel::nn::ReLU(method=" << saving.method.name << ")"; }

LeakyReLUImpl::LeakyReLUImpl(const torch::nn::LeakyReLUOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {}

at::Tensor LeakyReLUImpl::forward(const at::Tensor& x) { return leaky_relu(x, options.negative_slope(), saving); }

void LeakyReLUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::LeakyReLU(negative_slope=" << options.negative_slope() << ", method=" << saving.method.name << ")";
}

ELUImpl::ELUImpl(const torch::nn::ELUOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {}

at::Tensor ELUImpl::forward(const at::Tensor& x) { return elu(x, options.alpha(), saving); }

void ELUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::ELU(alpha=" << options.alpha() << ", method=" << saving.method.name << ")";
}

GELUImpl::GELUImpl(const torch::nn::GELUOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {}

at::Tensor GELUImpl::forward(const at::Tensor& x) { return gelu(x, options.approximate(), saving); }

void GELUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::GELU(approximate=" << options.approximate() << ", method=" << saving.method.name << ")";
}

SiLUImpl::SiLUImpl(SavePolicy how) : saving(std::move(how)) {}

at::Tensor SiLUImpl::forward(const at::Tensor& x) { return silu(x, saving); }

void SiLUImpl::pretty_print(std::ostream& stream) const { stream << "satchel::nn::SiLU(method=" << saving.method.name << ")"; }

}  // namespace satchel::nn
