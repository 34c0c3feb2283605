// Who says how many bits a save gets, where bits are allocated by sample and by layer (docs/theory.md 5). Layers ask in forward and tell in
// backward; the answers come from the steps before. satchel/plan/bit_allocator.h is the one implementation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace satchel {

/// What one save of a layer is given.
struct BitAllocation {
  double mean_bits = 2;  // over its samples
  at::Tensor weights;    // float32[samples] on the save's device, s_n; undefined: all alike
  int64_t layer = -1;    // what the gradient is told under; −1: nobody asks
  int64_t count = 0;     // image(): samples of 3 bits, the others have 2
  at::Tensor slots =
      {};  // image(): int32[samples] on the save's device, 0 … count − 1 for those, −1 for the others; undefined: none or all
};

class BitAllocator {
 public:
  virtual ~BitAllocator() = default;

  /// The input of `layer` is saved: `samples` of `values` values each, `mean_bits` where nothing is known yet.
  virtual BitAllocation input(const std::string& layer, int64_t samples, int64_t values, double mean_bits, at::Device device) = 0;

  /// A norm's input is saved: the mean bits of the layer before it.
  virtual double norm(int64_t values, double mean_bits) = 0;

  /// An image that layers share is saved (mean_bits=): `samples` of `values` values each, 2 or 3 bits, `mean_bits` over all such images.
  virtual BitAllocation image(const std::string& layer, int64_t samples, int64_t values, double mean_bits, at::Device device) = 0;

  /// Will saw_gradient() of this layer be read? Else the norms of its gradient need not be taken.
  virtual bool wants_gradient(int64_t layer) const = 0;

  /// Backward of `layer`: `squares` float32[samples], K/groups times the squared norm of each sample's output gradient, once for each
  /// layer that reads the input; `ranges` float64[samples], ‖R_n‖² of what was saved;
  /// C_n = factor·ranges·squares, of an image the variance that the third bit takes away. Both stay on their device, and nothing waits for
  /// them.
  virtual void saw_gradient(int64_t layer, const at::Tensor& squares, const at::Tensor& ranges, double factor) = 0;
};

}  // namespace satchel
