#include "satchel/autograd/pool.h"

#include <ATen/ops/_adaptive_avg_pool2d_backward.h>
#include <ATen/ops/_adaptive_avg_pool3d_backward.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool3d.h>

#include <algorithm>
#include <string>
#include <utility>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/pool_offsets.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

/// One number for each spatial dimension.
std::vector<int64_t> spread(const std::vector<int64_t>& given, size_t dims, int64_t least, const char* name, const char* op) {
  if (given.size() != 1 && given.size() != dims) {
    fail(op, std::string(name) + " must have 1 number or " + std::to_string(dims), given.size());
  }
  for (const int64_t n : given) {
    if (n < least) fail(op, std::string(name) + " must be at least " + std::to_string(least), n);
  }
  return given.size() == dims ? given : std::vector<int64_t>(dims, given[0]);
}

void check_map(const at::Tensor& x, const char* op) {
  check_tensor(x, op);
  if (x.dim() < 3 || x.dim() > 5) fail(op, "input must be N×C×spatial of 1 to 3 spatial dimensions", x.dim());
}

PoolWindow window_of(const PoolOptions& options, size_t dims, const char* op) {
  PoolWindow w;
  w.kernel = spread(options.kernel, dims, 1, "kernel", op);
  w.stride = options.stride.empty() ? w.kernel : spread(options.stride, dims, 1, "stride", op);
  w.padding = spread(options.padding, dims, 0, "padding", op);
  w.dilation = spread(options.dilation, dims, 1, "dilation", op);
  w.ceil_mode = options.ceil_mode;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t most = w.kernel[d] / 2;
    if (w.padding[d] > most) fail(op, "padding must be at most half of the kernel, " + std::to_string(most), w.padding[d]);
  }
  if (dims > 1) return w;
  for (std::vector<int64_t>* list : {&w.kernel, &w.stride, &w.dilation}) list->insert(list->begin(), 1);
  w.padding.insert(w.padding.begin(), 0);
  return w;
}

/// Throws where no window fits: `x` as it is pooled.
void check_reach(const at::Tensor& x, const PoolWindow& w, const char* op) {
  const auto dims = static_cast<int64_t>(w.kernel.size());
  for (size_t d = 0; d < w.kernel.size(); ++d) {
    const int64_t size = x.size(x.dim() - dims + static_cast<int64_t>(d));
    const int64_t least = w.dilation[d] * (w.kernel[d] - 1) + 1 - 2 * w.padding[d] - (w.ceil_mode ? w.stride[d] - 1 : 0);
    if (size < least)
      fail(op, "input must be at least " + std::to_string(least) + " long where the kernel is " + std::to_string(w.kernel[d]), size);
  }
}

/// One spatial dimension runs as two, the first of them 1 long.
struct Lift {
  bool line = false;
  at::Tensor up(const at::Tensor& t) const { return line ? t.unsqueeze(2) : t; }
  at::Tensor down(const at::Tensor& t) const { return line ? t.squeeze(2) : t; }
  /// The memory of a map that torch made, as a node's output: no view to autograd.
  at::Tensor finished(const at::Tensor& y) const { return down(in_channels_last(y)).variable_data(); }
};

bool is_single(const at::Tensor& x, size_t numbers) { return numbers > 0 && x.dim() == static_cast<int64_t>(numbers) + 1; }

/// Keeps where the maxima stood, and packs its output for the layers that read it.
class MaxPoolNode : public OnDemandNode {
 public:
  explicit MaxPoolNode(const std::string& layer) : OnDemandNode("max_pool", layer) {}
  PoolOffsets offsets;
  Lift lift;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept{offsets.line(layer())};
    if (shared_ != nullptr) report(*shared_, layer(), "shared", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    const NoAutocast guard;
    return {lift.down(offsets.gradient(in_channels_last(lift.up(g))))};
  }
  void release() override {
    offsets.release();
    shared_.reset();
  }
};

