#include "satchel/autograd/epilogue.h"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/core/error.h"

namespace satchel {

int64_t EpilogueCall::count() const {
  if (!has_norm() || !x.requires_grad() || (axes.by_channel() && !options.training)) return 0;
  if (axes.groups > 0) return axes.span * width / axes.groups;
  return axes.by_channel() ? x.numel() / std::max<int64_t>(width, 1) : width;
}

Site EpilogueCall::site() const {
  Site site;
  if (has_norm()) site.norm = axes.by_channel() ? Norm::batch : Norm::layer;
  site.activation = activation;
  site.adds_skip = skip.defined();
  site.drops = dropout > 0;
  site.next_reads = next_reads;
  site.image = is_image();
  site.width = std::max<int64_t>(width, 1);
  site.count = count();
  return site;
}

EpilogueCall norm_call(const at::Tensor& x, const NormWeights& weights, Norm norm, int64_t groups, const NormOptions& options,
                       const SavePolicy& saving) {
  EpilogueCall call{x, weights, {norm, groups, 0}, options, saving};
  call.width = x.size(1);
  if (!is_image(x) && groups == 0) return call;
  call.axes.span = 1;
  for (int64_t d = 2; d < x.dim(); ++d) call.axes.span *= x.size(d);
  return call;
}

EpilogueCall value_call(const at::Tensor& x, const SavePolicy& saving) {
  if (is_image(x) && (x.dim() > 3 || (!x.is_contiguous() && is_channels_last(x)))) return norm_call(x, {}, Norm::none, 0, {}, saving);
  return {x, {}, {Norm::none, 0, 0}, {}, saving, x.dim() == 0 ? 1 : x.size(-1)};
}

at::Tensor rows_of(const EpilogueCall& call) {
  const at::Tensor x = call.x.detach().resolve_neg();
  if (call.is_image() || x.dim() == 2) return rows_of_image(x);
  return x.contiguous().view({x.numel() / std::max<int64_t>(call.width, 1), call.width});
}

at::Tensor in_sizes(const at::Tensor& rows, at::IntArrayRef sizes, const NormAxes& axes) {
  if (rows.sizes() == sizes) return rows;
  return axes.span > 0 ? image_of_rows(rows, sizes) : at::_unsafe_view(rows, sizes);
}

at::Tensor gradient_rows(at::Tensor&& g, const NormAxes& axes, int64_t width) {
  if (axes.span > 0 || g.dim() == 2) return take_or_clone_rows(std::move(g));
  const int64_t rows = g.numel() / std::max<int64_t>(width, 1);
  return take_or_clone(std::move(g)).view({rows, width});
}

namespace {

/// Running statistics are constants: then the gradient of x reads γ and the deviation only.
bool reads_values_of(const EpilogueCall& call) {
  const at::Tensor& gamma = call.weights.gamma;
  return !call.axes.by_channel() || call.options.training || (gamma.defined() && gamma.requires_grad());
}

std::shared_ptr<EpilogueNode> node_of(const EpilogueCall& call) {
  const auto& [gamma, beta, mean, var] = call.weights;
  const auto node = call.skip.defined() ? make_node<EpilogueNode>(call.saving.name, call.x, gamma, beta, call.skip)
                                        : make_node<EpilogueNode>(call.saving.name, call.x, gamma, beta);
  EpilogueSaves& saves = node->saves;
  saves.axes = call.axes;
  saves.has_norm = call.has_norm();
  saves.training = call.options.training;
  saves.adds_skip = call.skip.defined();
  saves.width = call.width;
  saves.sizes = call.x.sizes().vec();
  if (reads_producer(call.saving.method)) saves.eps = call.options.eps;
  saves.reads_values = reads_values_of(call);
  saves.activation = call.activation;
  saves.slope = call.slope;
  saves.alpha = call.alpha;
  return node;
}

/// γ, where backward reads it from the tensor.
void keep_gamma(EpilogueNode& node, const EpilogueCall& call) {
  if (call.has_norm() && !node.saves.code_is_normalised && call.weights.gamma.defined()) {
    node.saves.gamma.emplace(call.weights.gamma, /*is_output=*/false);
  }
}

/// Lives as long as a norm's output: a slot that torch reads of leaves alone, for hooks after their gradients are added up.
class OutputEnd : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit OutputEnd(std::weak_ptr<EpilogueNode> norm) : norm_(std::move(norm)) {}
  ~OutputEnd() override {
    if (const auto norm = norm_.lock()) norm->output_goes();
  }
  OutputEnd(const OutputEnd&) = delete;
  OutputEnd& operator=(const OutputEnd&) = delete;
  void operator()(const at::Tensor&) override {}

