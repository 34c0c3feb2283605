#include "satchel/autograd/epilogue_node.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"

namespace satchel {
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
  shares = saves.axes.span > 0 || out.size(-1) == saves.width;
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

std::optional<EpilogueCall> EpilogueNode::claim() {
  const std::lock_guard<std::mutex> lock(mutex_);
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
  if (claimer_save != nullptr && !output_lives() && !is_read_by_others())
    return deferred.reset();  // no gradient but the claimer's can come
  EpilogueCall call = std::move(*deferred);
  deferred.reset();
  if (!saves.reads_values) return;
  lost = call.x._version() != x_version;
  if (lost) return;  // backward says so, if it comes
  const at::NoGradGuard no_grad;
  const NoAutocast no_autocast;
  const c10::OptionalStreamGuard own_stream(stream());  // whoever asks: there x stands, and there backward reads
  const at::Tensor rows = rows_of(call);
  call.seed = norm_seed(call);
  at::Tensor values;
  if (rows.is_cuda() && call.is_image() && call.axes.by_channel()) {  // one pass
    const Affine plain = folded(call.known, {}, {});
    values = apply_chain(rows, plain.gamma, plain.beta, {}, {}, {0, 1});
  } else {
    values = normalised(rows, call.known, call.axes);
  }
  const std::vector<Keep> keeps = keeps_of(call.saving.method, call.site());
  const Keep& keep = *find(keeps, Kind::norm);
  keep_norm(saves, call, keep, rows, values);
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
  if (saves.sizes.size() > 2 && saves.axes.span > 0) save.sizes = saves.sizes;
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
  norm.values = [x = rows_of(*deferred)](int64_t first, int64_t last, at::ScalarType) { return x.narrow(0, first, last - first); };
  return norm;
}

variable_list EpilogueNode::back(at::Tensor given) {
  if (lost) fail(op(), kChanged, "a change");
  const at::Tensor g = gradient_rows(std::move(given), saves.axes, saves.width);
  const auto in_map = [&](const at::Tensor& rows) { return rows.defined() ? in_sizes(rows, saves.sizes, saves.axes) : rows; };
  if (claims && is_heard(*next_edge(3).function)) {  // the norm makes the gradients of its inputs
    gate_gradient_(saves, g);
    return {{}, {}, {}, in_map(g)};
  }
  const EpilogueWants wants{needs(0), saves.adds_skip && needs(3), needs(2)};
  const bool unpacked = deferred || (claimer_save != nullptr && !saves.norm.defined());
  EpilogueGradients made = unpacked && saves.reads_values ? unfused_back(saves, g, wants, unpacked_norm()) : kernel->back(saves, g, wants);
  variable_list gradients{in_map(made.x), made.gamma, made.beta};
  gradients.resize(num_outputs());
  if (saves.adds_skip) gradients[3] = in_map(made.skip);
  if (made.squares.defined()) pass_on_squares(gradients[0], std::move(made.squares));
  return gradients;
}

void EpilogueNode::release() {
  saves = {};
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

}  // namespace satchel