/// Keeps sizes.
class AveragePoolNode : public SavingNode {
 public:
  explicit AveragePoolNode(const std::string& layer) : SavingNode("avg_pool", layer) {}
  PoolWindow window;
  Lift lift;
  bool count_include_pad = true;
  std::optional<int64_t> divisor;
  std::vector<int64_t> sizes;

  std::vector<SavedTensor> lines() const override { return {}; }

 protected:
  variable_list back(at::Tensor given) override {
    const NoAutocast guard;
    const at::Tensor g = in_channels_last(lift.up(given));
    at::Tensor dx;
    if (sizes.size() == 4 && g.is_cuda()) {
      dx = at::avg_pool2d_backward(g.contiguous(), sizes_only(sizes, g.options()), window.kernel, window.stride, window.padding,
                                   window.ceil_mode, count_include_pad, divisor);
    } else if (sizes.size() == 4) {
      // Of the input torch reads sizes and order: the gradient's own memory has both.
      dx = empty_channels_last(sizes, g.options());
      at::avg_pool2d_backward_out(dx, g, dx, window.kernel, window.stride, window.padding, window.ceil_mode, count_include_pad, divisor);
    } else {
      dx = at::avg_pool3d_backward(g.contiguous(), sizes_only(sizes, g.options()), window.kernel, window.stride, window.padding,
                                   window.ceil_mode, count_include_pad, divisor);
    }
    return {lift.down(in_channels_last(dx))};
  }
  void release() override {}
};

class AdaptivePoolNode : public SavingNode {
 public:
  explicit AdaptivePoolNode(const std::string& layer) : SavingNode("adaptive_avg_pool", layer) {}
  std::vector<int64_t> sizes;
  Lift lift;

  std::vector<SavedTensor> lines() const override { return {}; }

 protected:
  variable_list back(at::Tensor given) override {
    const NoAutocast guard;
    const at::Tensor g = lift.up(given);
    int64_t values = 1;
    for (size_t d = 2; d < sizes.size(); ++d) values *= sizes[d];
    at::Tensor dx;
    if (g.numel() == g.size(0) * g.size(1)) {  // the mean of all
      dx = g.div(values).expand(sizes);
    } else if (sizes.size() == 4) {
      dx = at::_adaptive_avg_pool2d_backward(g.contiguous(), sizes_only(sizes, g.options()));
    } else {
      dx = at::_adaptive_avg_pool3d_backward(g.contiguous(), sizes_only(sizes, g.options()));
    }
    return {lift.down(in_channels_last(dx))};
  }
  void release() override {}
};

/// Is x a ReLU's output that its readers rebuild from a save, or a pool of one? Its values are zero or positive.
bool is_shared_relu(const at::Tensor& x) {
  if (const auto save = readable_save_of(x)) return save->chain.slope == 0 || save->code.spec.side == Side::relu;
  const auto* late = dynamic_cast<const OnDemandNode*>(x.grad_fn().get());
  return late != nullptr && late->is_on_demand(x);
}

at::Tensor torch_max_pool(const at::Tensor& x, const PoolWindow& w) {
  if (x.dim() == 4) return at::max_pool2d(x, w.kernel, w.stride, w.padding, w.dilation, w.ceil_mode);
  return at::max_pool3d(x, w.kernel, w.stride, w.padding, w.dilation, w.ceil_mode);
}

at::Tensor torch_avg_pool(const at::Tensor& x, const PoolWindow& w, const PoolOptions& o) {
  if (x.dim() == 4) return at::avg_pool2d(x, w.kernel, w.stride, w.padding, w.ceil_mode, o.count_include_pad, o.divisor);
  return at::avg_pool3d(x, w.kernel, w.stride, w.padding, w.ceil_mode, o.count_include_pad, o.divisor);
}

at::Tensor torch_adaptive(const at::Tensor& x, at::IntArrayRef sizes) {
  return x.dim() == 4 ? at::adaptive_avg_pool2d(x, sizes) : at::adaptive_avg_pool3d(x, sizes);
}

}  // namespace

