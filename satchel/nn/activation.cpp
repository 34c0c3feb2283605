#include "satchel/nn/activation.h"

#include <ostream>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/smooth.h"

namespace satchel::nn {

at::Tensor ReLUImpl::forward(const at::Tensor& x) { return relu(x, saving); }
at::Tensor LeakyReLUImpl::forward(const at::Tensor& x) { return leaky_relu(x, options.negative_slope(), saving); }
at::Tensor ELUImpl::forward(const at::Tensor& x) { return elu(x, options.alpha(), saving); }
at::Tensor GELUImpl::forward(const at::Tensor& x) { return gelu(x, options.approximate(), saving); }
at::Tensor SiLUImpl::forward(const at::Tensor& x) { return silu(x, saving); }

void ReLUImpl::pretty_print(std::ostream& stream) const { stream << "satchel::nn::ReLU(method=" << saving.method.name << ")"; }

void LeakyReLUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::LeakyReLU(negative_slope=" << options.negative_slope() << ", method=" << saving.method.name << ")";
}

void ELUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::ELU(alpha=" << options.alpha() << ", method=" << saving.method.name << ")";
}

void GELUImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::GELU(approximate=" << options.approximate() << ", method=" << saving.method.name << ")";
}

void SiLUImpl::pretty_print(std::ostream& stream) const { stream << "satchel::nn::SiLU(method=" << saving.method.name << ")"; }

}  // namespace satchel::nn
