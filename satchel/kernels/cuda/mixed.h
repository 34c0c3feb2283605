// Mixed bits on CUDA: what kernels/cpu/mixed.h does, to the byte, without the host ever knowing a sample's bits. Raw device pointers and a
// stream in, checked launches out. Where CMake found no CUDA, none.cpp stands in and everything throws.
#pragma once

#include <cstdint>

#include "satchel/core/mixed.h"
#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Extremes of every block, as F32Header, and ‖R_n‖² of every sample.
void mixed_measure(const MixedCode&, const void* x, DType, F32Header* ranges, double* squares, StreamHandle);
/// ‖R_n‖² from extremes that stand already.
void mixed_squares(const MixedCode&, const F32Header* ranges, double* squares, StreamHandle);
/// The samples' shares into `bytes`; `weights` may be null. One thread block.
void mixed_share(const MixedCode&, const double* squares, const float* weights, uint8_t* bytes, StreamHandle);
/// Codes and headers; the shares stand in `bytes`, which starts at a multiple of 16.
void mixed_encode(const MixedCode&, const void* x, DType, const uint64_t* seed, const F32Header* ranges, uint8_t* bytes, StreamHandle);
/// Samples [first, last) into x.
void mixed_decode(const MixedCode&, const uint8_t* bytes, void* x, DType, int64_t first, int64_t last, StreamHandle);

}  // namespace satchel::cuda
