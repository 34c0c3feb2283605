// Maps of other sizes: upsampling and padding. Both are linear in x and read nothing but sizes on the way back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// `linear` is torch's linear, bilinear or trilinear by the number of spatial dimensions; `cubic` its bicubic, of two.
enum class Resample : uint8_t { nearest, nearest_exact, linear, cubic, area };

/// Either sizes or factors; one number, or one a spatial dimension.
struct UpsampleOptions {
  std::vector<int64_t> size = {};
  std::vector<double> scale = {};
  Resample mode = Resample::nearest;
  bool align_corners = false;  // linear and cubic
};

/// As torch::nn::functional::interpolate of N×C×spatial, float32 under CUDA's autocast (but `area`). torch's own functions keep sizes only,
/// but for `area`, which is adaptive_avg_pool.
at::Tensor upsample(const at::Tensor& x, const UpsampleOptions& options, const SavePolicy& saving = {});

enum class PadMode : uint8_t { zeros, reflect, replicate, circular };

/// As torch::nn::functional::pad of N×C×spatial: two numbers a spatial dimension, the last one's first. torch's own reflection and
/// replication keep x; these keep its sizes.
at::Tensor pad(const at::Tensor& x, const std::vector<int64_t>& padding, PadMode mode, const SavePolicy& saving = {});

}  // namespace satchel
