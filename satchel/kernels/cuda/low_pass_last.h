// DIVISION's two frequencies of channels_last maps: the very bytes that low_pass_encode gives for the same maps one after the
// other, from samples × height × width × channels without a copy in the other order.
#pragma once

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Windows of 8 over planes, 2 or 4 bits, even levels, one block a map, channels in multiples of 8, and maps that fit shared memory or are
/// multiples of 8 values in rows of multiples of 4. `x` is the channels_last tensor; all maps of whole samples. `scratch` holds
/// low_pass_last_scratch_bytes() bytes: 0 where x is read once.
bool low_pass_last_encodes(const LowPassShape&, const BlockCode&, int64_t channels, const void* x, DType);
int64_t low_pass_last_scratch_bytes(const LowPassShape&, int64_t channels, DType);
void low_pass_last_encode(const LowPassShape&, const BlockCode&, int64_t channels, const void* x, DType, const uint64_t* seed,
                          uint8_t* codes, void* headers, uint16_t* means, void* scratch, StreamHandle);

bool low_pass_last_decodes(const LowPassShape&, const BlockCode&, int64_t channels, const void* x, DType);
void low_pass_last_decode(const LowPassShape&, const BlockCode&, int64_t channels, const uint8_t* codes, const void* headers,
                          const uint16_t* means, void* x, DType, StreamHandle);

/// The low part alone, maps one after the other: means of x's windows, and x = the mean of its window.
void low_pass_means(const LowPassShape&, const void* x, DType, uint16_t* means, StreamHandle);
void low_pass_spread(const LowPassShape&, const uint16_t* means, void* x, DType, StreamHandle);

}  // namespace satchel::cuda
