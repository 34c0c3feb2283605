// How many values a GPU works on at a time, and from how many on it goes by parts: functions and the plan of a step read the same numbers.
#pragma once

#include <cstdint>

namespace satchel {

constexpr int64_t kSampleStretch = int64_t{32} << 20;  // values of samples decoded at a time, by a convolution
constexpr int64_t kRowStretch = int64_t{12} << 20;     // values of rows decoded at a time, by a linear layer or a norm of its own
constexpr int64_t kLargeLogits = int64_t{32} << 20;    // values of large logits at a time, but one image at least

/// From so many values on the gradient of a norm's input goes to the layer before in parts of the batch: at the end of a residual block it
/// would be the second tensor of the block's size.
constexpr int64_t kPartsFrom = int64_t{128} << 20;
/// From so many bytes on a sum's convolution is made by parts: it is computed twice then, which smaller ones are not worth.
constexpr int64_t kConvByPartsFrom = int64_t{512} << 20;

}  // namespace satchel
