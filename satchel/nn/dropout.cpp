#include "satchel/nn/dropout.h"

#include <ostream>
#include <utility>

#include "satchel/autograd/activation.h"

namespace satchel::nn {

DropoutImpl::DropoutImpl(const torch::nn::DropoutOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {
  check_dropout(options.p(), "Dropout");
}

at::Tensor DropoutImpl::forward(const at::Tensor& x) { return dropout(x, options.p(), is_training(), saving); }

void DropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::Dropout(p=" << options.p() << ", method=" << saving.method.name << ")";
}

}  // namespace satchel::nn
