#include "satchel/autograd/epilogue.h"

#include <ATen/ops/_unsafe_view.h>

#include <algorithm>
#include <utility>

#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"

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

at::Tensor spare_memory(const at::Tensor& x) {
  const bool alone = x.use_count() == 1 && x.storage().use_count() == 1 && x.grad_fn() != nullptr && !x.is_view();
  return alone && (is_image(x) ? is_channels_last(x) : x.is_contiguous()) ? x.variable_data() : at::Tensor();
}

}  // namespace satchel
