#include "satchel/autograd/epilogue.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/shared_gradient.h"
#include "satchel/core/error.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/pack.h"

namespace satchel {

at::Tensor EpilogueForm::as_rows(const at::Tensor& given) const {
  const at::Tensor x = given.detach().resolve_neg();
  if (is_image() || x.dim() == 2) return rows_of_image(x);
  return x.contiguous().view({x.numel() / std::max<int64_t>(width, 1), width});
}

at::Tensor EpilogueForm::in_sizes(const at::Tensor& rows) const {
  if (rows.sizes() == at::IntArrayRef(sizes)) return rows;
  return is_image() ? image_of_rows(rows, sizes) : at::_unsafe_view(rows, sizes);
}

at::Tensor EpilogueForm::gradient_rows(at::Tensor&& g) const {
  if (is_image() || g.dim() == 2) return take_or_clone_rows(std::move(g));
  const int64_t rows = g.numel() / std::max<int64_t>(width, 1);
  return take_or_clone(std::move(g)).view({rows, width});
}

EpilogueCall::EpilogueCall(const at::Tensor& given, const NormWeights& with, const NormAxes& of, const NormOptions& how,
                           const SavePolicy& policy, int64_t values)
    : EpilogueForm{of, how, values, given.sizes().vec()}, x(given), weights(with), saving(policy) {}

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
  EpilogueCall call(x, weights, {norm, groups, 0}, options, saving, x.size(1));
  if (!is_image(x) && groups == 0) return call;
  call.axes.span = c10::multiply_integers(x.sizes().slice(2));
  return call;
}

EpilogueCall value_call(const at::Tensor& x, const SavePolicy& saving) {
  if (is_image(x) && (x.dim() > 3 || (!x.is_contiguous() && is_channels_last(x)))) return norm_call(x, {}, Norm::none, 0, {}, saving);
  return {x, {}, {Norm::none, 0, 0}, {}, saving, x.dim() == 0 ? 1 : x.size(-1)};
}

// The node, and how a norm defers its packing.

namespace {

constexpr const char* kChanged = "x must not be changed in place while a norm reads it";

bool unchanged(const at::Tensor& t, uint32_t version) { return !t.defined() || t._version() == version; }
uint32_t version_of(const at::Tensor& t) { return t.defined() ? t._version() : 0; }

/// Does anybody want the gradient of the norm's own output in the backward pass that runs now: grad(), a hook or retain_grad()? Then the
/// claimer hands it to the norm alone; else it gives the norm's inputs theirs, and the norm nothing.
bool is_heard(torch::autograd::Node& norm) {
  if (!norm.tensor_pre_hooks().empty() || !norm.retains_grad_hooks().empty()) return true;
  if (!norm.pre_hooks().empty() || !norm.post_hooks().empty()) return true;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr) return false;
  const auto found = wanted->find(&norm);
  return found != wanted->end() && found->second.captures_ != nullptr;
}

/// The node of this library that made an input, where nobody else reads that input, nor its gradient; else null.
SavingNode* maker_for_us_alone(const torch::autograd::Edge& edge) {
  auto* maker = dynamic_cast<SavingNode*>(edge.function.get());
  return maker != nullptr && edge.function.use_count() == 1 && !is_heard(*maker) ? maker : nullptr;
}

}  // namespace

bool EpilogueNode::output_lives() const {
  const auto strong = output ? output->lock() : c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>();
  return strong && at::Tensor(strong).grad_fn().get() == this;
}

void EpilogueNode::defer(EpilogueCall call, const at::Tensor& out) {
  gamma = call.weights.gamma;
  beta = call.weights.beta;
  gamma_version = version_of(gamma);
  beta_version = version_of(beta);
  x_version = call.x._version();
  shares = saves.is_image() || out.size(-1) == saves.width;
  deferred = std::move(call);
  output.emplace(out.getIntrusivePtr());
  output_changes = torch::autograd::impl::version_counter(out);
  stands_for(out);
}

