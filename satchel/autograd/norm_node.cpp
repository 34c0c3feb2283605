#include "satchel/autograd/norm_node.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>

#include "satchel/autograd/adaptive.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_map.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/pack.h"

namespace satchel {

NormCall norm_call(const at::Tensor& x, const NormWeights& weights, Norm norm, int64_t groups, const NormOptions& options,
                   const Saving& saving) {
  NormCall call{x, weights, {norm, groups, 0}, options, saving};
  call.width = x.size(1);
  if (!is_map(x) && groups == 0) return call;
  call.axes.span = 1;
  for (int64_t d = 2; d < x.dim(); ++d) call.axes.span *= x.size(d);
  return call;
}

NormCall plain_call(const at::Tensor& x, const Saving& saving) {
  if (is_map(x) && (x.dim() > 3 || (!x.is_contiguous() && is_channels_last(x)))) {
    return norm_call(x, {}, Norm::none, 0, {}, saving);
  }
  return {x, {}, {Norm::none, 0, 0}, {}, saving, x.dim() == 0 ? 1 : x.size(-1)};
}

at::Tensor rows_of(const NormCall& call) {
  const at::Tensor x = call.x.detach();
  if (call.by_map() || x.dim() == 2) return rows_of_map(x);
  return x.contiguous().view({x.numel() / std::max<int64_t>(call.width, 1), call.width});
}

at::Tensor in_sizes(const at::Tensor& rows, at::IntArrayRef sizes, const NormAxes& axes) {
  if (rows.sizes() == sizes) return rows;
  return axes.span > 0 ? map_of_rows(rows, sizes) : at::_unsafe_view(rows, sizes);
}

at::Tensor gradient_rows(at::Tensor&& g, const NormAxes& axes, int64_t width) {
  if (axes.span > 0 || g.dim() == 2) return own_rows(std::move(g));
  const int64_t rows = g.numel() / std::max<int64_t>(width, 1);
  return own(std::move(g)).view({rows, width});
}

namespace {

constexpr const char* kChanged = "x must not be changed in place while a norm reads it";

/// Keeps the normalised values, or x itself where a method publishes that; layer by layer maps by samples, as the papers block them.
class NormNode : public SharingNode {
 public:
  explicit NormNode(const std::string& layer) : SharingNode("norm", layer) {}

  NormAxes axes;
  bool training = true, reads_values = true;
  std::optional<double> eps;  // shared methods: of NormBack
  int64_t width = 0;
  std::vector<int64_t> sizes;           // of x
  Packed packed;                        // the normalised values; x itself where `mean` is kept
  AdaptiveSave adaptive;                // in place of `packed`
  at::Tensor mean, rstd;                // mean: undefined where the normalised values are packed
  std::optional<SavedVariable> weight;  // γ: changing it in place before backward is an error, as in torch
  at::Tensor on;                        // recorded_norm_act(): the activation's mask
  double slope = 1;

  std::vector<SavedTensor> lines() const override;
  std::shared_ptr<const SharedSave> shared() override;
  bool may_wait_on() const override { return being_taken || (taker_save != nullptr && output_lives() && !is_read_by_others()); }

