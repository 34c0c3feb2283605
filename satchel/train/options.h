// The ranges of a run's options, and its device.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "satchel/train/train.h"

namespace satchel {

/// Throws `[train] rule, got value` unless every number is in its range. Features and classes are the data's.
void validate(const TrainOptions& options);

/// "cpu" or "cuda"; throws where there is no such device.
at::Device device_of(const std::string& name);

}  // namespace satchel
