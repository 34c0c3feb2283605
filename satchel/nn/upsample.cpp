#include "satchel/nn/upsample.h"

#include <ostream>
#include <string>
#include <utility>
#include <variant>

#include "satchel/autograd/resample.h"
#include "satchel/core/error.h"

namespace satchel::nn {
namespace {

/// The number of spatial dimensions that torch's name of a mode goes with; 0: any.
int64_t dimensions_of(const torch::nn::UpsampleOptions& options) {
  const auto& mode = options.mode();
  if (std::holds_alternative<torch::enumtype::kLinear>(mode)) return 1;
  if (std::holds_alternative<torch::enumtype::kTrilinear>(mode)) return 3;
  return std::holds_alternative<torch::enumtype::kNearest>(mode) ? 0 : 2;
}

Resample resample_of(const torch::nn::UpsampleOptions& options) {
  const auto& mode = options.mode();
  if (std::holds_alternative<torch::enumtype::kNearest>(mode)) return Resample::nearest;
  return std::holds_alternative<torch::enumtype::kBicubic>(mode) ? Resample::cubic : Resample::linear;
}

}  // namespace

UpsampleImpl::UpsampleImpl(const torch::nn::UpsampleOptions& given, SavePolicy how) : options(given), saving(std::move(how)) {}

at::Tensor UpsampleImpl::forward(const at::Tensor& x) {
  const int64_t dims = dimensions_of(options);
  if (dims > 0 && x.defined() && x.dim() != dims + 2) {
    fail("upsample", torch::enumtype::get_enum_name(options.mode()) + " takes " + std::to_string(dims) + " spatial dimensions",
         x.dim() - 2);
  }
  satchel::UpsampleOptions call;
  call.size = options.size().value_or(std::vector<int64_t>());
  call.scale = options.scale_factor().value_or(std::vector<double>());
  call.mode = resample_of(options);
  call.align_corners = options.align_corners().value_or(false);
  return upsample(x, call, saving);
}

void UpsampleImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::Upsample(";
  if (options.scale_factor()) stream << "scale_factor=" << at::ArrayRef<double>(*options.scale_factor());
  if (options.size()) stream << "size=" << at::ArrayRef<int64_t>(*options.size());
  stream << ", mode=" << torch::enumtype::get_enum_name(options.mode()) << ", method=" << saving.method.name << ")";
}

}  // namespace satchel::nn