  /// Shared methods: nothing is packed until settle(), and what is may stand for `out` as well.
  void wait(NormCall call, const at::Tensor& out) {
    gamma = call.weights.gamma;
    beta = call.weights.beta;
    gamma_version = gamma.defined() ? gamma._version() : 0;
    beta_version = beta.defined() ? beta._version() : 0;
    x_version = call.x._version();
    shares = axes.span > 0 || out.size(-1) == width;
    share_bits = call.saving.method.norm.bits;
    waiting = std::move(call);
    eps = waiting->options.eps;
    output.emplace(out.getIntrusivePtr());
    output_changes = torch::autograd::impl::version_counter(out);
    stands_for(out);
  }
  /// Its output is about to go, edge and all. Where only the taker reads the norm then, nobody needs the input any more.
  void output_goes() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);  // who holds it looks for itself
    if (!lock.owns_lock() || taker_save == nullptr || output_changes.current_version() != output_version()) return;
    const long known = 2 + (taker.expired() ? 0 : 1);  // the output's pointer, the caller's, the taker's
    if (weak_from_this().use_count() <= known) waiting.reset();
  }
  /// From here on `save` serves for the gradient that the taker hands on: nothing else needs values of the norm.
  void taken_by(const std::shared_ptr<SharingNode>& node, std::shared_ptr<const SharedSave> save) {
    const std::lock_guard<std::mutex> lock(mutex_);
    being_taken = false;
    taker = node;
    taker_save = std::move(save);
  }
  /// What it was called with, and the seed: if it packs after all, it draws another.
  std::optional<NormCall> call() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto same = [](const at::Tensor& t, uint32_t version) { return !t.defined() || t._version() == version; };
    const bool unchanged = waiting && same(waiting->x, x_version) && same(gamma, gamma_version) && same(beta, beta_version);
    if (!unchanged) return std::nullopt;
    NormCall given = *waiting;
    waiting->seed.reset();
    being_taken = true;
    return given;
  }

 protected:
  variable_list back(at::Tensor g) override;
  void release() override;
  void pack_now() override;

 private:
  at::Tensor sample_rows(int64_t first, int64_t last) const {
    return rows_of_map(adaptive.defined() ? adaptive.samples(first, last) : unpack_samples(packed, first, last));
  }
  std::shared_ptr<const SharedSave> made_shared() const;
  /// Does the output stand, and is it still this node's?
  bool output_lives() const {
    const auto strong = output ? output->lock() : c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>();
    return strong && at::Tensor(strong).grad_fn().get() == this;
  }
  /// Do edges lead here beside the taker's? The caller holds one pointer to this node.
  bool is_read_by_others() const { return weak_from_this().use_count() > 1 + (output_lives() ? 1 : 0) + (taker.expired() ? 0 : 1); }

  std::optional<NormCall> waiting;  // not packed yet
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> output;
  c10::VariableVersion output_changes;
  bool lost = false;                                  // x was changed in place before it was packed
  bool being_taken = false;                           // an activation has asked for the call, and makes its node
  std::weak_ptr<SharingNode> taker;                   // of the norm, where an activation took it over
  std::shared_ptr<const SharedSave> taker_save = {};  // … and what it keeps for both
  at::Tensor gamma, beta;                             // what a reader of the output rebuilds it with; undefined: 1 and 0
  uint32_t x_version = 0, gamma_version = 0, beta_version = 0;
  bool shares = false;
  int share_bits = 0;  // a norm's own (`residual`) may be too few for a layer's weights
};

/// Lives as long as a norm's output: a slot that torch reads of leaves alone, for hooks after their gradients are added up.
class OutputEnd : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit OutputEnd(std::weak_ptr<NormNode> norm) : norm_(std::move(norm)) {}
  ~OutputEnd() override {
    if (const auto norm = norm_.lock()) norm->output_goes();
  }
  OutputEnd(const OutputEnd&) = delete;
  OutputEnd& operator=(const OutputEnd&) = delete;
  void operator()(const at::Tensor&) override {}

 private:
  std::weak_ptr<NormNode> norm_;
};

std::vector<SavedTensor> NormNode::lines() const {
  std::vector<SavedTensor> kept;
  if (taker_save != nullptr && !packed.bytes.defined()) return kept;  // the statistics are the taker's lines
  if (shared_ != nullptr) {
    report(*shared_, layer(), kept);
  } else if (packed.bytes.defined()) {
    report(packed, layer(), "norm", kept);
  }
  if (adaptive.defined()) adaptive.report(layer(), "norm", kept);
  std::vector<int64_t> shape{rstd.numel()};
  if (mean.defined()) shape.insert(shape.begin(), 2);
  const int64_t bytes = static_cast<int64_t>(rstd.nbytes()) * (mean.defined() ? 2 : 1);
  if (taker_save == nullptr) kept.push_back({layer(), "statistics", std::move(shape), 32, bytes, bytes});
  if (on.defined()) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    kept.push_back({layer(), "mask", sizes, 1, on.numel(), count});
  }
  return kept;
}