void EpilogueNode::output_goes() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);  // who holds it looks for itself
  if (!lock.owns_lock() || claimer_save == nullptr || output_changes.current_version() != output_version()) return;
  const long known = 2 + (claimer.expired() ? 0 : 1);  // the output's pointer, the caller's, the claimer's
  if (weak_from_this().use_count() <= known) deferred.reset();
}

std::optional<EpilogueCall> EpilogueNode::claim(const std::function<bool(const EpilogueCall&)>& wanted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (deferred && wanted && !wanted(*deferred)) return std::nullopt;
  if (!deferred || !unchanged(deferred->x, x_version) || !unchanged(gamma, gamma_version) || !unchanged(beta, beta_version)) {
    return std::nullopt;
  }
  EpilogueCall given = *deferred;
  deferred->seed.reset();
  being_claimed = true;
  return given;
}

void EpilogueNode::claim_ends() {
  const std::lock_guard<std::mutex> lock(mutex_);
  being_claimed = false;
}

void EpilogueNode::claimed_by(const std::shared_ptr<SharingNode>& node, std::shared_ptr<const SharedSave> save) {
  const std::lock_guard<std::mutex> lock(mutex_);
  being_claimed = false;
  claimer = node;
  claimer_save = std::move(save);
}

void EpilogueNode::pack_now() {
  if (!deferred) return;
  const bool is_claimers = claimer_save != nullptr && !output_lives() && !is_read_by_others();
  if (is_claimers) return deferred.reset();  // no gradient but the claimer's can come
  EpilogueCall call = std::move(*deferred);
  deferred.reset();
  if (!saves.reads_values) return;
  lost = call.x._version() != x_version;
  if (lost) return;  // backward says so, if it comes
  const at::NoGradGuard no_grad;
  const NoAutocast no_autocast;
  const c10::OptionalStreamGuard own_stream(stream());  // whoever asks: there x stands, and there backward reads
  call.seed = norm_seed(call);
  const std::vector<Keep> keeps = keeps_of(call);
  const Keep& keep = *find(keeps, Kind::norm);
  kernel->pack(call, keep, call.as_rows(call.x), saves);
  has_bits = serves_weights(call.saving.method, keep.spec, /*after_relu=*/false);
}

std::shared_ptr<const SharedSave> EpilogueNode::made_shared() const {
  const bool stands = unchanged(gamma, gamma_version) && unchanged(beta, beta_version);
  if (!saves.norm.defined() || !has_bits || !stands) return nullptr;
  SharedSave save;
  save.code = saves.norm.packed();
  save.chain = {0, 1};
  const at::Tensor& some = gamma.defined() ? gamma : beta;
  if (some.defined()) {
    save.gamma = gamma.defined() ? gamma.detach().clone() : at::ones_like(some);
    save.beta = beta.defined() ? beta.detach().clone() : at::zeros_like(some);
  }
  if (saves.sizes.size() > 2 && saves.is_image()) save.sizes = saves.sizes;
  return std::make_shared<const SharedSave>(std::move(save));
}

std::shared_ptr<const SharedSave> EpilogueNode::shared() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!shares) return saves.serves_next ? saves.code : nullptr;
  pack_now();
  if (shared_ == nullptr) shared_ = made_shared();
  return shared_;
}

