// The only file that includes the declarations of all of torch's autograd nodes.
#include "satchel/autograd/packing_fields.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "policy_rows.h"

namespace satchel {
namespace {

namespace generated = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

/// Nodes come and go with torch's versions: the table's are declared, and may have no definition.
template <class T>
concept Known = requires {
  sizeof(T);
};

template <Known N>
const std::type_info* type_of(int) {
  return &typeid(N);
}
template <class N>
const std::type_info* type_of(...) {
  return nullptr;
}

template <class N, class Get>
SavedField field_of(Get) {
  if constexpr (Known<N>) {
    if constexpr (std::is_invocable_r_v<SavedVariable*, Get, N&>) return [](Node& node) { return Get{}(static_cast<N&>(node)); };
  }
  return nullptr;
}

double number(const at::Scalar& s) { return s.toDouble(); }
[[maybe_unused]] double number(double x) { return x; }

/// Places that an index points to: a number that the node holds, or the size of its dimension `dim`.
int64_t places_of(const c10::SymInt& size, int64_t) { return size.maybe_as_int().value_or(-1); }
int64_t places_of(const std::vector<c10::SymInt>& sizes, int64_t dim) {
  if (sizes.empty()) return 1;
  return sizes[static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim)].maybe_as_int().value_or(-1);
}
template <class N>
int64_t dim_of(const N& n) {
  if constexpr (requires { int64_t{n.dim}; }) return n.dim;
  return 0;
}

/// Null where this torch's node has no such member.
template <class N, class Get>
NodeNumber number_of(Get) {
  if constexpr (Known<N>) {
    if constexpr (std::is_invocable_r_v<int64_t, Get, const N&>) return [](const Node& node) { return Get{}(static_cast<const N&>(node)); };
  }
  return nullptr;
}

/// A condition that cannot be asked is never fulfilled: the field stays exact.
template <class N, class Test>
bool (*test_of(Test))(const Node&) {
  if constexpr (Known<N>) {
    if constexpr (std::is_invocable_r_v<bool, Test, const N&>) {
      return [](const Node& node) { return Test{}(static_cast<const N&>(node)); };
    }
  }
  return [](const Node&) { return false; };
}

#define TYPE(node) type_of<generated::node>(0)
#define SAVED(node, field) field_of<generated::node>([](auto& n) -> decltype(&n.field##_) { return &n.field##_; })
#define SIZE(node, member) \
  number_of<generated::node>([](const auto& n) -> decltype(places_of(n.member, 0)) { return places_of(n.member, dim_of(n)); })
#define DIM(node) number_of<generated::node>([](const auto& n) -> decltype(n.dim) { return n.dim; })
#define IF(node, test) test_of<generated::node>([](const auto& n) -> decltype(test) { return test; })

const std::vector<FieldRow>& table() {
  static const std::vector<FieldRow> rows{SATCHEL_POLICY_ROWS};
  return rows;
}

template <class N>
const N* as(const Node& node) {
  return typeid(node) == typeid(N) ? static_cast<const N*>(&node) : nullptr;
}

template <class... Nodes>
std::unordered_set<std::type_index> types_of() {
  return {std::type_index(typeid(Nodes))...};
}

/// ELU's and CELU's. Below 0 the slope falls from `most` on; no value has a slope between the two ends where that is less than above 0.
CurveOf elu_of(double most, double scale, double inner) {
  return most < scale || inner <= 0 ? CurveOf{} : CurveOf{Curve::elu, most, scale, inner};
}

CurveOf cut_off_of(double end, double unit, const SavedVariable& saved, const SavedVariable& target) {
  const std::optional<at::Tensor> x = saved.get_raw_data(), y = target.get_raw_data();  // none where another's hooks hold it
  if (end <= 0 || !x || !y || x->sizes() != y->sizes()) return {};
  return {Curve::cut_off, end, unit, 0, y->detach()};
}

CurveOf loss_curve_of(const Node& node) {
  if (as<generated::BinaryCrossEntropyWithLogitsBackward0>(node) != nullptr) {
    // The target's gradient is linear in x, not in sigmoid(x).
    return node.num_outputs() > 1 && node.next_edge(1).is_valid() ? CurveOf{} : CurveOf{Curve::logits};
  }
  if (const auto* n = as<generated::SmoothL1LossBackward0>(node)) return cut_off_of(n->beta, n->beta, n->self_, n->target_);
  if (const auto* n = as<generated::HuberLossBackward0>(node)) return cut_off_of(n->delta, 1, n->self_, n->target_);
  return {};
}

}  // namespace

