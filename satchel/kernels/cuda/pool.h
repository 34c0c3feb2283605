// Max-pool of maps in channels_last order (samples × height × width × channels), with the offset of each maximum in its window packed:
//
//   window of 3 × 2      0 1      offset = row·columns + column, bits = ⌈log2(3·2)⌉ = 3
//                        2 3
//                        4 5      one little-endian bit stream of y's values in memory order: 8 values are `bits` whole bytes
//
// Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Along one dimension: place k of window o is value o·stride − padding + k·dilation.
struct PoolSide {
  int size, out;  // values, windows
  int kernel, stride, padding, dilation;
};

struct MaxPool {
  int64_t samples, channels;
  PoolSide height, width;
  int bits;  // of an offset, 0 to 8
};

/// Fits: windows of at most 256 places that `bits` hold, and sizes below 2^30.
bool max_pool_fits(const MaxPool&);

/// y and the offsets, all bytes of them. The first of equal values wins, the last NaN wins over everything, as in torch.
void max_pool(const MaxPool&, const void* x, DType, void* y, uint8_t* offsets, StreamHandle);

/// dx, every value of it: the sum of g over the windows whose maximum it was, in fp32 and in their order.
void max_pool_back(const MaxPool&, const void* g, DType, const uint8_t* offsets, void* dx, StreamHandle);

}  // namespace satchel::cuda