std::vector<SavedTensor> EpilogueNode::lines() const {
  std::vector<SavedTensor> kept;
  if (claimer_save != nullptr && !saves.norm.defined()) return kept;  // the statistics are the claimer's lines
  const auto add_statistics = [&] {
    if (!saves.rstd.defined() || claimer_save != nullptr) return;
    const int64_t numbers = saves.mean.defined() ? 2 : 1, bytes = static_cast<int64_t>(saves.rstd.nbytes()) * numbers;
    std::vector<int64_t> shape{saves.rstd.numel()};
    if (numbers == 2) shape.insert(shape.begin(), 2);
    kept.push_back({layer(), "statistics", std::move(shape), 32, bytes, bytes});
  };
  if (shared_ != nullptr) {
    report(*shared_, layer(), "shared", kept);
  } else if (saves.norm.defined()) {
    saves.norm.report(layer(), "norm", kept);
  }
  if (!saves.code_is_normalised) add_statistics();
  if (saves.code != nullptr) {
    report(*saves.code, layer(), saves.serves_next ? "shared" : "activation", kept);
    if (saves.code_is_normalised) add_statistics();
    if (saves.code->seed.defined()) kept.push_back(saved_line(layer(), "seed", saves.code->seed));
  }
  if (saves.derivative.bytes.defined()) report(saves.derivative, saves.derivative_name, "derivative", kept);
  const int64_t count = c10::multiply_integers(saves.sizes);
  if (saves.on.defined()) kept.push_back({layer(), "mask", saves.sizes, 1, saves.on.numel(), count});
  if (saves.dropout_mask.defined()) kept.push_back({layer(), "dropout", saves.sizes, 1, saves.dropout_mask.numel(), count});
  if (saves.dropout_seed.defined()) kept.push_back(saved_line(layer(), "seed", saves.dropout_seed));
  return kept;
}

NormBack EpilogueNode::unpacked_norm() const {
  if (!deferred) return norm_from_code(saves, claimer_save);  // γ of the forward pass: the claimer allows it to change
  if (deferred->x._version() != x_version) fail(op(), kChanged, "a change");
  NormBack norm = norm_of(saves);
  norm.gamma = saves.gamma_values();
  norm.mean = deferred->known.mean;
  norm.values = [x = deferred->as_rows(deferred->x)](int64_t first, int64_t last, at::ScalarType) {
    return x.narrow(0, first, last - first);
  };
  return norm;
}

variable_list EpilogueNode::back(at::Tensor given) {
  if (lost) fail(op(), kChanged, "a change");
  const at::Tensor g = saves.gradient_rows(std::move(given));
  const auto in_map = [&](const at::Tensor& rows) { return rows.defined() ? saves.in_sizes(rows) : rows; };
  if (claims && is_heard(*next_edge(3).function)) {  // the norm makes the gradients of its inputs
    gate_gradient_(saves, g);
    return {{}, {}, {}, in_map(g)};
  }
  EpilogueWants wants{needs(0), saves.adds_skip && needs(3), needs(2)};
  if (wants.x && post_hooks().empty()) wants.x_parts = maker_for_us_alone(next_edge(0));
  const bool unpacked = deferred || (claimer_save != nullptr && !saves.norm.defined());
  EpilogueGradients made = unpacked && saves.reads_values ? unfused_back(saves, g, wants, unpacked_norm()) : kernel->back(saves, g, wants);
  variable_list gradients{in_map(made.x), made.gamma, made.beta};
  gradients.resize(num_outputs());
  if (saves.adds_skip) gradients[3] = in_map(made.skip);
  if (made.skip.defined() && skip_gradient != nullptr && skip_gradient->is_shared()) {
    skip_gradient->leave(std::exchange(gradients[3], {}));  // the block's first layer, which comes later, adds to it
  }
  if (made.squares.defined()) pass_on_squares(gradients[0], std::move(made.squares));
  return gradients;
}

void EpilogueNode::release() {
  saves = {};
  skip_gradient.reset();
  shared_.reset();
  deferred.reset();
  claimer_save.reset();
  gamma.reset();
  beta.reset();
}

std::string epilogue_kernel_of(const at::Tensor& x) {
  const auto* node = dynamic_cast<const EpilogueNode*>(x.grad_fn().get());
  return node == nullptr ? "" : node->kernel->name;
}