std::span<const FieldRow> field_rows() { return table(); }

std::span<const FieldRow* const> rows_of(const Node& node) {
  using Rows = std::unordered_map<std::type_index, std::vector<const FieldRow*>>;
  static const Rows by_type = [] {
    Rows all;
    for (const FieldRow& row : table()) {
      if (row.type != nullptr && row.saved != nullptr) all[*row.type].push_back(&row);
    }
    for (auto& [type, rows] : all) std::ranges::stable_partition(rows, [](const FieldRow* r) { return r->form == FieldForm::index; });
    return all;
  }();
  const auto found = by_type.find(typeid(node));
  return found == by_type.end() ? std::span<const FieldRow* const>() : found->second;
}

CurveOf curve_of(const Node& node) {
  if (const auto* n = as<generated::GeluBackward0>(node)) return {n->approximate == "tanh" ? Curve::gelu_tanh : Curve::gelu};
  if (as<generated::SiluBackward0>(node) != nullptr) return {Curve::silu};
  if (as<generated::MishBackward0>(node) != nullptr) return {Curve::mish};
  if (as<generated::HardswishBackward0>(node) != nullptr) return {Curve::hardswish};
  if (const auto* n = as<generated::EluBackward0>(node)) {
    const double scale = number(n->scale), inner = number(n->input_scale);
    return elu_of(number(n->alpha) * scale * inner, scale, inner);
  }
  if (const auto* n = as<generated::CeluBackward0>(node)) return elu_of(1, 1, 1 / number(n->alpha));
  if (const auto* n = as<generated::SoftplusBackward0>(node)) {
    const bool step = std::exp(-number(n->threshold)) > 0x1p-23;  // beyond the threshold the slope is 1, and none lies between
    return step ? CurveOf{} : CurveOf{Curve::softplus, number(n->beta)};
  }
  if (as<generated::SigmoidBackward0>(node) != nullptr) return {Curve::sigmoid};
  if (as<generated::TanhBackward0>(node) != nullptr) return {Curve::tanh};
  if (const auto* n = as<generated::HardtanhBackward0>(node)) return {Curve::hardtanh, number(n->min_val), number(n->max_val)};
  if (as<generated::HardsigmoidBackward0>(node) != nullptr) return {Curve::hardsigmoid};
  if (const auto* n = as<generated::ClampBackward1>(node)) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    return {Curve::clamp, n->min ? number(*n->min) : -infinity, n->max ? number(*n->max) : infinity};
  }
  if (const auto* n = as<generated::PowBackward0>(node)) {  // backward reads x and x²
    const double exponent = number(n->exponent);
    return {exponent == 2 ? Curve::square : exponent == 3 ? Curve::cube : Curve::none};
  }
  return loss_curve_of(node);
}

bool is_view_or_cast(const Node& node) {
  using namespace generated;
  static const auto types = types_of<TBackward0, ViewBackward0, UnsafeViewBackward0, TransposeBackward0, PermuteBackward0, ToCopyBackward0,
                                     ExpandBackward0, ReshapeAliasBackward0, UnsqueezeBackward0, SqueezeBackward0, SqueezeBackward1,
                                     SliceBackward0, SelectBackward0, SplitBackward0, ChunkBackward0, AliasBackward0>();
  return types.contains(typeid(node));
}

bool is_cast(const Node& node) { return typeid(node) == typeid(generated::ToCopyBackward0); }

}  // namespace satchel