void NormNode::pack_now() {
  if (!waiting) return;
  if (taker_save != nullptr && !output_lives() && !is_read_by_others()) return waiting.reset();  // no gradient but the taker's can come
  const NormCall call = std::move(*waiting);
  waiting.reset();
  if (!reads_values) return;
  if (call.x._version() != x_version) {
    lost = true;  // backward says so, if it comes
    return;
  }
  const at::NoGradGuard no_grad;
  const NoAutocast no_autocast;
  const c10::OptionalStreamGuard own_stream(stream());  // whoever asks: there x stands, and there backward reads
  const at::Tensor rows = rows_of(call);
  const CodecSpec spec = norm_spec(call.saving.method, call.width, call.count());
  const at::Tensor seed = call.seed.defined() ? call.seed : fresh_seed(call.x.device());
  if (rows.is_cuda() && call.by_map() && axes.by_channel()) {  // one pass
    const Affine plain = folded(call.known, {}, {});
    packed = pack(apply_chain(rows, plain.gamma, plain.beta, {}, {}, {0, 1}), spec, seed);
  } else {
    packed = pack(normalised(rows, call.known, axes), spec, seed);
  }
}

std::shared_ptr<const SharedSave> NormNode::made_shared() const {
  const auto unchanged = [](const at::Tensor& t, uint32_t version) { return !t.defined() || t._version() == version; };
  if (!packed.bytes.defined() || packed.spec.bits < share_bits || !unchanged(gamma, gamma_version) || !unchanged(beta, beta_version))
    return nullptr;
  SharedSave save;
  save.code = packed;
  save.chain = {0, 1};
  const at::Tensor& some = gamma.defined() ? gamma : beta;
  if (some.defined()) {
    save.gamma = gamma.defined() ? gamma.detach().clone() : at::ones_like(some);
    save.beta = beta.defined() ? beta.detach().clone() : at::zeros_like(some);
  }
  if (sizes.size() > 2 && axes.span > 0) save.sizes = sizes;
  return std::make_shared<const SharedSave>(std::move(save));
}

std::shared_ptr<const SharedSave> NormNode::shared() {
  if (!shares) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  pack_now();
  if (shared_ == nullptr) shared_ = made_shared();
  return shared_;
}

