#include "satchel/nn/conv.h"

#include <algorithm>
#include <ostream>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "satchel/autograd/resample.h"
#include "satchel/core/error.h"

namespace satchel::nn {
namespace {

template <class Options>
std::vector<int64_t> list_of(const Options& numbers) {
  return {numbers->begin(), numbers->end()};
}

PadMode mode_of(const torch::nn::detail::conv_padding_mode_t& mode) {
  if (std::holds_alternative<torch::enumtype::kReflect>(mode)) return PadMode::reflect;
  if (std::holds_alternative<torch::enumtype::kReplicate>(mode)) return PadMode::replicate;
  return std::holds_alternative<torch::enumtype::kCircular>(mode) ? PadMode::circular : PadMode::zeros;
}

/// Before and after each spatial dimension.
struct Paddings {
  std::vector<int64_t> before, after;
};

template <size_t D>
Paddings paddings_of(const torch::nn::detail::ConvNdOptions<D>& options) {
  if (const auto* numbers = std::get_if<torch::ExpandingArray<D>>(&options.padding())) return {list_of(*numbers), list_of(*numbers)};
  Paddings p{std::vector<int64_t>(D, 0), std::vector<int64_t>(D, 0)};
  if (std::holds_alternative<torch::enumtype::kValid>(options.padding())) return p;
  for (size_t d = 0; d < D; ++d) {  // "same": the odd one stands at the end
    const int64_t total = (*options.dilation())[d] * ((*options.kernel_size())[d] - 1);
    p.before[d] = total / 2;
    p.after[d] = total - total / 2;
  }
  return p;
}

/// As torch's pad() wants them: the last dimension's first.
std::vector<int64_t> reversed(const Paddings& p) {
  std::vector<int64_t> list;
  for (size_t d = p.before.size(); d-- > 0;) list.insert(list.end(), {p.before[d], p.after[d]});
  return list;
}

template <size_t D, class Options>
torch::nn::detail::ConvNdOptions<D> common(const Options& o) {
  return torch::nn::detail::ConvNdOptions<D>(o.in_channels(), o.out_channels(), o.kernel_size())
      .stride(o.stride())
      .padding(o.padding())
      .dilation(o.dilation())
      .groups(o.groups())
      .bias(o.bias())
      .padding_mode(o.padding_mode());
}

/// What torch prints, under this library's name and with the method.
template <class Print>
void print(std::ostream& stream, const SavePolicy& saving, const char* from, const std::string& to, const Print& torchs) {
  std::ostringstream text;
  torchs(text);
  std::string line = text.str();
  if (line.starts_with(from)) line.replace(0, std::string(from).size(), to);
  line.pop_back();
  stream << line << ", method=" << saving.method.name << ")";
}

/// N×C×spatial or C×spatial as the former.
at::Tensor batched(const at::Tensor& x, size_t dims) { return x.dim() == static_cast<int64_t>(dims) + 1 ? x.unsqueeze(0) : x; }

/// The output padding that gives the wanted sizes.
template <size_t D>
std::vector<int64_t> output_padding_for(const at::Tensor& x, at::IntArrayRef wanted, const torch::nn::detail::ConvNdOptions<D>& o) {
  constexpr const char* op = "conv_transpose";
  if (wanted.size() != D && wanted.size() != D + 2) fail(op, "output_size must have " + std::to_string(D) + " numbers", wanted.size());
  const at::IntArrayRef sizes = wanted.slice(wanted.size() - D);
  const auto padding = paddings_of(o).before;
  std::vector<int64_t> more;
  for (size_t d = 0; d < D; ++d) {
    const int64_t stride = (*o.stride())[d], in = x.size(x.dim() - static_cast<int64_t>(D - d));
    const int64_t least = (in - 1) * stride - 2 * padding[d] + (*o.dilation())[d] * ((*o.kernel_size())[d] - 1) + 1;
    if (sizes[d] < least || sizes[d] >= least + stride) {
      fail(op, "output_size must be " + std::to_string(least) + " to " + std::to_string(least + stride - 1), sizes[d]);
    }
    more.push_back(sizes[d] - least);
  }
  return more;
}

}  // namespace

template <size_t D, class Derived>
ConvModule<D, Derived>::ConvModule(const torch::nn::ConvOptions<D>& given, SavePolicy how)
    : torch::nn::ConvNdImpl<D, Derived>(common<D>(given).transposed(false).output_padding(0)), saving(std::move(how)) {}

template <size_t D, class Derived>
at::Tensor ConvModule<D, Derived>::forward_in_block(const at::Tensor& x, const std::shared_ptr<SharedGradient>& x_gradient) {
  const auto& o = this->options;
  Paddings p = paddings_of<D>(o);
  const PadMode mode = mode_of(o.padding_mode());
  at::Tensor input = x;
  if (mode != PadMode::zeros) {
    input = pad(batched(x, D), reversed(p), mode, saving);
    p.before.assign(D, 0);
  } else if (p.before != p.after) {
    Paddings odd = p;
    for (size_t d = 0; d < D; ++d) {
      odd.after[d] -= odd.before[d];
      odd.before[d] = 0;
    }
    input = pad(batched(x, D), reversed(odd), mode, saving);
  }
  const bool is_x = input.is_same(x);  // a padded input has a gradient of its own
  const at::Tensor y = conv(input, this->weight, this->bias,
                            {list_of(o.stride()), p.before, list_of(o.dilation()), std::vector<int64_t>(D, 0), false, o.groups()}, saving,
                            is_x ? x_gradient : nullptr);
  return y.dim() == x.dim() ? y : y.squeeze(0);
}

template <size_t D, class Derived>
void ConvModule<D, Derived>::pretty_print(std::ostream& stream) const {
  print(stream, saving, "torch::nn::", "satchel::nn::", [&](std::ostream& to) { torch::nn::ConvNdImpl<D, Derived>::pretty_print(to); });
}

template <size_t D, class Derived>
ConvTransposeModule<D, Derived>::ConvTransposeModule(const torch::nn::ConvTransposeOptions<D>& given, SavePolicy how)
    : torch::nn::ConvNdImpl<D, Derived>(common<D>(given).transposed(true).output_padding(given.output_padding())), saving(std::move(how)) {
  if (mode_of(given.padding_mode()) != PadMode::zeros) fail("conv_transpose", "padding mode must be zeros", "another");
}

template <size_t D, class Derived>
at::Tensor ConvTransposeModule<D, Derived>::forward(const at::Tensor& x, const std::optional<at::IntArrayRef>& output_size) {
  const auto& o = this->options;
  const std::vector<int64_t> more = output_size ? output_padding_for<D>(x, *output_size, o) : list_of(o.output_padding());
  return conv(x, this->weight, this->bias, {list_of(o.stride()), paddings_of<D>(o).before, list_of(o.dilation()), more, true, o.groups()},
              saving);
}

template <size_t D, class Derived>
void ConvTransposeModule<D, Derived>::pretty_print(std::ostream& stream) const {
  print(stream, saving, "torch::nn::Conv", "satchel::nn::ConvTranspose",
        [&](std::ostream& to) { torch::nn::ConvNdImpl<D, Derived>::pretty_print(to); });
}

template class ConvModule<1, Conv1dImpl>;
template class ConvModule<2, Conv2dImpl>;
template class ConvModule<3, Conv3dImpl>;
template class ConvTransposeModule<1, ConvTranspose1dImpl>;
template class ConvTransposeModule<2, ConvTranspose2dImpl>;
template class ConvTransposeModule<3, ConvTranspose3dImpl>;

}  // namespace satchel::nn
