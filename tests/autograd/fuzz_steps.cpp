#include "tests/autograd/fuzz_steps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/resample.h"
#include "satchel/autograd/smooth.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/pack.h"

namespace satchel::test {
namespace {

using Ints = std::vector<int64_t>;

std::string text_of(const Ints& list) {
  std::string text;
  for (const int64_t i : list) text += (text.empty() ? "" : "x") + std::to_string(i);
  return text;
}
std::string text_of(double x) { return std::to_string(x).substr(0, 4); }

Step linear_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  if (values[x].dim() < 2) return {};
  const int64_t in = values[x].size(-1), out = dice.of({1, 2, 4, 8});
  const bool bias = dice.chance(0.6);
  return FuzzStep{"linear(" + name(x) + (bias ? ", bias" : "") + ")", {{out, in}, bias ? Ints{out} : Ints{}}, [x](FuzzRun& r, W w) {
                    // torch's of three dimensions or more is a view of its own.
                    return r.ours ? linear(at(r, x), w[0], w[1], r.saving) : at::linear(at(r, x), w[0], w[1]).clone();
                  }};
}

Step conv_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim() - 2;
  if (dims < 1 || dims > 3 || values[x].size(1) == 0) return {};
  ConvOptions o;
  const auto list = [&](std::initializer_list<int64_t> from) {
    Ints made;
    for (int64_t d = 0; d < dims; ++d) made.push_back(dice.of(from));
    return made;
  };
  const Ints kernel = list({1, 1, 2, 3});
  o.stride = list({1, 1, 2});
  o.padding = list({0, 0, 1});
  o.dilation = list({1, 1, 1, 2});
  o.transposed = dice.chance(0.2);
  if (o.transposed)
    o.output_padding = list({0, 0, 1});
  else
    o.output_padding = Ints(static_cast<size_t>(dims), 0);
  const int64_t in = values[x].size(1);
  o.groups = in % 2 == 0 && dice.chance(0.3) ? dice.of({int64_t{2}, in}) : 1;
  const int64_t out = o.groups * dice.of({1, 2, 4});
  Ints shape = o.transposed ? Ints{in, out / o.groups} : Ints{out, in / o.groups};
  shape.insert(shape.end(), kernel.begin(), kernel.end());
  const bool bias = dice.chance(0.5);
  std::string text = (o.transposed ? "conv_transposed(" : "conv(") + name(x) + ", kernel " + text_of(kernel) + ", stride " +
                     text_of(o.stride) + ", padding " + text_of(o.padding) + ", dilation " + text_of(o.dilation) + ", groups " +
                     std::to_string(o.groups) + ")";
  return FuzzStep{text, {shape, bias ? Ints{out} : Ints{}}, [x, o](FuzzRun& r, W w) {
                    if (r.ours) return conv(at(r, x), w[0], w[1], o, r.saving);
                    // oneDNN miscounts, or crashes at, strided kernels of 1×1 in channels_last order.
                    return at::convolution(at(r, x).contiguous(), w[0], w[1], o.stride, o.padding, o.dilation, o.transposed,
                                           o.output_padding, o.groups);
                  }};
}

