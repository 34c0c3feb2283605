#include "satchel/autograd/packing.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <optional>
#include <unordered_set>
#include <utility>

#include "satchel/autograd/node.h"
#include "satchel/autograd/packing_fields.h"
#include "satchel/autograd/packing_forms.h"
#include "satchel/autograd/packing_meter.h"
#include "satchel/autograd/seeds.h"
#include "satchel/autograd/step.h"
#include "satchel/autograd/torch_saves.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

constexpr int64_t kManyValues = 4096;  // a statistic: a norm's noise, of which it reads the mean, takes local bits from here on
constexpr size_t kMostVisited = 1 << 16;

/// Does an edge lead to AccumulateGrad through views and casts only?
const AccumulateGrad* parameter_behind(const Node* node) {
  while (node != nullptr && is_view_or_cast(*node)) node = node->next_edge(0).function.get();
  return dynamic_cast<const AccumulateGrad*>(node);
}

/// A leaf that needs a gradient, or a view or cast of one.
bool is_parameter(const at::Tensor& t) {
  if (!t.is_leaf()) return parameter_behind(t.grad_fn().get()) != nullptr;
  return t.requires_grad() || (t.is_view() && t._base().is_leaf() && t._base().requires_grad());
}

/// The parameter of which t is a cast, or a view of a cast; undefined where t is a view of the parameter itself.
at::Tensor parameter_below(const at::Tensor& t) {
  int casts = 0;
  const Node* node = t.grad_fn().get();
  for (; node != nullptr && is_view_or_cast(*node); node = node->next_edge(0).function.get()) {
    // Views after the cast alone: they are t's strides.
    if (is_cast(*node)) {
      ++casts;
    } else if (casts > 0) {
      return {};
    }
  }
  const auto* leaf = dynamic_cast<const AccumulateGrad*>(node);
  if (casts != 1 || leaf == nullptr) return {};
  const at::Tensor& parameter = leaf->variable;
  const bool fits = parameter.is_contiguous() && parameter.device() == t.device() &&
                    t.storage().nbytes() == static_cast<size_t>(parameter.numel()) * t.element_size();
  return fits ? parameter : at::Tensor();
}

/// Values in memory of its own that kernels can read.
bool is_plain(const at::Tensor& t) {
  constexpr c10::DispatchKeySet wrapped({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::NestedTensor});
  return t.layout() == at::kStrided && t.has_storage() && !t.key_set().has_any(wrapped) && !t.is_quantized() && !t._is_zerotensor();
}

bool is_expanded(const at::Tensor& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.stride(d) == 0 && t.size(d) > 1) return true;
  }
  return false;
}

