// Codes of slopes (core/slope.h): 2^bits levels that rise, one little-endian bit stream, no headers. Values come back from a table of as
// many.
#pragma once

#include <cstdint>

#include "satchel/core/number.h"
#include "satchel/core/slope.h"

namespace satchel {

/// Codes of values [first, last), first a multiple of 8.
void slope_encode(SlopeOf, const void* x, DType, const float* levels, int bits, uint64_t seed, uint8_t* codes, int64_t first, int64_t last);
/// x[i] = table[code i] for the same range.
void table_decode(const uint8_t* codes, int bits, const float* table, void* x, DType, int64_t first, int64_t last);

namespace cuda {
/// All of them, on a stream (an opaque cudaStream_t); `levels` and `table` are on the device.
void slope_encode(SlopeOf, const void* x, DType, int64_t values, const float* levels, int bits, const uint64_t* seed, uint8_t* codes,
                  void* stream);
void table_decode(const uint8_t* codes, int64_t values, int bits, const float* table, void* x, DType, void* stream);
}  // namespace cuda

}  // namespace satchel
