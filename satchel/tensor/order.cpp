#include "satchel/tensor/order.h"

#include "satchel/kernels/codec_layout.h"

namespace satchel {
bool is_channels_last(const at::Tensor& x) { return x.dim() >= 3 && x.dim() <= 5 && x.movedim(1, -1).is_contiguous(); }

bool has_plain_rows(const at::Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1; }

at::Tensor with_plain_rows(const at::Tensor& x) { return x.dim() == 2 && has_plain_rows(x) ? x : x.contiguous(); }

bool keeps_order(const at::Tensor& x, const CodecSpec& spec) {
  return x.is_contiguous() || (x.is_non_overlapping_and_dense() && any_order_serves(x.sizes(), x.strides(), spec));
}

at::Tensor ordered(const at::Tensor& x, const CodecSpec& spec) {
  // A lazily negated or zero tensor has no values in its memory yet.
  const at::Tensor real = x._is_zerotensor() ? x.clone() : x.resolve_neg();
  return keeps_order(real, spec) ? real : real.contiguous();
}

std::vector<int64_t> strides_of(const at::Tensor& in_order) {
  return in_order.numel() == 0 ? contiguous_strides(in_order.sizes()) : in_order.strides().vec();
}

int64_t inner_of(at::IntArrayRef shape, at::IntArrayRef strides, int64_t dim) {
  const auto d = static_cast<size_t>(dim);
  for (const int64_t size : shape) {
    if (size == 0) return 1;
  }
  return shape[d] == 1 ? 1 : strides[d];
}

}  // namespace satchel
