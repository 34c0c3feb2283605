// Convolutions and transposed convolutions in one, two and three dimensions that keep their input packed for the gradient of the weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel {

class SharedGradient;

/// As torch::convolution takes them; lists have one number, or one a spatial dimension.
struct ConvOptions {
  std::vector<int64_t> stride{1}, padding{0}, dilation{1}, output_padding{0};
  bool transposed = false;
  int64_t groups = 1;
};

/// x is N×C×spatial, or C×spatial; weight and bias as torch's (undefined: no bias). The result lies in channels_last order. x is kept only
/// where the weight needs a gradient. Under autocast input and weight are cast as torch casts them; gradients have the types of what they
/// are gradients of. Without autocast the weight is cast to x's type. `x_gradient`: x is a residual block's input, and this is where its
/// gradients meet (shared_gradient.h); null: autograd adds them up.
at::Tensor conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}, const ConvOptions& options = {},
                const SavePolicy& saving = {}, const std::shared_ptr<SharedGradient>& x_gradient = nullptr);

/// The same, where parts of the batch are computed as often as they are asked for: `out` has sizes and history, and no memory. x is
/// N×C×spatial, some gradient is recorded, and the method is none of torch's own functions.
struct ConvParts {
  at::Tensor out;
  std::function<at::Tensor(int64_t first, int64_t last)> samples = {};
};
ConvParts conv_parts(const at::Tensor& x, const at::Tensor& weight, const ConvOptions& options, const SavePolicy& saving);
/// The sizes of such a convolution's result.
std::vector<int64_t> conv_sizes(const at::Tensor& x, const at::Tensor& weight, const ConvOptions& options);

}  // namespace satchel