variable_list NormNode::back(at::Tensor g) {
  if (lost) fail(op(), kChanged, "a change");
  const at::Tensor gradient = gradient_rows(std::move(g), axes, width);
  if (on.defined()) chain_gradient_(gradient, on, {}, {0, slope});
  const bool from_taker = !waiting && !packed.bytes.defined() && taker_save != nullptr && reads_values;
  at::Tensor scale;  // of the forward pass: the taker allows γ to change
  if (weight && !from_taker) scale = weight->unpack().detach();
  const auto result = [&](const NormGradients& sums) {
    return variable_list{needs(0) ? in_sizes(gradient, sizes, axes) : at::Tensor(), sums.gamma, sums.beta};
  };
  if (!reads_values) {
    const NormGradients sums{{}, needs(2) ? gradient.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat) : at::Tensor()};
    if (needs(0)) gradient.mul_(scale.defined() ? at::mul(scale, rstd.squeeze(0)) : rstd.squeeze(0));
    return result(sums);
  }
  NormBack back{axes, training, scale, rstd, {}, mean};
  back.eps = packed.bytes.defined() ? eps : std::optional<double>();
  std::optional<SharedRows> rows;
  SharedSave save;
  if (from_taker) {
    rows.emplace(*taker_save);
    if (taker_save->code.spec.side != Side::one_sided) back.eps = eps;
    back.gamma = rows->gamma();
    back.values = [&](int64_t first, int64_t last, at::ScalarType type) { return rows->values(first, last, type); };
  } else if (waiting) {
    if (waiting->x._version() != x_version) fail(op(), kChanged, "a change");
    const at::Tensor x = rows_of(*waiting);
    back.mean = waiting->known.mean;
    back.values = [x](int64_t first, int64_t last, at::ScalarType) { return x.narrow(0, first, last - first); };
  } else if (packed.bytes.defined() && packed.shape.size() == 2) {
    save.code = packed;
    rows.emplace(save);
    back.values = [&](int64_t first, int64_t last, at::ScalarType type) { return rows->values(first, last, type); };
  } else {
    back.values = [this](int64_t first, int64_t last, at::ScalarType) { return sample_rows(first / axes.span, last / axes.span); };
  }
  const bool whole_samples = axes.groups > 0 || !(rows || waiting);
  const int64_t unit = whole_samples ? axes.span : 1;
  return result(norm_back_(gradient, back, needs(0),
                           [&](const auto& run) { for_stretches_of(gradient.size(0), width, gradient.is_cuda(), run, unit); }));
}

void NormNode::release() {
  waiting.reset();
  packed = {};
  adaptive.release();
  shared_.reset();
  taker_save.reset();
  for (at::Tensor* t : {&mean, &rstd, &gamma, &beta, &on}) t->reset();
  weight.reset();
}

/// A node of the call, whose statistics and seed stand.
std::shared_ptr<NormNode> node_of(const NormCall& call, bool reads_values) {
  const auto node = make_node<NormNode>(call.saving.name, call.x, call.weights.gamma, call.weights.beta);
  node->axes = call.axes;
  node->training = call.options.training;
  node->width = call.width;
  node->sizes = call.x.sizes().vec();
  node->reads_values = reads_values;
  node->rstd = call.known.rstd;
  if (call.weights.gamma.defined()) node->weight.emplace(call.weights.gamma, /*is_output=*/false);
  return node;
}

/// Running statistics are constants: then the gradient of x reads γ and the deviation only.
bool reads_values_of(const NormCall& call) {
  const at::Tensor& gamma = call.weights.gamma;
  return !call.axes.by_channel() || call.options.training || (gamma.defined() && gamma.requires_grad());
}

/// Takes the statistics, and the seed of what is going to be packed.
void prepare(NormCall& call, const at::Tensor& rows, bool reads_values) {
  call.known = statistics_of(rows, call.weights, call.axes, call.options);
  if (call.known.mean.is_view()) call.known.mean = call.known.mean.clone();  // not a view of running statistics, which change
  if (reads_values) call.seed = fresh_seed(call.x.device());
}

/// Layer by layer: the normalised values where they are coded, of maps as norm_map() does; else x itself.
void keep_input(NormNode& node, const NormCall& call, const at::Tensor& rows) {
  const Method& method = call.saving.method;
  const CodecSpec spec = norm_spec(method, call.width, 0);
  const bool coded = call.by_map() ? codes_normalised(spec) : codes_normalised_rows(method);
  if (!coded) node.mean = call.known.mean;
  if (!call.by_map()) {
    node.packed = pack(coded ? normalised(rows, call.known, call.axes) : rows, spec, call.seed);
    return;
  }
  const at::Tensor map = in_sizes(coded ? normalised(rows, call.known, call.axes) : rows, call.x.sizes(), call.axes);
  if (method.adaptive) {
    node.adaptive = AdaptiveSave(map, call.saving, /*ranges_only=*/true, call.seed);
  } else {
    node.packed = pack(map, spec, call.seed);
  }
}