 private:
  std::weak_ptr<EpilogueNode> norm_;
};

/// A claim ends with the call that made it, however that ends.
struct ClaimEnd {
  std::shared_ptr<EpilogueNode> norm;

  explicit ClaimEnd(std::shared_ptr<EpilogueNode> claimed) : norm(std::move(claimed)) {}
  ~ClaimEnd() {
    if (norm != nullptr) norm->claim_ends();
  }
  ClaimEnd(const ClaimEnd&) = delete;
  ClaimEnd& operator=(const ClaimEnd&) = delete;
};

/// The save becomes what the next layer finds, and the norm that the call was made with hears of its claimer.
void hand_on(const std::shared_ptr<EpilogueNode>& node, const EpilogueCall& call, const at::Tensor& out) {
  SharedSave& save = *node->saves.code;
  if (call.is_image() && call.x.dim() > 2) save.sizes = node->saves.sizes;
  if (save.bits.note.allocator != nullptr) {
    watch(save.bits, save.code, call.x.size(0), node->saves.code_is_normalised ? affine_of(call).gamma : at::Tensor());
  }
  node->stands_for(out);
  if (call.claimed == nullptr) return;
  node->add_next_edge({call.claimed, 0});
  node->claims = true;
  call.claimed->claimed_by(node, node->saves.code);
}

}  // namespace

at::Tensor epilogue(EpilogueCall call) {
  const NoAutocast no_autocast;
  const ClaimEnd claim(call.claimed);
  const std::vector<Keep> keeps = keeps_of(call.saving.method, call.site());
  const at::Tensor rows = rows_of(call);
  const auto node = node_of(call);
  node->kernel = &epilogue_kernel(call, keeps, rows);
  const at::Tensor z = node->kernel->forward(call, keeps, rows, node->saves);
  const at::Tensor ranges = std::exchange(node->saves.z_ranges, {});
  keep_gamma(*node, call);
  node->saves.serves_next = find(keeps, Kind::shared) != nullptr;
  const at::Tensor out = attach(in_sizes(z, call.x.sizes(), call.axes), node);
  if (node->saves.code != nullptr) hand_on(node, call, out);
  if (ranges.defined()) pass_on_ranges(out, ranges);
  return out;
}

at::Tensor norm_alone(EpilogueCall call) {
  call.next_reads = false;
  if (!reads_producer(call.saving.method)) return epilogue(std::move(call));
  const NoAutocast no_autocast;
  const at::Tensor rows = rows_of(call);
  take_statistics(call, rows);
  if (reads_values_of(call)) call.seed = fresh_seed(call.x.device());
  const auto node = node_of(call);
  node->kernel = &epilogue_kernels().back();
  node->saves.rstd = call.known.rstd;
  keep_gamma(*node, call);
  const at::Tensor out = attach(in_sizes(norm_output(call, rows), call.x.sizes(), call.axes), node);
  node->defer(std::move(call), out);
  torch::autograd::impl::set_post_acc_grad_hooks(out, std::make_unique<OutputEnd>(node));
  defer(node);
  return out;
}

std::optional<EpilogueCall> claim_norm(const at::Tensor& y) {
  const auto node = std::dynamic_pointer_cast<EpilogueNode>(deferred_norm());
  if (node == nullptr || y.grad_fn() != node || y._version() != node->output_version() || !made_on_current_stream(y)) return std::nullopt;
  std::optional<EpilogueCall> call = node->claim();
  if (!call) return std::nullopt;
  claim_deferred();
  call->claimed = node;
  call->next_reads = true;
  return call;
}