// The function.

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
  static_cast<EpilogueForm&>(saves) = call;
  saves.adds_skip = call.skip.defined();
  node->skip_gradient = call.skip_gradient;
  if (call.skip_gradient != nullptr) call.skip_gradient->join();
  saves.derivative_name = call.smooth_name;
  if (reads_producer(call.saving.method)) saves.eps = call.options.eps;
  saves.reads_values = reads_values_of(call);
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

/// A smooth activation keeps x̂ in a code of its own: the norm hears of its claimer, which has what the norm's gradient reads. The
/// derivative is of x's sizes in reports.
void tell_norm(const std::shared_ptr<EpilogueNode>& node, const EpilogueCall& call) {
  node->saves.derivative.shape = call.sizes;  // rows by name only: they have no gaps
  node->saves.derivative.strides = contiguous_strides(call.sizes);
  SharedSave save;
  save.code = node->saves.norm.packed();
  node->add_next_edge({call.claimed, 0});
  node->claims = true;
  call.claimed->claimed_by(node, std::make_shared<const SharedSave>(std::move(save)));
}

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

std::vector<Keep> keeps_of(const EpilogueCall& call) {
  std::vector<Keep> keeps = keeps_of(call.saving.method, call.site());
  if (call.smooth != Smooth::none) keeps.push_back(keeps_of(call.saving.method, {Role::derivative}).front());
  return keeps;
}

at::Tensor epilogue(EpilogueCall call) {
  const NoAutocast no_autocast;
  const auto claim = c10::make_scope_exit([norm = call.claimed] {  // it ends with the call that made it, however that ends
    if (norm != nullptr) norm->claim_ends();
  });
  const std::vector<Keep> keeps = keeps_of(call);
  const at::Tensor rows = call.samples ? sizes_only({call.x.numel() / call.width, call.width}, call.x.options()) : call.as_rows(call.x);
  const auto node = node_of(call);
  node->kernel = &epilogue_kernel(call, keeps, rows);
  const at::Tensor z = node->kernel->forward(call, keeps, rows, node->saves);
  const at::Tensor ranges = std::exchange(node->saves.z_ranges, {});
  keep_gamma(*node, call);
  node->saves.serves_next = find(keeps, Kind::shared) != nullptr;
  const at::Tensor out = attach(call.in_sizes(z), node);
  if (node->saves.code != nullptr) hand_on(node, call, out);
  if (call.smooth != Smooth::none) tell_norm(node, call);
  if (ranges.defined()) pass_on_ranges(out, ranges);
  return out;
}

at::Tensor norm_alone(EpilogueCall call) {
  call.next_reads = false;
  if (!reads_producer(call.saving.method)) return epilogue(std::move(call));
  const NoAutocast no_autocast;
  const at::Tensor rows = call.as_rows(call.x);
  const EpilogueKernel& chosen = epilogue_kernel(call, keeps_of(call), rows);
  const EpilogueKernel& kernel = chosen.norm != nullptr ? chosen : kUnfusedEpilogue;
  const at::Tensor y = kernel.norm(call, rows);
  if (reads_values_of(call)) call.seed = fresh_seed(call.x.device());
  const auto node = node_of(call);
  node->kernel = &kernel;
  node->saves.rstd = call.known.rstd;
  keep_gamma(*node, call);
  const at::Tensor out = attach(call.in_sizes(y), node);
  node->defer(std::move(call), out);
  torch::autograd::impl::set_post_acc_grad_hooks(out, std::make_unique<OutputEnd>(node));
  defer(node);
  return out;
}

std::optional<EpilogueCall> claim_norm(const at::Tensor& y, const std::function<bool(const EpilogueCall&)>& wanted) {
  const auto node = std::dynamic_pointer_cast<EpilogueNode>(deferred_norm());
  if (node == nullptr || y.grad_fn() != node || y._version() != node->output_version() || !made_on_current_stream(y)) return std::nullopt;
  std::optional<EpilogueCall> call = node->claim(wanted);
  if (!call) return std::nullopt;
  claim_deferred();
  call->claimed = node;
  call->next_reads = true;
  return call;
}

}  // namespace satchel
