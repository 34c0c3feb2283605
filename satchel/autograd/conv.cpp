#include "satchel/autograd/conv.h"

#include <ATen/Context.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/shared_gradient.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

constexpr const char* kOp = "conv";

/// One dimension runs as two, the first of them 1 long: so its maps can lie in channels_last order too.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed = false, line = false;
  int64_t groups = 1;

  at::Tensor in(const at::Tensor& t) const { return line ? t.unsqueeze(2) : t; }
  at::Tensor out(const at::Tensor& t) const { return line ? t.squeeze(2) : t; }

  /// Does a kernel of 1×1 step over places? torch's oneDNN crashes at, or gets wrong, the gradients of such weights with few channels in
  /// channels_last order (upstream issue 6035): they are made of the places that are read, without a stride.
  bool skips(at::IntArrayRef kernel) const {
    const auto all = [](at::IntArrayRef numbers, int64_t n) { return std::ranges::all_of(numbers, [n](int64_t i) { return i == n; }); };
    return all(kernel.slice(2), 1) && all(padding, 0) && !all(stride, 1);
  }
  /// The places that such a kernel reads, or, transposed, writes: every stride-th of `wide`, as many as `narrow` has.
  at::Tensor places(at::Tensor wide, const at::Tensor& narrow) const {
    for (size_t d = 0; d < stride.size(); ++d) {
      const auto at = static_cast<int64_t>(d) + 2;
      wide = wide.slice(at, 0, wide.size(at), stride[d]).narrow(at, 0, narrow.size(at));
    }
    return in_channels_last(wide);
  }

  /// Do results stand where a kernel meets padding alone? torch's oneDNN crashes at some such maps in channels_last order: they get zeros
  /// around them instead.
  bool pads_beyond(at::IntArrayRef kernel) const {
    for (size_t d = 0; d < padding.size(); ++d) {
      if (padding[d] > dilation[d] * (kernel[d + 2] - 1)) return true;
    }
    return false;
  }
  Geometry without_padding() const {
    Geometry g = *this;
    g.padding.assign(padding.size(), 0);
    return g;
  }
  /// A map with zeros around it, as many as `padding` says; fewer than none cut it.
  at::Tensor padded(const at::Tensor& x, int64_t sign = 1) const {
    std::vector<int64_t> sides;
    for (size_t d = padding.size(); d-- > 0;) sides.insert(sides.end(), 2, sign * padding[d]);
    return in_channels_last(at::constant_pad_nd(x, sides));
  }
};

/// One number for each spatial dimension.
std::vector<int64_t> spread(const std::vector<int64_t>& given, size_t dims, const char* name, int64_t least, int64_t beside) {
  if (given.size() != 1 && given.size() != dims) {
    fail(kOp, std::string(name) + " must have 1 number or " + std::to_string(dims), given.size());
  }
  std::vector<int64_t> all = given.size() == dims ? given : std::vector<int64_t>(dims, given[0]);
  for (const int64_t n : all) {
    if (n < least) fail(kOp, std::string(name) + " must be at least " + std::to_string(least), n);
  }
  if (dims == 1) all.insert(all.begin(), beside);
  return all;
}

Geometry geometry_of(const ConvOptions& options, size_t dims) {
  Geometry g;
  g.stride = spread(options.stride, dims, "stride", 1, 1);
  g.padding = spread(options.padding, dims, "padding", 0, 0);
  g.dilation = spread(options.dilation, dims, "dilation", 1, 1);
  g.output_padding = spread(options.output_padding, dims, "output_padding", 0, 0);
  g.transposed = options.transposed;
  g.groups = options.groups;
  g.line = dims == 1;
  return g;
}