/// Running statistics of a channel count, which no run changes.
NormWeights norm_weights(W w, const at::Tensor& x, int64_t channels, bool running) {
  NormWeights n{w[0], w[1], {}, {}};
  if (!running) return n;
  const auto options = at::TensorOptions(w[0].defined() && x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  n.running_mean = at::linspace(-0.3, 0.4, channels, options.dtype(x.scalar_type()));
  n.running_var = at::linspace(0.5, 1.5, channels, options.dtype(x.scalar_type()));
  return n;
}

/// In evaluation torch 2.11 gets the gradient of x in channels_last order wrong where that of the result lies otherwise: it comes in the
/// result's own order.
at::Tensor torch_batch_norm(const at::Tensor& x, const NormWeights& n, const NormOptions& o) {
  const at::Tensor y = at::batch_norm(x, n.gamma, n.beta, n.running_mean, n.running_var, o.training, o.momentum, o.eps, false);
  if (y.requires_grad()) y.register_hook([order = y.suggest_memory_format()](const at::Tensor& g) { return g.contiguous(order); });
  return y;
}

/// x̂ of few values, or of equal ones, amplifies roundings by up to 1/√eps: a larger eps keeps programs comparable.
NormOptions norm_options(bool training) {
  NormOptions o;
  o.training = training;
  o.eps = 0.1;
  return o;
}

Step batch_norm_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  if (values[x].dim() < 2 || values[x].size(1) == 0 || values[x].numel() / std::max<int64_t>(values[x].size(1), 1) < 2) return {};
  const int64_t channels = values[x].size(1);
  const bool training = !dice.chance(0.2), affine = !dice.chance(0.2), running = !training || dice.chance(0.5);
  const Ints shape = affine ? Ints{channels} : Ints{};
  return FuzzStep{
      "batch_norm(" + name(x) + (training ? "" : ", eval") + (affine ? "" : ", no weights") + ")", {shape, shape}, [=](FuzzRun& r, W w) {
        const NormWeights n = norm_weights(w, at(r, x), channels, running);
        const NormOptions o = norm_options(training);
        return r.ours ? batch_norm(at(r, x), n, o, r.saving) : torch_batch_norm(at(r, x), n, o);
      }};
}

Step layer_norm_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim();
  if (dims < 2 || values[x].size(-1) < 2) return {};
  const int64_t tail = dims > 2 && dice.chance(0.3) ? 2 : 1;
  const Ints shape = values[x].sizes().slice(static_cast<size_t>(dims - tail)).vec();
  const bool affine = !dice.chance(0.2);
  if (dice.chance(0.3)) {
    return FuzzStep{"rms_norm(" + name(x) + ", over " + text_of(shape) + ")", {affine ? shape : Ints{}}, [=](FuzzRun& r, W w) {
                      return r.ours ? rms_norm(at(r, x), shape, w[0], 0.1, r.saving) : at::rms_norm(at(r, x), shape, w[0], 0.1);
                    }};
  }
  return FuzzStep{"layer_norm(" + name(x) + ", over " + text_of(shape) + (affine ? "" : ", no weights") + ")",
                  {affine ? shape : Ints{}, affine ? shape : Ints{}},
                  [=](FuzzRun& r, W w) {
                    if (r.ours) return layer_norm(at(r, x), shape, {w[0], w[1], {}, {}}, norm_options(true), r.saving);
                    return at::layer_norm(at(r, x), shape, w[0], w[1], 0.1);
                  }};
}

/// torch 2.11 crashes in channels_last order, so it gets a copy. Then products that add 0 keep x itself, for the gradients of x and of γ:
/// a change of x in place is an error, as it would be without the copy.
at::Tensor torch_group_norm(const at::Tensor& x, int64_t groups, const at::Tensor& gamma, const at::Tensor& beta) {
  const at::Tensor y = at::group_norm(x.contiguous(), groups, gamma, beta, 0.1);
  if (x.is_contiguous()) return y;
  const at::Tensor watched = y + x * x * 0;
  return gamma.defined() ? watched + x * (gamma.sum() * 0) : watched;
}

Step group_norm_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  if (values[x].dim() < 2 || values[x].size(1) == 0) return {};
  const int64_t channels = values[x].size(1);
  const int64_t groups = channels % 2 == 0 ? dice.of({int64_t{1}, int64_t{2}, channels}) : dice.of({int64_t{1}, channels});
  const Ints shape = dice.chance(0.2) ? Ints{} : Ints{channels};
  return FuzzStep{"group_norm(" + name(x) + ", groups " + std::to_string(groups) + (shape.empty() ? ", no weights" : "") + ")",
                  {shape, shape},
                  [=](FuzzRun& r, W w) {
                    if (r.ours) return group_norm(at(r, x), groups, {w[0], w[1], {}, {}}, norm_options(true), r.saving);
                    return torch_group_norm(at(r, x), groups, w[0], w[1]);
                  }};
}

at::Tensor torch_activation(const at::Tensor& x, Activation activation, double slope) {
  switch (activation) {
    case Activation::relu: return at::relu(x);
    case Activation::leaky_relu: return at::leaky_relu(x, slope);
    case Activation::elu: return at::elu(x, slope);
    default: return x;
  }
}

