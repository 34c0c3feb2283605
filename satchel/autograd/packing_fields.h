// The policy table (python/satchel/policy.json) with what each row points to in torch's autograd nodes. Private to this room.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <typeinfo>

namespace satchel {

/// How a field is kept: policy.json, `keep`.
enum class FieldForm : uint8_t { code, normed, mask, inside, slope, exp, shape, index, flags };
/// Who reads it: policy.json, `role`.
enum class FieldRole : uint8_t { none, local, flow, attention };

/// A field of a node that is of the row's type.
using SavedField = torch::autograd::SavedVariable* (*)(torch::autograd::Node&);
/// A number that such a node holds.
using NodeNumber = int64_t (*)(const torch::autograd::Node&);

struct FieldRow {
  std::string_view node, field;
  FieldForm form;
  FieldRole role;
  int edge;                    // the input whose gradient reads the field, −1: not said; where that is a parameter the role is local
  bool weight;                 // coded only where it is computed and needs a gradient
  const std::type_info* type;  // null: this torch has no such node
  SavedField saved;            // null: … no such field
  SavedField of, mean, scale;  // null where the row names none
  int last;                    // index: counts through so many of the last dimensions of `of`; 0: through its dimension dim()
  NodeNumber places;           // index: how many places there are, −1: not known; null: `of` says so
  NodeNumber dim;              // null where `last` is not 0
  bool (*applies)(const torch::autograd::Node&);  // null: always
};

/// The table.
std::span<const FieldRow> field_rows();
/// The rows of a node's type. Indices come first: they are made while the tensor that they point into is there.
std::span<const FieldRow* const> rows_of(const torch::autograd::Node& node);

/// Functions whose nodes have slopes or ends to ask for.
enum class Curve : uint8_t {
  none,
  gelu,
  gelu_tanh,
  silu,
  mish,
  hardswish,
  elu,       // a: the slope at 0 from below, b: that above it, c: the input's scale
  softplus,  // a: β
  sigmoid,
  tanh,
  square,
  cube,
  logits,    // binary cross entropy's
  cut_off,   // smooth L1's and Huber's: linear in the distance to the target, up to a; b: what one is in units of the slope
  hardtanh,  // a, b: ends, which are out
  clamp,     // a, b: ends, which are in; ±∞ where there is none
  hardsigmoid
};
struct CurveOf {
  Curve curve = Curve::none;
  double a = 0, b = 0, c = 0;
  at::Tensor target = {};  // a loss's
};
/// none: of this node's case no value has the slopes that a code may take.
CurveOf curve_of(const torch::autograd::Node& node);

/// Functions that change no value of their input but its place or type: what lies behind them may be a parameter.
bool is_view_or_cast(const torch::autograd::Node& node);
bool is_cast(const torch::autograd::Node& node);

}  // namespace satchel
