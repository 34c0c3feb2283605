#include "satchel/tensor/pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/pool.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/device.h"

namespace satchel {
namespace {

constexpr const char* kOp = "max_pool";
constexpr int64_t kMostPlaces = 256;

/// Windows along a dimension as torch counts them: with ceil_mode the last may hang over, but it starts on the map or before it.
int64_t windows_of(int64_t size, const MaxPoolWindow& w, size_t d) {
  const int64_t room = size + 2 * w.padding[d] - w.dilation[d] * (w.kernel[d] - 1) - 1 + (w.ceil_mode ? w.stride[d] - 1 : 0);
  if (room < 0) return 0;
  const int64_t count = room / w.stride[d] + 1;
  return w.ceil_mode && (count - 1) * w.stride[d] >= size + w.padding[d] ? count - 1 : count;
}

/// Numbers that do not fit become such as do not fit the kernel either.
int number(int64_t n) { return static_cast<int>(std::clamp<int64_t>(n, -1, std::numeric_limits<int>::max())); }

cuda::PoolSide side_of(int64_t size, const MaxPoolWindow& w, size_t d) {
  return {number(size),        number(windows_of(size, w, d)), number(w.kernel[d]),
          number(w.stride[d]), number(w.padding[d]),           number(w.dilation[d])};
}

cuda::MaxPool pool_of(at::IntArrayRef sizes, const MaxPoolWindow& w) {
  return {sizes[0], sizes[1], side_of(sizes[2], w, 0), side_of(sizes[3], w, 1), pool_offset_bits(w)};
}

/// Contiguous in channels_last order. Strides of maps with a single value a channel or a single channel tell no order: both do.
at::Tensor in_order(const at::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }

at::Tensor empty_maps(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().memory_format(at::MemoryFormat::ChannelsLast));
}

}  // namespace

int pool_offset_bits(const MaxPoolWindow& window) { return bits_needed(0, window.places() - 1); }

bool fuses_max_pool(const at::Tensor& x, const MaxPoolWindow& w) {
  const bool floats = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!x.is_cuda() || !floats || x.dim() != 4 || x.numel() == 0 || x.layout() != at::kStrided) return false;
  const bool small = w.kernel[0] >= 1 && w.kernel[1] >= 1 && w.kernel[0] <= kMostPlaces && w.kernel[1] <= kMostPlaces;
  return small && w.stride[0] >= 1 && w.stride[1] >= 1 && w.places() <= kMostPlaces && cuda::max_pool_fits(pool_of(x.sizes(), w));
}

MaxPoolResult max_pool_encode(const at::Tensor& x, const MaxPoolWindow& window) {
  const Place place(x.device(), kOp);
  const cuda::MaxPool pool = pool_of(x.sizes(), window);
  const at::Tensor maps = in_order(x);
  MaxPoolResult result;
  result.y = empty_maps({pool.samples, pool.channels, pool.height.out, pool.width.out}, x);
  result.offsets = at::empty({code_bytes(result.y.numel(), pool.bits)}, x.options().dtype(at::kByte).memory_format(c10::nullopt));
  cuda::max_pool(pool, maps.const_data_ptr(), dtype_of(x.scalar_type()), result.y.mutable_data_ptr(),
                 result.offsets.mutable_data_ptr<uint8_t>(), place.stream());
  return result;
}

at::Tensor max_pool_back(const at::Tensor& g, const at::Tensor& offsets, at::IntArrayRef input, const MaxPoolWindow& window) {
  const Place place(g.device(), kOp);
  const cuda::MaxPool pool = pool_of(input, window);
  const int64_t out[] = {pool.samples, pool.channels, pool.height.out, pool.width.out};
  if (g.sizes() != at::IntArrayRef(out)) fail(kOp, "the gradient must have the output's sizes", g.sizes());
  const at::Tensor given = in_order(g), dx = empty_maps(input, g);
  cuda::max_pool_back(pool, given.const_data_ptr(), dtype_of(g.scalar_type()), offsets.const_data_ptr<uint8_t>(), dx.mutable_data_ptr(),
                      place.stream());
  return dx;
}

}  // namespace satchel
