// What a saved field is kept as. Each form gives back a tensor from which the node's own formula makes the same gradient: exactly (mask,
// inside, shape, index, flags, cast) or in the mean (code, normed, slope, exp). The C++ side of python/satchel/kept.py. Private to this
// room.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "satchel/autograd/packing_fields.h"

namespace satchel {

class KeptForm {
 public:
  virtual ~KeptForm() = default;
  virtual at::Tensor restore() const = 0;
  /// What it holds in memory; undefined: nothing.
  virtual at::Tensor bytes() const { return {}; }

  int64_t nbytes() const;
};
using KeptFormPtr = std::shared_ptr<const KeptForm>;

/// An unbiased code in blocks of 256: levels for normal values up to 4 bits, even ones above.
KeptFormPtr keep_code(const at::Tensor& x, int bits, const at::Tensor& seed);
constexpr int64_t kCodeBlock = 256;

/// A code of (x − mean)·scale, the values that a norm makes. mean may be undefined: 0. The node holds both anyway.
KeptFormPtr keep_normed(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& scale, int bits, const at::Tensor& seed);

/// x > 0 as one bit a value; comes back as 1 and 0. Of bool tensors too.
KeptFormPtr keep_mask(const at::Tensor& x);

/// Where a hardtanh, a hardsigmoid or a clamp has a slope; null where no number of the type lies between the ends.
KeptFormPtr keep_inside(const at::Tensor& x, const CurveOf& curve);

/// A code of what backward's formula is linear in: the activation's slope, y·(1 − y) and 1 − y² where the output is saved, a power's x or
/// x², a loss's sigmoid(x) or distance; null where no value has the coded slopes.
KeptFormPtr keep_slope(const at::Tensor& x, const CurveOf& curve, int bits, const at::Tensor& seed);

/// A code of exp(x).
KeptFormPtr keep_exp(const at::Tensor& x, int bits, const at::Tensor& seed);

/// Nothing at all: backward reads sizes, strides and type only.
KeptFormPtr keep_shape(const at::Tensor& x);

/// Integers from 0 to `most` in the fewest bits.
KeptFormPtr keep_index(const at::Tensor& x, int64_t most);

/// Nothing: x, a parameter in another type, is made of the parameter again.
KeptFormPtr keep_cast(const at::Tensor& x, const at::Tensor& parameter);

}  // namespace satchel