void check_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const ConvOptions& options) {
  if (weight.dim() < 3 || weight.dim() > 5) fail(kOp, "weight must have 3 to 5 dimensions", weight.dim());
  if (x.dim() != weight.dim()) {
    fail(kOp, "input must have " + std::to_string(weight.dim()) + " dimensions, or one less", x.dim());
  }
  if (options.groups < 1) fail(kOp, "groups must be at least 1", options.groups);
  const int64_t channels = options.transposed ? weight.size(0) : weight.size(1) * options.groups;
  if (x.size(1) != channels) fail(kOp, "input must have " + std::to_string(channels) + " channels", x.size(1));
  if (weight.size(0) % options.groups != 0) fail(kOp, "weight must be a multiple of groups long", weight.size(0));
  const int64_t made = options.transposed ? weight.size(1) * options.groups : weight.size(0);
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != made)) {
    fail(kOp, "bias must be a line of " + std::to_string(made), bias.numel());
  }
  if (weight.device() != x.device()) fail(kOp, "weight must be on " + x.device().str(), weight.device());
}

/// Throws where the kernel is larger than the padded map. Sizes as they are convolved.
void check_reach(at::IntArrayRef x, at::IntArrayRef weight, const Geometry& g) {
  for (size_t d = 0; d < g.stride.size() && !g.transposed; ++d) {
    const int64_t least = g.dilation[d] * (weight[d + 2] - 1) + 1 - 2 * g.padding[d];
    if (x[d + 2] >= least) continue;
    fail(kOp, "input must be at least " + std::to_string(least) + " long in spatial dimension " + std::to_string(d - (g.line ? 1 : 0)),
         x[d + 2]);
  }
}

/// Does a convolution of one channel step over places? torch's oneDNN gets some of them wrong with AVX-512 in channels_last order (results
/// one column wide).
bool steps_over_one_channel(const at::Tensor& x, const Geometry& g) {
  return x.is_cpu() && x.size(1) == 1 && !g.transposed && std::ranges::any_of(g.stride, [](int64_t n) { return n > 1; });
}

/// Does torch take its order for channels_last?
bool is_last(const at::Tensor& t) { return t.suggest_memory_format() != at::MemoryFormat::Contiguous; }

/// The same values in the default order of memory. Of one channel the orders differ by a stride that nothing reads but torch's choice.
at::Tensor in_default_order(const at::Tensor& x) { return x.reshape({-1}).view(x.sizes()); }

at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const Geometry& g) {
  if (x.is_cpu() && g.pads_beyond(weight.sizes())) {
    if (!g.transposed) return convolve(g.padded(x), weight, bias, g.without_padding());
    return g.padded(convolve(x, weight, bias, g.without_padding()), -1);
  }
  const bool reorders = steps_over_one_channel(x, g) && (is_last(x) || is_last(weight));
  return at::convolution(reorders ? in_default_order(x) : x, reorders ? in_default_order(weight) : weight,
                         bias.defined() ? std::optional(bias) : std::nullopt, g.stride, g.padding, g.dilation, g.transposed,
                         g.output_padding, g.groups);
}

/// Would torch's own convolution crash, or be wrong (Geometry::skips, pads_beyond, steps_over_one_channel)?
bool torch_miscounts(const at::Tensor& x, const at::Tensor& weight, at::ScalarType type, const Geometry& g) {
  const at::IntArrayRef kernel = g.in(weight).sizes();
  const bool miscounts = g.skips(kernel) || g.pads_beyond(kernel) || steps_over_one_channel(x, g);
  return x.is_cpu() && type != at::kDouble && miscounts && (is_last(x) || is_last(weight));
}

class ConvNode : public SavingNode {
 public:
  explicit ConvNode(const std::string& layer) : SavingNode(kOp, layer) {}

