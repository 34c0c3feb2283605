// The ranges of a run's options, and its device.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <string>

#include "satchel/train/train.h"

namespace satchel {

/// Throws `[train] rule, got value` unless every number is in its range. Features and classes are the data's.
void validate(const TrainOptions& options);

/// "cpu" or "cuda"; throws where there is no such device.
at::Device device_of(const std::string& name);

/// While it lives, torch's products of float32 matrices are in TF32 or not, as the options say for a run on CUDA, and those of float16
/// matrices add up in float32 alone; then as before. All threads': torch has one setting.
class Tf32Guard {
 public:
  explicit Tf32Guard(const TrainOptions& options);
  ~Tf32Guard();
  Tf32Guard(const Tf32Guard&) = delete;
  Tf32Guard& operator=(const Tf32Guard&) = delete;

 private:
  bool cuda_, before_ = false;
  at::CuBLASReductionOption half_before_ = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
};

}  // namespace satchel
