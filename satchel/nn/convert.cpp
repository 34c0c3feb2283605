#include "satchel/nn/convert.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>

#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

#include "satchel/core/error.h"
#include "satchel/nn/activation.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/dropout.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"
#include "satchel/nn/pool.h"
#include "satchel/nn/upsample.h"

namespace satchel::nn {
namespace {

using torch::nn::AnyModule, torch::nn::Module;

/// Ours with the parameters of torch's. Only a derived class reaches the list of parameters that a module registered.
template <class Ours>
class Sharing : public Ours {
 public:
  using Ours::Ours;
  void share(const Module& theirs) {
    for (const auto& item : theirs.named_parameters(false)) this->parameters_[item.key()] = item.value();
    if constexpr (requires { this->weight; }) take(theirs, "weight", this->weight);
    if constexpr (requires { this->bias; }) take(theirs, "bias", this->bias);
    const auto own = this->named_buffers(false);
    for (const auto& item : theirs.named_buffers(false)) at::Tensor(own[item.key()]).set_data(item.value());
    this->train(theirs.is_training());
  }

 private:
  static void take(const Module& theirs, const char* name, at::Tensor& to) {
    const auto parameters = theirs.named_parameters(false);
    if (const at::Tensor* found = parameters.find(name)) to = *found;
  }
};

/// What torch's convolutions hold, as constructors take it.
template <size_t D>
torch::nn::ConvOptions<D> of_conv(const torch::nn::detail::ConvNdOptions<D>& o) {
  return torch::nn::ConvOptions<D>(o.in_channels(), o.out_channels(), o.kernel_size())
      .stride(o.stride())
      .padding(o.padding())
      .dilation(o.dilation())
      .groups(o.groups())
      .bias(o.bias())
      .padding_mode(o.padding_mode());
}

template <size_t D>
torch::nn::ConvTransposeOptions<D> of_transposed(const torch::nn::detail::ConvNdOptions<D>& o) {
  return torch::nn::ConvTransposeOptions<D>(o.in_channels(), o.out_channels(), o.kernel_size())
      .stride(o.stride())
      .padding(std::get<torch::ExpandingArray<D>>(o.padding()))
      .output_padding(o.output_padding())
      .dilation(o.dilation())
      .groups(o.groups())
      .bias(o.bias())
      .padding_mode(o.padding_mode());
}

template <class Ours, class Theirs>
struct Pair {
  /// Empty unless the module is exactly torch's: a class of the user's own derived from it may do something else.
  static std::shared_ptr<Ours> converted(const Module& module, const SavePolicy& saving) {
    if (typeid(module) != typeid(Theirs)) return nullptr;
    const auto& theirs = static_cast<const Theirs&>(module);
    const auto made = make(theirs, saving);
    made->share(theirs);
    return made;
  }