  InputSave input;
  SavedVariable weight;
  std::shared_ptr<SharedGradient> x_gradient;
  Geometry geometry;
  std::vector<int64_t> input_sizes, weight_sizes;  // as they are convolved
  at::ScalarType input_type = at::kFloat, weight_type = at::kFloat, bias_type = at::kFloat;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    input.report(layer(), "input", kept);
    return kept;
  }

  bool begin_parts() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (needs(2) || (needs(1) && !input.has_parts()) || meets() || geometry.line) return false;
    parts[torch::autograd::get_current_graph_task_id()] = {};
    return true;
  }

  void take_part(int64_t first, const at::Tensor& given) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const NoAutocast guard;
    const at::Tensor g = in_channels_last(given);
    Parts& made = parts.at(torch::autograd::get_current_graph_task_id());
    if (needs(1)) add_weight_gradient(g, first, made.weight);
    if (!needs(0)) return;
    if (!made.x.defined()) made.x = empty_channels_last(input_sizes, g.options().dtype(input_type));
    const at::Tensor to = made.x.narrow(0, first, g.size(0));
    if (is_product(g) && to.scalar_type() == g.scalar_type()) {
      at::Tensor rows = rows_of_image(to);
      at::mm_out(rows, rows_of_image(g), weight_matrix(g));
    } else {
      to.copy_(input_gradient(g));
    }
  }

 protected:
  /// The gradient of the weight first, so that what it decodes is gone when that of x comes.
  variable_list back(at::Tensor given) override {
    const NoAutocast guard;
    variable_list gradients(3);
    if (auto made = parts.extract(torch::autograd::get_current_graph_task_id())) {  // `given` has no memory then
      if (needs(0)) gradients[0] = made.mapped().x;
      if (needs(1)) gradients[1] = geometry.out(made.mapped().weight).to(weight_type);
      return gradients;
    }
    if (needs(1)) input.fetch();
    const at::Tensor g = in_channels_last(geometry.in(given));
    if (needs(1)) gradients[1] = weight_gradient(g, given);
    if (needs(0)) gradients[0] = meets() ? met_gradient(g) : input_gradient(g);
    if (needs(2)) gradients[2] = column_sums(rows_of_image(g)).to(bias_type);
    return gradients;
  }

  void release() override {
    input.release();
    weight.reset_data();
    x_gradient.reset();
    parts.clear();
  }

  /// The other branch's gradient goes on alone.
  variable_list back_of_nothing() override {
    variable_list gradients(num_outputs());
    if (!meets() || !needs(0)) return gradients;
    if (const auto other = x_gradient->take())
      gradients[0] = *other;
    else
      x_gradient->leave({});
    return gradients;
  }

 private:
  /// What take_part() has made.
  struct Parts {
    at::Tensor x, weight;
  };
  std::unordered_map<int, Parts> parts;  // by backward pass: threads may share a graph

  /// Are the gradients of x and of the weight matrix products of rows? Those of a 1×1 kernel on CUDA are, where torch's products are as
  /// precise as its convolutions.
  bool is_product(const at::Tensor& g) const {
    const auto all = [](at::IntArrayRef numbers, int64_t n) { return std::ranges::all_of(numbers, [n](int64_t i) { return i == n; }); };
    const bool plain = !geometry.transposed && geometry.groups == 1 && !geometry.line && all(geometry.stride, 1) &&
                       all(geometry.padding, 0) && all(at::IntArrayRef(weight_sizes).slice(2), 1);
    if (!plain || !g.is_cuda() || g.scalar_type() == at::kDouble) return false;
    const at::Context& torch = at::globalContext();
    return g.scalar_type() != at::kFloat || torch.allowTF32CuBLAS() == torch.allowTF32CuDNN(at::Float32Op::CONV);
  }
  /// Of a 1×1 kernel, output × input channels.
  at::Tensor weight_matrix(const at::Tensor& g) const {
    return weight.unpack().detach().to(g.scalar_type()).reshape({weight_sizes[0], weight_sizes[1]});
  }

  bool meets() const { return x_gradient != nullptr && x_gradient->is_shared(); }
  /// The sum with what the block's other function has left, or nothing, where that one is still to come.
  at::Tensor met_gradient(const at::Tensor& g) const {
    const std::optional<at::Tensor> left = x_gradient->take();
    if (!left) {
      x_gradient->leave(input_gradient(g));
      return {};
    }
    const at::Tensor& other = *left;
    if (!other.defined()) return input_gradient(g);
    if (is_product(g) && other.scalar_type() == g.scalar_type() && is_channels_last(other)) {
      rows_of_image(other).addmm_(rows_of_image(g), weight_matrix(g));
    } else {
      other.add_(input_gradient(g));
    }
    return other;
  }

  /// Reads the weight alone: the convolution of g the other way. torch's convolution_backward would want an input to take the order of
  /// memory from, and copy g to another one without it.
  at::Tensor input_gradient(const at::Tensor& g) const {
    const at::Tensor w = in_channels_last(geometry.in(weight.unpack()).to(g.scalar_type()));
    Geometry back = geometry;
    back.transposed = !geometry.transposed;
    back.output_padding.assign(geometry.stride.size(), 0);
    for (size_t d = 0; back.transposed && d < geometry.stride.size(); ++d) {  // what the stride had left over
      const auto at = static_cast<int64_t>(d) + 2;
      const int64_t least = (g.size(at) - 1) * geometry.stride[d] - 2 * geometry.padding[d] + geometry.dilation[d] * (w.size(at) - 1) + 1;
      back.output_padding[d] = input_sizes[d + 2] - least;
    }
    at::Tensor dx = convolve(g, w, {}, back);
    // An output padding longer than the stride (dilated transposed convolutions) lets it read beyond x.
    for (int64_t d = 2; d < dx.dim(); ++d) {
      if (const int64_t size = input_sizes[static_cast<size_t>(d)]; dx.size(d) > size) dx = dx.narrow(d, 0, size);
    }
    return geometry.out(in_channels_last(dx)).to(input_type);
  }

  at::Tensor weight_gradient(const at::Tensor& g, const at::Tensor& given) const {
    input.gradient_seen(given);
    at::Tensor sum;
    add_weight_gradient(g, 0, sum);
    if (!sum.defined()) sum = at::zeros(weight_sizes, g.options());  // no samples
    return geometry.out(sum).to(weight_type);
  }

  void add_rows_product(const at::Tensor& gradient, const at::Tensor& x, at::Tensor& sum) const {
    if (sum.defined()) return add_product_(sum.view({weight_sizes[0], weight_sizes[1]}), gradient, x);
    sum = product(gradient, x).view(weight_sizes);
  }

  /// `sum`, undefined at first, over stretches of the samples from `begin` on, whose gradient g is; in float32.
  void add_weight_gradient(const at::Tensor& g, int64_t begin, at::Tensor& sum) const {
    const at::Tensor w = sizes_only(weight_sizes, g.options());
    const bool pads = g.is_cpu() && geometry.pads_beyond(weight_sizes);
    Geometry form = pads ? geometry.without_padding() : geometry;
    const bool skips = g.is_cpu() && form.skips(weight_sizes);
    if (skips) {
      form.stride.assign(form.stride.size(), 1);
      form.output_padding.assign(form.stride.size(), 0);
    }
    input.for_samples(g.scalar_type(), begin, begin + g.size(0), [&](int64_t first, int64_t last, const at::Tensor& some) {
      at::Tensor x = geometry.in(some), gradient = g.narrow(0, first - begin, last - first);
      if (is_product(g)) return add_rows_product(rows_of_image(gradient).t(), rows_of_image(x), sum);
      at::Tensor &wide = geometry.transposed ? gradient : x, &narrow = geometry.transposed ? x : gradient;
      if (pads) wide = geometry.padded(wide);
      if (skips) wide = geometry.places(wide, narrow);
      const at::Tensor part =
          std::get<1>(at::convolution_backward(gradient, x, w, std::nullopt, form.stride, form.padding, form.dilation, form.transposed,
                                               form.output_padding, form.groups, {false, true, false}));
      sum = sum.defined() ? sum.to(at::kFloat).add_(part) : part;
    });
  }
};