at::Tensor output_of(const NormCall& call, const at::Tensor& rows) {
  const at::Tensor gamma = call.weights.gamma.defined() ? call.weights.gamma.detach() : at::Tensor();
  const at::Tensor beta = call.weights.beta.defined() ? call.weights.beta.detach() : at::Tensor();
  if (call.by_map() && call.axes.by_channel()) {
    const Affine line = folded(call.known, gamma, beta);
    return apply_chain(rows, line.gamma, line.beta, {}, {}, {0, 1});
  }
  const at::Tensor values = normalised(rows, call.known, call.axes);
  if (gamma.defined() && beta.defined()) return at::addcmul(beta, values, gamma).to(rows.scalar_type());
  if (gamma.defined()) values.mul_(gamma);
  if (beta.defined()) values.add_(beta);
  return values.to(rows.scalar_type());
}

}  // namespace

int64_t NormCall::count() const {
  if (!x.requires_grad() || (axes.by_channel() && !options.training)) return 0;
  if (axes.groups > 0) return axes.span * width / axes.groups;
  return axes.by_channel() ? x.numel() / std::max<int64_t>(width, 1) : width;
}

at::Tensor recorded_norm(NormCall call, bool waits) {
  if (call.axes.by_channel() && serves_norm_map(call.x, call.weights, call.options, call.saving)) {
    return norm_map(call.x, call.weights, call.options, {/*activates=*/false}, call.saving);
  }
  const NoAutocast no_autocast;
  const at::Tensor rows = rows_of(call);
  const bool reads_values = reads_values_of(call);
  prepare(call, rows, reads_values);
  const auto node = node_of(call, reads_values);
  const at::Tensor out = attach(in_sizes(output_of(call, rows), call.x.sizes(), call.axes), node);
  if (!call.saving.method.shared) {
    if (reads_values) keep_input(*node, call, rows);
    return out;
  }
  node->wait(std::move(call), out);
  if (waits) {
    torch::autograd::impl::set_post_acc_grad_hooks(out, std::make_unique<OutputEnd>(node));
    wait_for_reader(node);
  } else {
    node->settle();
  }
  return out;
}

at::Tensor recorded_norm_act(NormCall call, double slope) {
  const NoAutocast no_autocast;
  const at::Tensor rows = rows_of(call);
  const bool reads_values = reads_values_of(call);
  prepare(call, rows, reads_values);
  const auto node = node_of(call, reads_values);
  if (reads_values) keep_input(*node, call, rows);
  const Affine line = folded(call.known, call.weights.gamma, call.weights.beta);
  node->on = on_bits(rows, line.gamma, line.beta);
  node->slope = slope;
  return attach(in_sizes(apply_chain(rows, line.gamma, line.beta, {}, {}, {0, slope}), call.x.sizes(), call.axes), node);
}

std::optional<NormCall> take_norm(const at::Tensor& y) {
  const auto node = std::dynamic_pointer_cast<NormNode>(waiting_norm());
  if (node == nullptr || y.grad_fn() != node || y._version() != node->output_version() || !made_on_current_stream(y)) return std::nullopt;
  std::optional<NormCall> call = node->call();
  if (!call) return std::nullopt;
  reader_has_come();
  call->taken_from = node;
  return call;
}

void take_over(const NormCall& call, const std::shared_ptr<SharingNode>& taker) {
  const auto norm = std::dynamic_pointer_cast<NormNode>(call.taken_from);
  if (norm == nullptr) return;
  taker->add_next_edge({norm, 0});
  norm->taken_by(taker, taker->shared());
}

bool is_heard(torch::autograd::Node& norm) {
  if (!norm.tensor_pre_hooks().empty() || !norm.retains_grad_hooks().empty()) return true;
  if (!norm.pre_hooks().empty() || !norm.post_hooks().empty()) return true;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr) return false;
  const auto found = wanted->find(&norm);
  return found != wanted->end() && found->second.captures_ != nullptr;
}

}  // namespace satchel