 private:
  static std::shared_ptr<Sharing<Ours>> make(const Theirs& theirs, const SavePolicy& saving) {
    if constexpr (!requires { theirs.options; }) {
      return std::make_shared<Sharing<Ours>>(saving);
    } else if constexpr (!requires { of_conv(theirs.options); }) {
      return std::make_shared<Sharing<Ours>>(theirs.options, saving);
    } else if constexpr (std::is_constructible_v<Ours, decltype(of_conv(theirs.options))>) {
      return std::make_shared<Sharing<Ours>>(of_conv(theirs.options), saving);
    } else {
      return std::make_shared<Sharing<Ours>>(of_transposed(theirs.options), saving);
    }
  }
};

template <class... Pairs>
struct Table {
  static bool convert(const std::string& name, const Module& module, const SavePolicy& saving, torch::nn::SequentialImpl& to) {
    const auto add = [&](auto made) {
      if (made == nullptr) return false;
      to.push_back(name, std::move(made));
      return true;
    };
    return (add(Pairs::converted(module, saving)) || ...);
  }
};

using Known =
    Table<Pair<Conv1dImpl, torch::nn::Conv1dImpl>, Pair<Conv2dImpl, torch::nn::Conv2dImpl>, Pair<Conv3dImpl, torch::nn::Conv3dImpl>,
          Pair<ConvTranspose1dImpl, torch::nn::ConvTranspose1dImpl>, Pair<ConvTranspose2dImpl, torch::nn::ConvTranspose2dImpl>,
          Pair<ConvTranspose3dImpl, torch::nn::ConvTranspose3dImpl>, Pair<LinearImpl, torch::nn::LinearImpl>,
          Pair<BatchNorm1dImpl, torch::nn::BatchNorm1dImpl>, Pair<BatchNorm2dImpl, torch::nn::BatchNorm2dImpl>,
          Pair<BatchNorm3dImpl, torch::nn::BatchNorm3dImpl>, Pair<LayerNormImpl, torch::nn::LayerNormImpl>,
          Pair<GroupNormImpl, torch::nn::GroupNormImpl>, Pair<ReLUImpl, torch::nn::ReLUImpl>, Pair<LeakyReLUImpl, torch::nn::LeakyReLUImpl>,
          Pair<ELUImpl, torch::nn::ELUImpl>, Pair<GELUImpl, torch::nn::GELUImpl>, Pair<SiLUImpl, torch::nn::SiLUImpl>,
          Pair<DropoutImpl, torch::nn::DropoutImpl>, Pair<MaxPool1dImpl, torch::nn::MaxPool1dImpl>,
          Pair<MaxPool2dImpl, torch::nn::MaxPool2dImpl>, Pair<MaxPool3dImpl, torch::nn::MaxPool3dImpl>,
          Pair<AvgPool1dImpl, torch::nn::AvgPool1dImpl>, Pair<AvgPool2dImpl, torch::nn::AvgPool2dImpl>,
          Pair<AvgPool3dImpl, torch::nn::AvgPool3dImpl>, Pair<AdaptiveAvgPool1dImpl, torch::nn::AdaptiveAvgPool1dImpl>,
          Pair<AdaptiveAvgPool2dImpl, torch::nn::AdaptiveAvgPool2dImpl>, Pair<AdaptiveAvgPool3dImpl, torch::nn::AdaptiveAvgPool3dImpl>,
          Pair<UpsampleImpl, torch::nn::UpsampleImpl>>;

/// One Sequential after the other, depth first.
class Conversion {
 public:
  explicit Conversion(SavePolicy saving) : saving_(std::move(saving)) {}

  template <class Holder>
  Holder sequence(torch::nn::SequentialImpl& from, const std::string& prefix) {
    Holder to;
    to->train(from.is_training());  // before it has children, whose modes are their own
    const auto names = from.named_children().keys();
    size_t i = 0;
    for (const AnyModule& module : from) {
      add(names[i], prefix + names[i], module, *to);
      ++i;
    }
    return to;
  }

  std::vector<std::string> converted, left;

 private:
  void add(const std::string& name, const std::string& path, const AnyModule& from, torch::nn::SequentialImpl& to) {
    const std::shared_ptr<Module> module = from.ptr();
    // A class of the user's own derived from a Sequential may do more than run its layers in turn.
    if (typeid(*module) == typeid(StackImpl)) {
      to.push_back(name, sequence<Stack>(static_cast<StackImpl&>(*module), path + ".").ptr());
      return;
    }
    const std::string saved_as = saving_.name.empty() ? path : saving_.name + "." + path;
    const bool known = Known::convert(name, *module, {saving_.method, saved_as, saving_.allocator}, to);
    if (!known) to.push_back(name, from);
    (known ? converted : left).push_back(path);
  }

  SavePolicy saving_;
};

}  // namespace

std::shared_ptr<torch::nn::Module> StackImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<StackImpl>();
  copy->train(is_training());
  const auto names = named_children().keys();
  size_t i = 0;
  for (const AnyModule& module : *this) copy->push_back(names[i++], module.clone(device));
  return copy;
}

Converted convert(const torch::nn::Sequential& model, const SavePolicy& saving) {
  if (model.is_empty()) fail("convert", "a model must be given", "none");
  validate(saving.method, "convert");
  if (budget_of(saving.method) > 0) fail("convert", "a budget is for image models with a plan: give a mean", saving.method.name);
  Conversion conversion(saving);
  torch::nn::Sequential made = conversion.sequence<torch::nn::Sequential>(*model.ptr(), "");
  return {std::move(made), std::move(conversion.converted), std::move(conversion.left)};
}

Converted convert(const torch::nn::Sequential& model, const Method& method) { return convert(model, SavePolicy{method, ""}); }

}  // namespace satchel::nn