Step activation_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t kind = dice.below(10);
  using Function = std::function<at::Tensor(const at::Tensor&, const SavePolicy*)>;
  const auto made = [&](const char* what, Function f) {
    return FuzzStep{
        std::string(what) + "(" + name(x) + ")", {}, [x, f](FuzzRun& r, W) { return f(at(r, x), r.ours ? &r.saving : nullptr); }};
  };
  using T = const at::Tensor&;
  using S = const SavePolicy*;
  switch (kind) {
    case 0: return made("leaky_relu", [](T v, S s) { return s ? leaky_relu(v, 0.1, *s) : at::leaky_relu(v, 0.1); });
    case 1: return made("elu", [](T v, S s) { return s ? elu(v, 0.8, *s) : at::elu(v, 0.8); });
    case 2: return made("gelu", [](T v, S s) { return s ? gelu(v, "none", *s) : at::gelu(v); });
    case 3: return made("gelu_tanh", [](T v, S s) { return s ? gelu(v, "tanh", *s) : at::gelu(v, "tanh"); });
    case 4: return made("silu", [](T v, S s) { return s ? silu(v, *s) : at::silu(v); });
    case 5: return made("sigmoid", [](T v, S s) { return s ? satchel::sigmoid(v, *s) : at::sigmoid(v); });
    case 6: return made("tanh", [](T v, S s) { return s ? satchel::tanh(v, *s) : at::tanh(v); });
    default: return made("relu", [](T v, S s) { return s ? relu(v, *s) : at::relu(v); });
  }
}

/// Our run draws the mask once more from the same seed for torch's.
Step dropout_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  if (values[x].dim() < 1) return {};
  const double p = dice.of<double>({0, 0.25, 0.5});
  const uint64_t seed = dice.word();
  return FuzzStep{"dropout(" + name(x) + ", " + text_of(p) + ")", {}, [=](FuzzRun& r, W) {
                    if (p == 0) return r.ours ? dropout(at(r, x), p, true, r.saving) : at::dropout(at(r, x), p, true);
                    if (!r.ours) return r.masks[r.step].defined() ? at(r, x) * r.masks[r.step] : at(r, x) * 1;
                    const at::Tensor seeds = seed_tensor(seed, at::kCPU);
                    {
                      const SeedBank bank(seeds);
                      const at::Tensor v = at(r, x).detach();  // a view with gaps too: the noise goes by where values lie
                      const auto room = static_cast<int64_t>(v.storage().nbytes()) / v.element_size();
                      const at::Tensor ones = at::ones({room}, v.options()).as_strided(v.sizes(), v.strides(), v.storage_offset());
                      r.masks[r.step] = dropout(ones, p, true, r.saving).to(at::kDouble);
                    }
                    const SeedBank bank(seeds);
                    return dropout(at(r, x), p, true, r.saving);
                  }};
}

