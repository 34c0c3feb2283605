// Max-pool of N×C×H×W maps in channels_last order: the output and, in as few bits as the window needs, where in its window each maximum
// stood. CUDA only; float32, bfloat16 or float16. Values, ties and NaN as torch's max_pool2d has them. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace satchel {

/// Height first, then width; every number valid as torch's max_pool2d checks it.
struct MaxPoolWindow {
  std::array<int64_t, 2> kernel, stride, padding{0, 0}, dilation{1, 1};
  bool ceil_mode = false;

  int64_t places() const { return kernel[0] * kernel[1]; }
};

/// Does the kernel serve x? Four dimensions, CUDA, at least one value, windows of at most 256 places and an output of at least one value.
bool fuses_max_pool(const at::Tensor& x, const MaxPoolWindow& window);

struct MaxPoolResult {
  at::Tensor y;        // channels_last
  at::Tensor offsets;  // uint8: one little-endian bit stream, y's values in memory order, pool_offset_bits() each
};
/// x in channels_last order, or of any strides (then it is copied once).
MaxPoolResult max_pool_encode(const at::Tensor& x, const MaxPoolWindow& window);

/// The gradient of x, of the sizes `input`, channels_last; g is y's. Every value gathers from the windows it is in, always in one order.
at::Tensor max_pool_back(const at::Tensor& g, const at::Tensor& offsets, at::IntArrayRef input, const MaxPoolWindow& window);

/// Bits of one offset.
int pool_offset_bits(const MaxPoolWindow& window);

}  // namespace satchel