bool is_float(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

/// "ViewBackward0": torch's own nodes, of which those that are not traceable are views and save nothing.
bool is_named_as_torchs(const std::string& name) {
  const size_t end = name.find_last_not_of("0123456789");
  return end != std::string::npos && end + 1 < name.size() && std::string_view(name).substr(0, end + 1).ends_with("Backward");
}

std::string bits_text(int bits) { return std::to_string(bits) + " bits"; }

/// A form that is made already, in a SavedVariable's place.
struct Hook : torch::autograd::SavedVariableHooks {
  explicit Hook(KeptFormPtr kept) : form(std::move(kept)) {}
  void call_pack_hook(const at::Tensor&) override {}
  at::Tensor call_unpack_hook() override {
    if (is_counting_saves()) {
      const at::Tensor bytes = form->bytes();
      return bytes.defined() ? bytes : at::empty({0}, at::kByte);
    }
    if (at::GradMode::is_enabled()) fail("packing", "a gradient of a gradient needs exact saves; leave the guard for it", "create_graph");
    const NoAutocast no_autocast;
    return form->restore();
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override { return std::nullopt; }

  KeptFormPtr form;
};

struct Made {
  KeptFormPtr form;   // null: this case has to stay exact
  std::string text;   // its name, or why
  int64_t added = 0;  // bytes; of a shared code none but the first time
};

Made made_of(KeptFormPtr form, std::string text) {
  if (form == nullptr) return {};
  const int64_t added = form->nbytes();
  return {std::move(form), std::move(text), added};
}

void check_options(const PackingOptions& options) {
  for (const int bits : {options.local, options.flow, options.attention}) {
    if ((bits < 1 || bits > 8) && bits != 32) fail("packing", "bits must be 1 to 8, or 32 for exact", bits);
  }
  if (options.min_bytes < 0) fail("packing", "min_bytes must be 0 or more", options.min_bytes);
  if (!at::isRecordFunctionEnabled())
    fail("packing", "torch's RecordFunction must be enabled in this thread", "a thread that has it disabled");
}

}  // namespace

/// What one guard knows.
class Packing::Walk {
 public:
  explicit Walk(PackingOptions options) : options_(std::move(options)), names_(options_.include, options_.exclude) {}

  PackingReport report;

  /// Nodes of this thread that are made from now on are looked at, and no others.
  void begin() {
    first_ = at::sequence_number::peek();
    visited_.clear();
  }

  void visit(const std::shared_ptr<Node>& root) {
    std::vector<std::shared_ptr<Node>> todo{root};
    while (!todo.empty()) {
      const std::shared_ptr<Node> node = std::move(todo.back());
      todo.pop_back();
      if (node == nullptr || node->sequence_nr() < first_ || node->sequence_nr() == UINT64_MAX) continue;  // the last: AccumulateGrad
      if (!visited_.insert(node->sequence_nr()).second) continue;
      look(*node);
      for (const torch::autograd::Edge& edge : node->next_edges()) todo.push_back(edge.function);
    }
    if (visited_.size() > kMostVisited) begin();
  }

 private:
  int bits_of(FieldRole role) const {
    return role == FieldRole::local ? options_.local : role == FieldRole::attention ? options_.attention : options_.flow;
  }

  void look(Node& node) {
    told_.clear();
    for (const FieldRow* row : rows_of(node)) keep(node, *row);
    if (options_.report) tell_others(node);
  }

  /// What the table has no row for.
  void tell_others(Node& node) {
    if (dynamic_cast<const SavingNode*>(&node) != nullptr) return;  // Satchel's own functions pack by themselves
    if (!node.is_traceable()) {
      if (!is_named_as_torchs(node.name())) ++report.hidden[node.name()];
      return;
    }
    const NodeSaves saves = saves_of(&node);
    for (const at::Tensor& t : saves.tensors) {
      if (!is_plain(t) || t.unsafeGetTensorImpl()->is_wrapped_number() || told_.contains(memory_of(t)) || is_parameter(t)) continue;
      meter_.add(report, {node.name(), ""}, t, "exact: no row", std::nullopt);
    }
  }

  void keep(Node& node, const FieldRow& row) {
    torch::autograd::SavedVariable& saved = *row.saved(node);
    if (saved.has_hooks()) return;
    const std::optional<at::Tensor> raw = saved.get_raw_data();
    if (!raw || !raw->defined() || !is_plain(*raw)) return;
    const auto exact = [&](const std::string& why) {
      if (!is_parameter(*raw) || parameter_below(*raw).defined()) tell(row, *raw, "exact: " + why, std::nullopt);
    };
    if (static_cast<int64_t>(raw->nbytes()) < options_.min_bytes) return exact("small");
    if (!names_.want(row.node, row.field)) return exact("excluded");
    at::Tensor t;
    try {
      t = saved.unpack(node.getptr());
    } catch (const c10::Error&) {  // changed in place since: torch itself says so in backward
      return exact("changed in place");
    }
    if (!t.is_cpu() && !t.is_cuda()) return exact("no kernels for this device");
    if (is_expanded(t)) return exact("expanded");  // its memory may be smaller than a code
    Made made;
    try {
      if (is_parameter(t)) {
        const at::Tensor parameter = parameter_below(t);
        if (!parameter.defined()) return;
        made = {keep_cast(t, parameter), "cast again"};
      } else {
        if (row.weight && !t.requires_grad()) return;
        made = make(node, row, t.detach());
      }
    } catch (const std::exception& e) {  // memory that is full, a GPU without kernels: training goes on as without packing
      const std::string text = e.what();
      return exact(text.substr(0, text.find('\n')));
    }
    if (made.form == nullptr) return exact(made.text.empty() ? "this case" : made.text);
    if (const at::Tensor bytes = made.form->bytes(); bytes.defined()) told_.insert(memory_of(bytes));
    tell(row, t, made.text, made.added);
    saved.register_hooks(std::make_unique<Hook>(std::move(made.form)));
  }

  void tell(const FieldRow& row, const at::Tensor& t, const std::string& kept, std::optional<int64_t> after) {
    if (!options_.report) return;
    if (!after) told_.insert(memory_of(t));
    meter_.add(report, {row.node, row.field}, t, kept, after);
  }

  /// A code; readers whose noise stays in a parameter's gradient share one.
  Made code(const at::Tensor& t, int bits, bool local) {
    const auto make = [&] { return keep_code(t, bits, fresh_seed(t.device())); };
    if (!local) return made_of(make(), bits_text(bits));
    const auto [form, is_new] = shared_.find_or_make(t, bits, make);
    return {form, bits_text(bits), is_new ? form->nbytes() : 0};
  }

  Made make(Node& node, const FieldRow& row, const at::Tensor& t) {
    if (row.applies != nullptr && !row.applies(node)) return {};
    switch (row.form) {
      case FieldForm::shape: return made_of(keep_shape(t), "shape");
      case FieldForm::flags: return t.scalar_type() == at::kBool ? made_of(keep_mask(t), "flags") : Made{};
      case FieldForm::index: return index(node, row, t);
      default: break;
    }
    if (!is_float(t)) return {};
    if (row.form == FieldForm::mask) return made_of(keep_mask(t), "mask");
    if (row.form == FieldForm::inside) return made_of(keep_inside(t, curve_of(node)), "mask");
    if (row.form == FieldForm::normed) return normed(node, row, t);
    const bool local = row.role == FieldRole::local || is_read_for_a_parameter(node, row);
    const int bits = bits_of(local ? FieldRole::local : row.role);
    if (bits == 32) return {nullptr, "32 bits"};
    if (row.form == FieldForm::slope)
      return made_of(keep_slope(t, curve_of(node), bits, fresh_seed(t.device())), "slope, " + bits_text(bits));
    if (row.form == FieldForm::exp) return made_of(keep_exp(t, bits, fresh_seed(t.device())), "exp, " + bits_text(bits));
    return code(t, bits, local);
  }

  /// Is the input whose gradient reads the field a parameter?
  static bool is_read_for_a_parameter(const Node& node, const FieldRow& row) {
    const auto edge = static_cast<size_t>(row.edge);
    return row.edge >= 0 && edge < node.num_outputs() && parameter_behind(node.next_edge(edge).function.get()) != nullptr;
  }

  Made normed(Node& node, const FieldRow& row, const at::Tensor& t) {
    const at::Tensor scale = row.scale(node)->unpack(node.getptr()).detach();
    if (scale.numel() == 0) {  // running statistics: only the weight's gradient reads the input
      return options_.local == 32 ? Made{nullptr, "32 bits"} : code(t, options_.local, true);
    }
    const int64_t values = t.numel() / scale.numel();
    const int bits = row.role == FieldRole::local && values >= kManyValues ? options_.local : options_.flow;
    if (bits == 32) return {nullptr, "32 bits"};
    // Where every block lies within one statistic's values a code of these has the same noise, measured by their σ, as one of the normed.
    if (t.is_contiguous() && scale.dim() > 1 && values % kCodeBlock == 0) return code(t, bits, false);
    const at::Tensor mean = row.mean == nullptr ? at::Tensor() : row.mean(node)->unpack(node.getptr()).detach();
    return made_of(keep_normed(t, mean, scale, bits, fresh_seed(t.device())), bits_text(bits));
  }

  /// How many places an index points to; −1: not known.
  static int64_t places_of(Node& node, const FieldRow& row) {
    if (row.places != nullptr) return row.places(node);
    if (row.of == nullptr || (row.last == 0 && row.dim == nullptr)) return -1;
    const std::optional<at::Tensor> whole = row.of(node)->get_raw_data();
    if (!whole || !whole->defined()) return -1;
    if (row.last == 0) return whole->dim() == 0 ? 1 : whole->size(row.dim(node));
    return c10::multiply_integers(whole->sizes().slice(static_cast<size_t>(std::max<int64_t>(0, whole->dim() - row.last))));
  }

  static Made index(Node& node, const FieldRow& row, const at::Tensor& t) {
    const int64_t places = t.scalar_type() == at::kLong ? places_of(node, row) : -1;
    if (places < 0) return {};
    const int64_t most = std::max<int64_t>(0, places - 1);
    return made_of(keep_index(t, most), "index, " + bits_text(static_cast<int>(std::bit_width(static_cast<uint64_t>(most)))));
  }

  PackingOptions options_;
  FieldNames names_;
  PackingMeter meter_;
  SharedCodes shared_;
  uint64_t first_ = 0;
  std::unordered_set<uint64_t> visited_;
  std::unordered_set<const void*> told_;  // memory of the node that is looked at
};

/// The guards of a thread, the innermost last, and the callback that serves them.
struct PackingThread {
  std::vector<Packing::Walk*> guards;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  bool at_work = false;  // torch's functions are called below

  static PackingThread& current() { return step_context().part<PackingThread>(); }

  void visit(const at::Tensor& t) const {
    if (t.defined() && t.requires_grad() && !t.is_leaf()) guards.back()->visit(t.grad_fn());
  }

  void after_function(const at::RecordFunction& function) {
    if (guards.empty() || at_work) return;  // of torch's own threads, which inherit the callback, no one has a guard
    at_work = true;
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    try {
      for (const c10::IValue& out : function.outputs()) {
        if (out.isTensor()) visit(out.toTensor());
        if (!out.isTensorList()) continue;
        for (const at::Tensor& t : out.toTensorVector()) visit(t);
      }
    } catch (const std::exception& e) {
      TORCH_WARN_ONCE("[packing] a function's saves stay exact: ", e.what());
    }
    at_work = false;
  }

  void enter(Packing::Walk* walk) {
    if (guards.empty()) {
      callback = at::addThreadLocalCallback(
          at::RecordFunctionCallback([](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
                                     [](const at::RecordFunction& f, at::ObserverContext*) { current().after_function(f); })
              .needsOutputs(true)
              .scopes({at::RecordScope::FUNCTION}));
    }
    guards.push_back(walk);
    walk->begin();
  }

  void leave(Packing::Walk* walk) {
    if (std::erase(guards, walk) == 0) return;
    if (guards.empty()) {
      at::removeCallback(std::exchange(callback, at::INVALID_CALLBACK_HANDLE));
    } else {
      guards.back()->begin();  // what the inner one left exact stays so
    }
  }
};

Packing::Packing(PackingOptions options) {
  check_options(options);
  walk_ = std::make_unique<Walk>(std::move(options));
  PackingThread::current().enter(walk_.get());
}

Packing::~Packing() { stop(); }

void Packing::stop() { PackingThread::current().leave(walk_.get()); }

const PackingReport& Packing::report() const { return walk_->report; }

}  // namespace satchel