/// The node of a convolution whose input, as it is convolved, is `values`, and whose weight is w.
std::shared_ptr<ConvNode> recorded(const at::Tensor& x, const at::Tensor& values, const at::Tensor& weight, const at::Tensor& w,
                                   const at::Tensor& bias, const Geometry& geometry, const SavePolicy& saving) {
  const auto node = make_node<ConvNode>(saving.name, x, weight, bias);
  node->geometry = geometry;
  node->input_sizes = geometry.in(values).sizes().vec();
  node->weight_sizes = w.sizes().vec();
  node->input_type = x.scalar_type();
  node->weight_type = weight.scalar_type();
  if (bias.defined()) node->bias_type = bias.scalar_type();
  const int64_t taps = weight.numel() / std::max<int64_t>(weight.size(0) * weight.size(1), 1);
  const double weights_per_value = static_cast<double>(taps) / static_cast<double>(geometry.groups);
  if (weight.requires_grad()) {
    node->input =
        is_baseline(saving.method) ? InputSave::reference(values) : InputSave(x, saving, {Reads::samples, values, weights_per_value});
  }
  if (x.requires_grad()) node->weight = SavedVariable(weight, /*is_output=*/false);
  return node;
}

}  // namespace

at::Tensor conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const ConvOptions& options, const SavePolicy& saving,
                const std::shared_ptr<SharedGradient>& x_gradient) {
  check_tensor(x, kOp);
  check_tensor(weight, kOp);
  if (x.dim() + 1 == weight.dim())
    return conv(x.unsqueeze(0), weight, bias, options, saving).squeeze(0);  // a view: its gradient meets nobody's
  check_conv(x, weight, bias, options);
  const Geometry geometry = geometry_of(options, static_cast<size_t>(x.dim()) - 2);
  check_reach(geometry.in(x).sizes(), geometry.in(weight).sizes(), geometry);
  const at::ScalarType type = layer_type(x);
  const NoAutocast guard;
  const auto as_type = [&](const at::Tensor& t) { return t.defined() ? t.to(type) : t; };
  const bool routed = torch_miscounts(x, weight, type, geometry) && needs_grad(weight);
  if ((is_baseline(saving.method) && !routed) || x.numel() == 0) {
    return geometry.out(convolve(geometry.in(as_type(x)), geometry.in(as_type(weight)), as_type(bias), geometry));
  }
  check_float(x, kOp);
  const at::Tensor values = in_channels_last(as_type(x.detach())), w = geometry.in(as_type(weight.detach()));
  const auto run = [&] {
    const at::Tensor y = convolve(geometry.in(values), w, bias.defined() ? as_type(bias.detach()) : bias, geometry);
    return geometry.out(in_channels_last(y)).variable_data();  // no view to autograd
  };
  if (!needs_grad(x, weight, bias)) return run();
  const auto node = recorded(x, values, weight, w, bias, geometry, saving);
  if (x.requires_grad() && x_gradient != nullptr) {
    x_gradient->join();
    node->x_gradient = x_gradient;
  }
  return attach(run(), node);
}