Step norm_act_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim();
  if (dims < 2 || values[x].size(1) == 0) return {};
  NormActOptions o;
  o.norm = dice.of({Norm::batch, Norm::batch, Norm::layer, Norm::none});
  if (dims > 2 && o.norm == Norm::layer) o.norm = Norm::batch;
  if (o.norm == Norm::batch && values[x].numel() / values[x].size(1) < 2) return {};
  o.activation = dice.of({Activation::relu, Activation::relu, Activation::leaky_relu, Activation::elu, Activation::none});
  if (o.norm == Norm::none && o.activation == Activation::none) return {};  // dropout alone
  o.slope = o.alpha = 0.3;
  // Without a norm a mask of three dimensions goes by how its input lies in memory.
  o.dropout = o.norm == Norm::none && dims == 3 ? 0 : dice.of<double>({0, 0, 0.4});
  o.statistics = norm_options(true);
  const uint64_t seed = dice.word();
  const Ints shape = o.norm == Norm::none ? Ints{} : Ints{values[x].size(1)};
  const char* norms[] = {"none", "batch", "layer"};
  const char* acts[] = {"none", "relu", "leaky_relu", "elu"};
  return FuzzStep{
      "norm_act(" + name(x) + ", " + norms[static_cast<int>(o.norm)] + ", " + acts[static_cast<int>(o.activation)] + ", dropout " +
          text_of(o.dropout) + ")",
      {shape, shape},
      [=](FuzzRun& r, W w) {
        const NormWeights n{w[0], w[1], {}, {}};
        const at::Tensor v = at(r, x);
        if (!r.ours) {
          at::Tensor y = v;
          if (o.norm == Norm::batch) y = torch_batch_norm(v, n, o.statistics);
          if (o.norm == Norm::layer) y = at::layer_norm(v, {v.size(1)}, w[0], w[1], 0.1);
          y = torch_activation(y, o.activation, 0.3);
          return r.masks[r.step].defined() ? y * r.masks[r.step] : y;
        }
        const at::Tensor seeds = seed_tensor(seed, at::kCPU).repeat({4});  // whichever it draws for dropout
        if (o.dropout > 0) {
          const int64_t rows = v.numel() / v.size(1);
          const at::Tensor factors = apply_chain(at::ones({rows, v.size(1)}), {}, {}, {}, seeds.narrow(0, 0, 1), {o.dropout, 1});
          r.masks[r.step] = image_of_rows(factors, image_sizes(v)).to(at::kDouble);
        }
        const SeedBank bank(seeds);
        return norm_act(v, n, o, r.saving);
      }};
}

Step norm_add_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  Ints same;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].sizes() == values[x].sizes()) same.push_back(static_cast<int64_t>(i));
  }
  if (values[x].dim() < 2 || values[x].size(1) == 0 || values[x].numel() / values[x].size(1) < 2) return {};
  const auto skip = static_cast<size_t>(same[static_cast<size_t>(dice.below(static_cast<int64_t>(same.size())))]);
  NormActOptions o;
  o.activation = dice.of({Activation::relu, Activation::none});
  o.statistics = norm_options(true);
  const Ints shape{values[x].size(1)};
  return FuzzStep{"norm_add_act(" + name(x) + ", skip " + name(skip) + (o.activation == Activation::relu ? ", relu)" : ")"),
                  {shape, shape},
                  [=](FuzzRun& r, W w) {
                    const NormWeights n{w[0], w[1], {}, {}};
                    if (r.ours) return norm_add_act(at(r, x), n, at(r, skip), o, r.saving);
                    return torch_activation(torch_batch_norm(at(r, x), n, o.statistics) + at(r, skip), o.activation, 0);
                  }};
}

/// torch's pools of lines are views of pools of planes, which a change in place would tell from ours: copies.
at::Tensor torch_pool(const at::Tensor& x, const PoolOptions& o, bool max) {
  switch (x.dim() - 2) {
    case 1:
      return (max ? at::max_pool1d(x, o.kernel, o.stride, o.padding, o.dilation, o.ceil_mode)
                  : at::avg_pool1d(x, o.kernel, o.stride, o.padding, o.ceil_mode, o.count_include_pad))
          .clone();
    case 2:
      return max ? at::max_pool2d(x, o.kernel, o.stride, o.padding, o.dilation, o.ceil_mode)
                 : at::avg_pool2d(x, o.kernel, o.stride, o.padding, o.ceil_mode, o.count_include_pad);
    default:
      return max ? at::max_pool3d(x, o.kernel, o.stride, o.padding, o.dilation, o.ceil_mode)
                 : at::avg_pool3d(x, o.kernel, o.stride, o.padding, o.ceil_mode, o.count_include_pad);
  }
}