at::Tensor max_pool(const at::Tensor& x, const PoolOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "max_pool";
  if (x.defined() && is_single(x, options.kernel.size())) return max_pool(x.unsqueeze(0), options, saving).squeeze(0);
  check_map(x, op);
  const PoolWindow window = window_of(options, static_cast<size_t>(x.dim()) - 2, op);
  const Lift lift{x.dim() == 3};
  check_reach(lift.up(x), window, op);
  const NoAutocast guard;
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return lift.down(torch_max_pool(lift.up(x), window));
  check_float(x, op);
  const bool shares = reads_producer(saving.method) && is_shared_relu(x);
  const auto node = make_node<MaxPoolNode>(saving.name, x);
  const at::Tensor values = in_channels_last(lift.up(x.detach()));
  node->lift = lift;
  const at::Tensor out = attach(lift.finished(node->offsets.pool(values, window)), node);
  if (shares) {
    Site site;
    site.activation = Activation::relu;
    site.width = x.size(1);
    node->pack_on_demand(find(keeps_of(saving.method, site), Kind::shared)->spec, out);
  }
  return out;
}

at::Tensor avg_pool(const at::Tensor& x, const PoolOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "avg_pool";
  if (x.defined() && is_single(x, options.kernel.size())) return avg_pool(x.unsqueeze(0), options, saving).squeeze(0);
  check_map(x, op);
  const PoolWindow window = window_of(options, static_cast<size_t>(x.dim()) - 2, op);
  if (std::ranges::any_of(window.dilation, [](int64_t d) { return d != 1; })) fail(op, "dilation must be 1", options.dilation[0]);
  if (options.divisor && *options.divisor == 0) fail(op, "divisor must not be 0", 0);
  const Lift lift{x.dim() == 3};
  check_reach(lift.up(x), window, op);
  const NoAutocast guard;
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return lift.down(torch_avg_pool(lift.up(x), window, options));
  check_float(x, op);
  const auto node = make_node<AveragePoolNode>(saving.name, x);
  const at::Tensor values = in_channels_last(lift.up(x.detach()));
  node->window = window;
  node->count_include_pad = options.count_include_pad;
  node->divisor = options.divisor;
  node->lift = lift;
  node->sizes = values.sizes().vec();
  return attach(lift.finished(torch_avg_pool(values, window, options)), node);
}

at::Tensor adaptive_avg_pool(const at::Tensor& x, const std::vector<std::optional<int64_t>>& output_size, const SavePolicy& saving) {
  constexpr const char* op = "adaptive_avg_pool";
  if (x.defined() && is_single(x, output_size.size())) return adaptive_avg_pool(x.unsqueeze(0), output_size, saving).squeeze(0);
  check_map(x, op);
  const auto dims = static_cast<size_t>(x.dim()) - 2;
  if (output_size.size() != 1 && output_size.size() != dims) {
    fail(op, "output_size must have 1 number or " + std::to_string(dims), output_size.size());
  }
  std::vector<int64_t> sizes;
  for (size_t d = 0; d < dims; ++d) {
    sizes.push_back(output_size[output_size.size() == 1 ? 0 : d].value_or(x.size(static_cast<int64_t>(d) + 2)));
    if (sizes.back() < 0) fail(op, "output_size must be at least 0", sizes.back());
  }
  const Lift lift{dims == 1};
  if (lift.line) sizes.insert(sizes.begin(), 1);
  const NoAutocast guard;
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return lift.down(torch_adaptive(lift.up(x), sizes));
  check_float(x, op);
  const auto node = make_node<AdaptivePoolNode>(saving.name, x);
  const at::Tensor values = in_channels_last(lift.up(x.detach()));
  node->lift = lift;
  node->sizes = values.sizes().vec();
  return attach(lift.finished(torch_adaptive(values, sizes)), node);
}

}  // namespace satchel
