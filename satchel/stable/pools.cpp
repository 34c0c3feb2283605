// Max-pool of images whose channels are innermost, with the offset of each maximum in its window packed (kernels/cuda/pool.h). CUDA only:
// elsewhere python/satchel/layer_functions.py packs torch's own indices to the same bytes.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "satchel/kernels/cuda/pool.h"
#include "satchel/stable/arguments.h"

namespace satchel::stable {
namespace {

/// `window`: kernel, stride, padding and dilation, height and width each, then whether the last window may hang over.
cuda::PoolSide side_of(int64_t size, const Numbers& window, size_t d) {
  const int64_t kernel = window[d], stride = window[2 + d], padding = window[4 + d], dilation = window[6 + d];
  const bool ceil = window[8] != 0;
  const int64_t room = size + 2 * padding - dilation * (kernel - 1) - 1 + (ceil ? stride - 1 : 0);
  int64_t count = room < 0 || stride < 1 ? 0 : room / stride + 1;
  if (ceil && count > 0 && (count - 1) * stride >= size + padding) --count;  // it starts on the map or before it
  return {static_cast<int>(size),   static_cast<int>(count),   static_cast<int>(kernel),
          static_cast<int>(stride), static_cast<int>(padding), static_cast<int>(dilation)};
}

cuda::MaxPool pool_of(const Numbers& shape, const Numbers& window, const char* op) {
  if (shape.size() != 4 || window.size() != 9) fail(op, "a shape has 4 numbers and a window 9", shape.size());
  for (const int64_t size : shape) {
    if (size < 1 || size >= int64_t{1} << 30) fail(op, "sizes must be 1 to 2^30", size);
  }
  for (size_t i = 0; i < 8; ++i) {
    if (window[i] < (i == 4 || i == 5 ? 0 : 1) || window[i] > 256)
      fail(op, "a window's numbers must be 1 to 256, its padding 0 or more", window[i]);
  }
  if (window[4] > window[0] / 2 || window[5] > window[1] / 2) fail(op, "padding must be at most half of the window", window[4]);
  int bits = 0;
  while (int64_t{1} << bits < window[0] * window[1]) ++bits;
  return {shape[0], shape[1], side_of(shape[2], window, 0), side_of(shape[3], window, 1), bits};
}

bool is_served(const cuda::MaxPool& pool) {
  return cuda::compiled() && pool.height.out > 0 && pool.width.out > 0 && pool.bits <= 8 && cuda::max_pool_fits(pool);
}

bool max_pool_fits(const Numbers& shape, const Numbers& window) { return is_served(pool_of(shape, window, "max_pool")); }

/// y, and the offsets' bytes.
std::tuple<Tensor, Tensor> max_pool(const Tensor& x, const Numbers& window) {
  constexpr const char* op = "max_pool";
  const DType type = dtype_of(x.scalar_type(), op);
  const Numbers shape = sizes_of(x);
  const cuda::MaxPool pool = pool_of(shape, window, op);
  if (!is_served(pool)) fail(op, "max_pool_fits must be true of sizes and window", x.numel());
  const Place place(x, op);
  const Numbers out = {shape[0], shape[1], pool.height.out, pool.width.out};
  const Tensor maps = in_strides(x, shape, rows_strides(shape)), y = empty_strided(x, out, rows_strides(out), x.scalar_type());
  const Tensor offsets = new_bytes(x, code_bytes(y.numel(), pool.bits));
  cuda::max_pool(pool, maps.const_data_ptr(), type, y.data_ptr(), static_cast<uint8_t*>(offsets.data_ptr()), place.stream());
  return {y, offsets};
}

Tensor max_pool_backward(const Tensor& g, const Tensor& offsets, const Numbers& shape, const Numbers& window) {
  constexpr const char* op = "max_pool_backward";
  const DType type = dtype_of(g.scalar_type(), op);
  const cuda::MaxPool pool = pool_of(shape, window, op);
  if (!is_served(pool)) fail(op, "max_pool_fits must be true of sizes and window", g.numel());
  const Numbers out = {shape[0], shape[1], pool.height.out, pool.width.out};
  if (sizes_of(g) != out) fail(op, "the gradient must have the output's sizes", g.numel());
  check_cuda(g, op);
  check_bytes(offsets, code_bytes(g.numel(), pool.bits), op, &g);
  const Place place(g, op);
  const Tensor given = in_strides(g, out, rows_strides(out)), dx = empty_strided(g, shape, rows_strides(shape), g.scalar_type());
  cuda::max_pool_back(pool, given.const_data_ptr(), type, static_cast<const uint8_t*>(offsets.const_data_ptr()), dx.data_ptr(),
                      place.stream());
  return dx;
}

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY_FRAGMENT(satchel_stable, m) {
  m.def("max_pool_fits(int[] shape, int[] window) -> bool");
  m.def("max_pool(Tensor x, int[] window) -> (Tensor, Tensor)");
  m.def("max_pool_backward(Tensor g, Tensor offsets, int[] shape, int[] window) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m) {
  m.impl("max_pool", TORCH_BOX(&satchel::stable::max_pool));
  m.impl("max_pool_backward", TORCH_BOX(&satchel::stable::max_pool_backward));
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) {
  m.impl("max_pool_fits", TORCH_BOX(&satchel::stable::max_pool_fits));
}
