// Pooling that keeps what backward reads and no more: max-pool where in its window each maximum stood, average pooling nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// As torch's pools take them. Lists have one number, or one a spatial dimension.
struct PoolOptions {
  std::vector<int64_t> kernel, stride = {} /* none: the kernel */, padding{0}, dilation{1} /* max_pool's */;
  bool ceil_mode = false;
  bool count_include_pad = true;  // avg_pool's, as the next
  std::optional<int64_t> divisor = {};
};

/// x is N×C×spatial in one to three spatial dimensions; C×spatial where the kernel has a number for each of them. Results lie in
/// channels_last order and have x's type.

/// Values, ties and NaN as torch's. Offsets take the fewest bits that the window needs. Of a ReLU's output in a shared method the result is
/// packed once for all layers that read it.
at::Tensor max_pool(const at::Tensor& x, const PoolOptions& options, const SavePolicy& saving = {});

at::Tensor avg_pool(const at::Tensor& x, const PoolOptions& options, const SavePolicy& saving = {});

/// One size, or one a spatial dimension; none: as x's.
at::Tensor adaptive_avg_pool(const at::Tensor& x, const std::vector<std::optional<int64_t>>& output_size, const SavePolicy& saving = {});

}  // namespace satchel