Step pool_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const auto dims = static_cast<size_t>(std::max<int64_t>(values[x].dim() - 2, 0));
  if (dims < 1 || dims > 3) return {};
  const bool max = dice.chance(0.6);
  PoolOptions o;
  for (size_t d = 0; d < dims; ++d) {
    o.kernel.push_back(dice.of({1, 2, 2, 3}));
    o.stride.push_back(dice.of({1, 2, 2, 3}));
  }
  o.padding = Ints(dims, 0);
  o.dilation = Ints(dims, max && dice.chance(0.2) ? 2 : 1);
  for (size_t d = 0; d < dims; ++d) o.padding[d] = dice.chance(0.3) ? o.kernel[d] / 2 : 0;
  o.ceil_mode = dice.chance(0.3);
  o.count_include_pad = dice.chance(0.5);
  const std::string text = (max ? "max_pool(" : "avg_pool(") + name(x) + ", kernel " + text_of(o.kernel) + ", stride " + text_of(o.stride) +
                           ", padding " + text_of(o.padding) + ", dilation " + text_of(o.dilation) + (o.ceil_mode ? ", ceil" : "") + ")";
  return FuzzStep{text, {}, [=](FuzzRun& r, W) {
                    if (r.ours) return max ? max_pool(at(r, x), o, r.saving) : avg_pool(at(r, x), o, r.saving);
                    return torch_pool(at(r, x), o, max);
                  }};
}

Step adaptive_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim() - 2;
  if (dims < 1 || dims > 3) return {};
  Ints sizes;
  for (int64_t d = 0; d < dims; ++d) sizes.push_back(dice.of({1, 1, 2, 3}));
  return FuzzStep{"adaptive_avg_pool(" + name(x) + ", " + text_of(sizes) + ")", {}, [=](FuzzRun& r, W) {
                    const at::Tensor v = at(r, x);
                    if (r.ours) return adaptive_avg_pool(v, {sizes.begin(), sizes.end()}, r.saving);
                    if (dims == 1) return at::adaptive_avg_pool1d(v, sizes).clone();
                    return dims == 2 ? at::adaptive_avg_pool2d(v, sizes) : at::adaptive_avg_pool3d(v, sizes);
                  }};
}

Step upsample_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim() - 2;
  if (dims != 2 || values[x].size(2) > 5) return {};
  const bool linear = dice.chance(0.5);
  const Ints size{values[x].size(2) * 2, values[x].size(3) + 1};
  return FuzzStep{std::string("upsample(") + name(x) + (linear ? ", bilinear)" : ", nearest)"), {}, [=](FuzzRun& r, W) {
                    const at::Tensor v = at(r, x);
                    if (r.ours) return upsample(v, {size, {}, linear ? Resample::linear : Resample::nearest, false}, r.saving);
                    return linear ? at::upsample_bilinear2d(v, size, false) : at::upsample_nearest2d(v, size);
                  }};
}

Step pad_step(FuzzDice& dice, const Values& values) {
  const size_t x = pick(dice, values);
  const int64_t dims = values[x].dim() - 2;
  if (dims < 1 || dims > 3 || values[x].size(-1) < 3) return {};
  const auto mode = dice.of({PadMode::zeros, PadMode::reflect, PadMode::replicate, PadMode::circular});
  const char* names[] = {"constant", "reflect", "replicate", "circular"};
  Ints padding{1, 2};
  padding.resize(static_cast<size_t>(2 * dims), 0);
  const std::string mode_name = names[static_cast<int>(mode)];
  return FuzzStep{"pad(" + name(x) + ", " + mode_name + ")", {}, [=](FuzzRun& r, W) {
                    if (r.ours) return pad(at(r, x), padding, mode, r.saving);
                    return at::pad(at(r, x), padding, mode_name);
                  }};
}

}  // namespace

Step random_step(FuzzDice& dice, const Values& values) {
  switch (dice.below(22)) {
    case 0:
    case 1: return linear_step(dice, values);
    case 2:
    case 3:
    case 4: return conv_step(dice, values);
    case 5:
    case 6: return batch_norm_step(dice, values);
    case 7: return layer_norm_step(dice, values);
    case 8: return group_norm_step(dice, values);
    case 9:
    case 10:
    case 11: return activation_step(dice, values);
    case 12: return dropout_step(dice, values);
    case 13: return norm_act_step(dice, values);
    case 14: return norm_add_step(dice, values);
    case 15: return pool_step(dice, values);
    case 16: return adaptive_step(dice, values);
    case 17: return dice.chance(0.5) ? upsample_step(dice, values) : pad_step(dice, values);
    case 18:
    case 19:
    case 20: return torch_step(dice, values);
    default: return side_step(dice, values);
  }
}

}  // namespace satchel::test