std::vector<int64_t> conv_sizes(const at::Tensor& x, const at::Tensor& weight, const ConvOptions& options) {
  check_conv(x, weight, {}, options);
  const Geometry g = geometry_of(options, static_cast<size_t>(x.dim()) - 2);
  check_reach(g.in(x).sizes(), g.in(weight).sizes(), g);
  if (g.transposed) fail(kOp, "a convolution in parts must not be transposed");
  const size_t before = g.line ? 1 : 0;  // the dimension that stands for none
  std::vector<int64_t> sizes = {x.size(0), weight.size(0)};
  for (size_t d = before; d < g.stride.size(); ++d) {
    const auto at = static_cast<int64_t>(d - before) + 2;
    sizes.push_back((x.size(at) + 2 * g.padding[d] - g.dilation[d] * (weight.size(at) - 1) - 1) / g.stride[d] + 1);
  }
  return sizes;
}

ConvParts conv_parts(const at::Tensor& x, const at::Tensor& weight, const ConvOptions& options, const SavePolicy& saving) {
  const std::vector<int64_t> out_sizes = conv_sizes(x, weight, options);
  const Geometry geometry = geometry_of(options, static_cast<size_t>(x.dim()) - 2);
  const at::ScalarType type = layer_type(x);
  const NoAutocast guard;
  const at::Tensor values = in_channels_last(x.detach().to(type)), w = geometry.in(weight.detach().to(type));
  const auto node = recorded(x, values, weight, w, {}, geometry, saving);
  return {attach(sizes_only(out_sizes, values.options()), node), [values, w, geometry](int64_t first, int64_t last) {
            const at::Tensor some = geometry.in(values.narrow(0, first, last - first));
            return geometry.out(in_channels_last(convolve(some, w, {}, geometry)));
          }};
}

}  // namespace satchel
