// The only file that includes the declarations of all of torch's autograd nodes.
#include "satchel/autograd/packing_fields.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
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
  if (const auto* n = as<generated::EluBackward0>(node)) return {Curve::elu, number(n->alpha), number(n->scale), number(n->input_scale)};
  if (const auto* n = as<generated::SoftplusBackward0>(node)) return {Curve::softplus, number(n->beta)};
  if (as<generated::SigmoidBackward0>(node) != nullptr) return {Curve::sigmoid};
  if (as<generated::TanhBackward0>(node) != nullptr) return {Curve::tanh};
  if (const auto* n = as<generated::HardtanhBackward0>(node)) return {Curve::hardtanh, number(n->min_val), number(n->max_val)};
  if (as<generated::HardsigmoidBackward0>(node) != nullptr) return {Curve::hardsigmoid};
  return {};
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
