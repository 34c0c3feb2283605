#include "satchel/autograd/pool_offsets.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices_backward.h>

#include <functional>
#include <numeric>

#include "satchel/autograd/input.h"
#include "satchel/tensor/pool.h"

namespace satchel {
namespace {

MaxPoolWindow plane(const PoolWindow& w) {
  const auto two = [](const std::vector<int64_t>& list) { return std::array<int64_t, 2>{list[0], list[1]}; };
  return {two(w.kernel), two(w.stride), two(w.padding), two(w.dilation), w.ceil_mode};
}

int64_t places(const PoolWindow& w) { return std::accumulate(w.kernel.begin(), w.kernel.end(), int64_t{1}, std::multiplies<>()); }

/// Where windows start in spatial dimension d, shaped to fit N×C×spatial.
at::Tensor starts(const PoolWindow& w, size_t d, at::IntArrayRef out, at::Device device) {
  std::vector<int64_t> shape(out.size(), 1);
  shape[d + 2] = out[d + 2];
  return at::arange(out[d + 2], at::TensorOptions().dtype(at::kLong).device(device)).mul_(w.stride[d]).sub_(w.padding[d]).view(shape);
}

/// torch's indices into a map's values as offsets in windows, row by row.
at::Tensor offsets_of(at::Tensor indices, const PoolWindow& w, at::IntArrayRef sizes) {
  at::Tensor offsets;
  int64_t step = 1;
  for (size_t d = w.kernel.size(); d-- > 0;) {
    const at::Tensor rest = at::div(indices, sizes[d + 2], "floor");
    const at::Tensor place = indices.sub(rest, sizes[d + 2]).sub_(starts(w, d, indices.sizes(), indices.device()));
    const at::Tensor part = w.dilation[d] == 1 ? place.mul_(step) : at::div(place, w.dilation[d], "floor").mul_(step);
    offsets = offsets.defined() ? offsets.add_(part) : part;
    step *= w.kernel[d];
    indices = rest;
  }
  return offsets;
}

/// And back.
at::Tensor indices_of(at::Tensor offsets, const PoolWindow& w, at::IntArrayRef sizes) {
  at::Tensor indices;
  int64_t step = 1;
  for (size_t d = w.kernel.size(); d-- > 0;) {
    const at::Tensor rest = at::div(offsets, w.kernel[d], "floor");
    const at::Tensor place = offsets.sub(rest, w.kernel[d]).mul_(w.dilation[d]);
    const at::Tensor part = place.add_(starts(w, d, offsets.sizes(), offsets.device())).mul_(step);
    indices = indices.defined() ? indices.add_(part) : part;
    step *= sizes[d + 2];
    offsets = rest;
  }
  return indices;
}

}  // namespace

at::Tensor PoolOffsets::pool(const at::Tensor& x, const PoolWindow& window) {
  window_ = window;
  sizes_ = x.sizes().vec();
  at::Tensor y, indices;
  if (x.dim() == 4 && fuses_max_pool(x, plane(window))) {
    MaxPoolResult result = max_pool_encode(x, plane(window));
    fused_ = std::move(result.offsets);
    out_ = result.y.sizes().vec();
    return result.y;
  }
  if (x.dim() == 4) {
    std::tie(y, indices) = at::max_pool2d_with_indices(x, window.kernel, window.stride, window.padding, window.dilation, window.ceil_mode);
  } else {
    std::tie(y, indices) = at::max_pool3d_with_indices(x, window.kernel, window.stride, window.padding, window.dilation, window.ceil_mode);
  }
  out_ = y.sizes().vec();
  narrowed_ = narrow(offsets_of(std::move(indices), window, sizes_).movedim(1, -1), 0, places(window) - 1);
  return y;
}

at::Tensor PoolOffsets::gradient(const at::Tensor& g) const {
  if (fused_.defined()) return max_pool_back(g, fused_, sizes_, plane(window_));
  const at::Tensor indices = indices_of(widen(narrowed_).movedim(-1, 1), window_, sizes_);
  const PoolWindow& w = window_;
  if (sizes_.size() == 4) {
    // Of the input torch reads sizes and order: the gradient's own memory has both.
    at::Tensor dx = empty_channels_last(sizes_, g.options());
    at::max_pool2d_with_indices_backward_out(dx, g, dx, w.kernel, w.stride, w.padding, w.dilation, w.ceil_mode, indices);
    return dx;
  }
  return in_channels_last(at::max_pool3d_with_indices_backward(g.contiguous(), sizes_only(sizes_, g.options()), w.kernel, w.stride,
                                                               w.padding, w.dilation, w.ceil_mode, indices.contiguous()));
}

SavedTensor PoolOffsets::line(const std::string& name) const {
  const int64_t values = std::accumulate(out_.begin(), out_.end(), int64_t{1}, std::multiplies<>());
  const int bits = fused_.defined() ? pool_offset_bits(plane(window_)) : narrowed_.bits;
  const at::Tensor& bytes = fused_.defined() ? fused_ : narrowed_.bytes;
  return {name, "offsets", out_, bits, bytes.numel(), 8 * values};  // torch keeps int64
}

void PoolOffsets::release() { *this = {}; }

}  // namespace satchel
