// Bits per sample on CUDA: what kernels/cpu/per_sample.h does, to the byte, without the host ever knowing a sample's bits. Raw device
// pointers and a stream in, checked launches out. Where CMake found no CUDA, none.cpp stands in and everything throws.
#pragma once

#include <cstdint>

#include "satchel/core/per_sample.h"
#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Extremes of every block, as F32Header, and ‖R_n‖² of every sample.
void per_sample_measure(const PerSampleCode&, const void* x, DType, F32Header* ranges, double* squares, StreamHandle);
/// ‖R_n‖² from extremes that stand already.
void per_sample_squares(const PerSampleCode&, const F32Header* ranges, double* squares, StreamHandle);
/// The samples' shares into `bytes`; `weights` may be null. One thread block.
void per_sample_allocate(const PerSampleCode&, const double* squares, const float* weights, uint8_t* bytes, StreamHandle);
/// Codes and headers; the shares stand in `bytes`, which starts at a multiple of 16.
void per_sample_encode(const PerSampleCode&, const void* x, DType, const uint64_t* seed, const F32Header* ranges, uint8_t* bytes,
                       StreamHandle);
/// Samples [first, last) into x.
void per_sample_decode(const PerSampleCode&, const uint8_t* bytes, void* x, DType, int64_t first, int64_t last, StreamHandle);

}  // namespace satchel::cuda
