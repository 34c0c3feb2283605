#include "satchel/tensor/order.h"

#include <variant>

#include "satchel/kernels/codec_layout.h"

namespace satchel {
namespace {

/// Do blocks and spans come out alike in memory order?
bool any_order_serves(const at::Tensor& x, const CodecSpec& spec) {
  if (std::holds_alternative<RandomProjection>(spec.transform)) return false;
  if (spec.bits == kKeep) return true;
  if (std::holds_alternative<LowPass>(spec.transform)) return is_channels_last(x);  // read as they lie, coded in the shape's order
  if (spec.block < 0) return false;
  // Samples are whole stretches of memory where the first dimension is the outermost.
  return !spec.per_sample || x.dim() == 0 || x.size(0) <= 1 || x.stride(0) == x.numel() / x.size(0);
}

}  // namespace

bool is_channels_last(const at::Tensor& x) { return x.dim() >= 3 && x.dim() <= 5 && x.movedim(1, -1).is_contiguous(); }

bool keeps_order(const at::Tensor& x, const CodecSpec& spec) {
  return x.is_contiguous() || (x.is_non_overlapping_and_dense() && any_order_serves(x, spec));
}

at::Tensor ordered(const at::Tensor& x, const CodecSpec& spec) {
  // A lazily negated or zero tensor has no values in its memory yet.
  const at::Tensor real = x._is_zerotensor() ? x.clone() : x.resolve_neg();
  return keeps_order(real, spec) ? real : real.contiguous();
}

std::vector<int64_t> strides_of(const at::Tensor& in_order) {
  return in_order.numel() == 0 ? contiguous_strides(in_order.sizes()) : in_order.strides().vec();
}

bool is_in_shape_order(at::IntArrayRef shape, at::IntArrayRef strides) {
  const std::vector<int64_t> expected = contiguous_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1 && strides[d] != expected[d]) return false;
  }
  return true;
}

int64_t inner_of(at::IntArrayRef shape, at::IntArrayRef strides, int64_t dim) {
  const auto d = static_cast<size_t>(dim);
  for (const int64_t size : shape) {
    if (size == 0) return 1;
  }
  return shape[d] == 1 ? 1 : strides[d];
}

}  // namespace satchel
