// The loss scale of training in float16: small gradients are lifted out of its underflow. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "satchel/train/image_train.h"

namespace satchel {

/// torch.amp.GradScaler's rule, all on the device: nothing in it waits for the GPU. A gradient with an infinity or NaN leaves the step
/// out: the optimizer is told by found().
class LossScaler {
 public:
  LossScaler(const LossScale& options, at::Device device);

  /// loss · scale, which backward starts from.
  at::Tensor scaled(const at::Tensor& loss) const;
  /// Divides gradients by the scale in place, and notes whether one of their numbers is not finite.
  void unscale_(std::vector<at::Tensor> gradients);
  /// float32[1], as torch's fused optimizers read it: 1 where the last unscale_() saw something that is not finite, else 0.
  const at::Tensor& found() const { return found_; }
  /// The scale of the next step, and one more skipped step where there was one.
  void update();

  /// float32[1]: what the next loss is multiplied with; update() changes it in place.
  const at::Tensor& factor() const { return scale_; }
  double scale() const;     // waits for the device
  int64_t skipped() const;  // steps left out so far; waits for the device

  /// "scale", "growth", "skipped": what a checkpoint holds.
  std::map<std::string, at::Tensor> state() const;
  /// Throws `[resume] …` unless names and shapes are those of state().
  void restore(const std::map<std::string, at::Tensor>& state);

 private:
  LossScale options_;
  at::Tensor scale_, growth_, found_, skipped_;  // float32[1], int32[1], float32[1], int64[1]
};

}  // namespace satchel