namespace {

/// Function by function.
at::Tensor by_function(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  at::Tensor y = x;
  if (options.norm == Norm::batch) y = batch_norm(x, weights, options.statistics, saving);
  if (options.norm == Norm::layer) y = layer_norm(x, weights, options.statistics, saving);
  switch (options.activation) {
    case Activation::relu: y = relu(y, saving); break;
    case Activation::leaky_relu: y = leaky_relu(y, options.slope, saving); break;
    case Activation::elu: y = elu(y, options.alpha, saving); break;
    case Activation::none: break;
  }
  return dropout(y, options.dropout, options.training(), saving);
}

/// x's memory to write over, where a recorded function made x and nobody but the caller of this holds it; else undefined. A node that
/// saved its own output, or a view, would show in the storage's count.
at::Tensor spare_memory(const at::Tensor& x) {
  const bool alone = x.use_count() == 1 && x.storage().use_count() == 1 && x.grad_fn() != nullptr && !x.is_view();
  return alone && (is_image(x) ? is_channels_last(x) : x.is_contiguous()) ? x.variable_data() : at::Tensor();
}

/// Norm and activation as the options have them. The result may be written over x, where the caller of norm_act() has given x away.
EpilogueCall fused_call(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  EpilogueCall call = norm_call(x, weights, options.norm, 0, options.statistics, saving);
  call.spare = spare;
  call.activation = options.activation;
  call.slope = options.activation == Activation::relu ? 0 : options.activation == Activation::leaky_relu ? options.slope : 1;
  call.alpha = options.alpha;
  return call;
}

}  // namespace

at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving) {
  constexpr const char* op = "norm_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  check_dropout(options.dropout, op);
  if (!std::isfinite(options.slope)) fail(op, "slope must be finite", options.slope);
  if (!(options.alpha >= 0) || !std::isfinite(options.alpha)) fail(op, "alpha must be finite and at least 0", options.alpha);
  const bool empty = options.norm == Norm::none && options.activation == Activation::none;
  // The fused norms of images that keep each function's own know no ELU.
  const bool own_elu = options.activation == Activation::elu && is_image(x) && !reads_producer(saving.method);
  if (is_baseline(saving.method) || empty || own_elu || x.numel() == 0 || !needs_grad(x, weights.gamma, weights.beta)) {
    return by_function(x, weights, options, saving);
  }
  EpilogueCall call = fused_call(x, weights, options, saving);
  const double p = options.training() ? options.dropout : 0;
  // The fused kernels of images that keep each function's own know no dropout.
  const bool apart = call.is_image() && !reads_producer(saving.method);
  call.dropout = apart ? 0 : p;
  const at::Tensor z = epilogue(std::move(call));
  return apart ? dropout(z, p, true, saving) : z;
}

at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const SavePolicy& saving) {
  constexpr const char* op = "norm_add_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  if (options.norm != Norm::batch) fail(op, "the norm must be a BatchNorm", "another");
  if (options.activation != Activation::relu && options.activation != Activation::none) {
    fail(op, "the activation must be ReLU or none", "another");
  }
  if (options.dropout != 0) fail(op, "dropout must be 0", options.dropout);
  const bool fits = skip.defined() && skip.sizes() == x.sizes() && skip.device() == x.device();
  if (!fits) fail(op, "skip must have x's sizes and device", skip.defined() ? skip.toString() : "nothing");
  const bool relus = options.activation == Activation::relu, same_type = skip.scalar_type() == x.scalar_type();
  const bool recorded = needs_grad(x, weights.gamma, weights.beta, skip) && !is_baseline(saving.method);
  // In evaluation the norm may keep nothing at all: a norm of its own knows. A sum alone keeps nothing.
  if (!recorded || !relus || !same_type || !options.training() || x.numel() == 0) {
    at::Tensor y = batch_norm(x, weights, options.statistics, saving);  // fresh, and kept by nobody
    const at::Tensor sum = same_type ? y.add_(skip) : at::add(y, skip);
    return relus ? relu(sum, saving) : sum;
  }
  EpilogueCall call = fused_call(x, weights, options, saving);
  call.skip = skip;
  return epilogue(std::move(call));
}

}  // namespace satchel
