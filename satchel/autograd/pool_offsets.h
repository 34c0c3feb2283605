// Where in its window each maximum of a max-pool stood. Private to the room.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/core/saved.h"
#include "satchel/tensor/pack.h"

namespace satchel {

/// Numbers of two or three spatial dimensions.
struct PoolWindow {
  std::vector<int64_t> kernel, stride, padding, dilation;
  bool ceil_mode = false;
};

class PoolOffsets {
 public:
  /// max-pool of x, N×C×spatial in channels_last order; keeps the offsets.
  at::Tensor pool(const at::Tensor& x, const PoolWindow& window);
  /// The gradient of x for g, that of the output, both in channels_last order.
  at::Tensor gradient(const at::Tensor& g) const;

  SavedTensor line(const std::string& name) const;
  void release();

 private:
  PoolWindow window_;
  std::vector<int64_t> sizes_, out_;  // of x and of the output
  at::Tensor fused_;                  // as the CUDA kernel of tensor/pool.h writes them; else
  Narrowed narrowed_;                 // N×spatial×C
};

}  // namespace satchel
