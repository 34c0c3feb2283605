// Cross entropy of every pixel, from logits of a lower resolution.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace satchel {

struct PixelLossOptions {
  int64_t classes = 21;
  int64_t ignored = 255;   // the label of pixels that do not count
  double aux = 0.5;        // weight of the losses of further heads
  at::Tensor weights{};    // float32[classes] on the logits' device: of classes; undefined: 1 each
  bool torch_own = false;  // by torch's functions, which keep the large logits (the baseline)
};

/// Logits, batch × heads·classes × h × w, are brought bilinearly to the size of the labels, uint8 batch × height × width, and the mean
/// cross entropy of the pixels that count is taken, weighted as torch's; the first head's plus `aux` times that of each further one. Kept
/// is the gradient of the small logits alone, exactly: a few images at a time, the large ones and their gradients come and go within the
/// call. Where no pixel counts the loss is 0. A label that is neither a class nor ignored is an error on the CPU.
at::Tensor pixel_loss(const at::Tensor& logits, const at::Tensor& labels, const PixelLossOptions& options,
                      const std::string& name = "loss");

}  // namespace satchel
