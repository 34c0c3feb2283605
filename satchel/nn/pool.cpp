#include "satchel/nn/pool.h"

#include <optional>
#include <ostream>
#include <vector>

#include "satchel/autograd/pool.h"

namespace satchel::nn {
namespace {

template <class Numbers>
std::vector<int64_t> list_of(const Numbers& numbers) {
  return {numbers->begin(), numbers->end()};
}

}  // namespace

template <size_t D, class Derived>
at::Tensor MaxPoolModule<D, Derived>::forward(const at::Tensor& x) {
  PoolOptions call{list_of(options.kernel_size())};
  call.stride = list_of(options.stride());
  call.padding = list_of(options.padding());
  call.dilation = list_of(options.dilation());
  call.ceil_mode = options.ceil_mode();
  return max_pool(x, call, saving);
}

template <size_t D, class Derived>
void MaxPoolModule<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::MaxPool" << D << "d(kernel_size=" << options.kernel_size() << ", stride=" << options.stride()
         << ", padding=" << options.padding() << ", dilation=" << options.dilation() << ", ceil_mode=" << std::boolalpha
         << options.ceil_mode() << ", method=" << saving.method.name << ")";
}

template <size_t D, class Derived>
at::Tensor AvgPoolModule<D, Derived>::forward(const at::Tensor& x) {
  PoolOptions call{list_of(options.kernel_size())};
  call.stride = list_of(options.stride());
  call.padding = list_of(options.padding());
  call.ceil_mode = options.ceil_mode();
  call.count_include_pad = options.count_include_pad();
  if constexpr (D > 1) call.divisor = options.divisor_override();
  return avg_pool(x, call, saving);
}

template <size_t D, class Derived>
void AvgPoolModule<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::AvgPool" << D << "d(kernel_size=" << options.kernel_size() << ", stride=" << options.stride()
         << ", padding=" << options.padding() << ", method=" << saving.method.name << ")";
}

template <size_t D, class Options, class Derived>
at::Tensor AdaptiveAvgPoolModule<D, Options, Derived>::forward(const at::Tensor& x) {
  std::vector<std::optional<int64_t>> sizes;
  for (const auto& size : *options.output_size()) sizes.emplace_back(size);
  return adaptive_avg_pool(x, sizes, saving);
}

template <size_t D, class Options, class Derived>
void AdaptiveAvgPoolModule<D, Options, Derived>::pretty_print(std::ostream& stream) const {
  stream << "satchel::nn::AdaptiveAvgPool" << D << "d(output_size=" << options.output_size() << ", method=" << saving.method.name << ")";
}

template class MaxPoolModule<1, MaxPool1dImpl>;
template class MaxPoolModule<2, MaxPool2dImpl>;
template class MaxPoolModule<3, MaxPool3dImpl>;
template class AvgPoolModule<1, AvgPool1dImpl>;
template class AvgPoolModule<2, AvgPool2dImpl>;
template class AvgPoolModule<3, AvgPool3dImpl>;
template class AdaptiveAvgPoolModule<1, torch::nn::AdaptiveAvgPool1dOptions, AdaptiveAvgPool1dImpl>;
template class AdaptiveAvgPoolModule<2, torch::nn::AdaptiveAvgPool2dOptions, AdaptiveAvgPool2dImpl>;
template class AdaptiveAvgPoolModule<3, torch::nn::AdaptiveAvgPool3dOptions, AdaptiveAvgPool3dImpl>;

}  // namespace satchel::nn
