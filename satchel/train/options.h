// The ranges of a run's options, and its device.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <string>
#include <string_view>

#include "satchel/train/train.h"

namespace satchel {

/// Throws `[train] rule, got value` unless what all runs have is in its range.
void validate_run(const RunOptions& options);
/// … and what runs on graphs have. Features and classes are the data's.
void validate(const TrainOptions& options);

/// Is it "cuda" or "cuda:N"?
inline bool names_cuda(std::string_view device) { return device == "cuda" || device.starts_with("cuda:"); }

/// "cpu", "cuda" (the first GPU) or "cuda:N"; throws `[op] …` where there is no such device.
at::Device device_of(const std::string& name, const char* op = "train");

/// Should steps be replayed from a CUDA graph? As asked for, else on CUDA.
inline bool wants_cuda_graph(const TrainOptions& options) { return options.cuda_graph.value_or(names_cuda(options.device)); }

/// While it lives, a CUDA device is this thread's current one, then the one before. The CPU changes nothing.
class CurrentDevice {
 public:
  explicit CurrentDevice(at::Device device) {
    if (device.is_cuda()) guard_.reset_device(device);
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

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
