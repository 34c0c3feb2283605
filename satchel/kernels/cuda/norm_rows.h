// The last step of a norm's gradient from values that stand decoded.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Three numbers a channel, float32.
struct ChannelLine {
  const float *scale, *along, *offset;
};

/// g = scale·g + along·x + offset, channel by channel, in place: rows × channels of f32, bf16 or f16, both of one type.
void norm_rows_back(void* g, const void* x, DType type, int64_t rows, int64_t channels, const ChannelLine& line, StreamHandle stream);

}  // namespace satchel::cuda
