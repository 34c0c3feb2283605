// The CUDA kernels: raw device pointers and a stream in, a checked launch out. Where CMake found no CUDA, none.cpp stands in
// and every function throws "[op] built without CUDA". Seeds are read from device memory, so that a captured graph draws anew.
#pragma once

#include <cstdint>

#include "satchel/kernels/chain.h"
#include "satchel/kernels/codec.h"
#include "satchel/kernels/sparse.h"

namespace satchel::cuda {

/// An opaque cudaStream_t, so that callers need no CUDA header.
using StreamHandle = void*;

/// Was this library built with CUDA kernels?
bool compiled();

void encode(const BlockCode&, const void* x, DType, const uint64_t* seed, uint8_t* codes, void* headers, StreamHandle);
void decode(const BlockCode&, const uint8_t* codes, const void* headers, void* x, DType, StreamHandle);

/// Also writes the channels' off means where the table has a single off code; `channels` is null for the relu form.
/// `scratch` holds side_scratch_bytes(code) bytes.
int64_t side_scratch_bytes(const SideCode&);
void side_encode(const SideCode&, const void* x, DType, Channel* channels, const uint64_t* seed, uint8_t* codes, void* headers,
                 void* scratch, StreamHandle);
void side_decode(const SideCode&, const uint8_t* codes, const Channel* channels, const void* headers, void* x, DType, StreamHandle);

void mask(const void* x, DType, int64_t values, uint8_t* mask, StreamHandle);
void unmask(const uint8_t* mask, int64_t values, uint8_t* flags, StreamHandle);

/// Low-pass split and block code in one; `scratch` holds low_pass_scratch_bytes(…) bytes (0 where the fused kernel serves).
int64_t low_pass_scratch_bytes(const LowPassShape&, const BlockCode&, const void* x);
void low_pass_encode(const LowPassShape&, const BlockCode&, const void* x, DType, const uint64_t* seed, uint8_t* codes, void* headers,
                     uint16_t* means, void* scratch, StreamHandle);
void low_pass_decode(const LowPassShape&, const BlockCode&, const uint8_t* codes, const void* headers, const uint16_t* means, void* x,
                     DType, StreamHandle);

/// Z = H·P (rows × width, fp32) and the matrices themselves (columns × width, fp32 each).
void project(const Projection&, const void* h, DType, const uint64_t* seed, float* z, StreamHandle);
/// Projection and block code of Z in one; `scratch` holds project_scratch_bytes(…) bytes (0 where the fused kernel serves).
int64_t project_scratch_bytes(const Projection&, const BlockCode&);
void project_encode(const Projection&, const BlockCode&, const void* h, DType, const uint64_t* seed, uint8_t* codes, void* headers,
                    void* scratch, StreamHandle);
void draw_projection(const Projection&, const uint64_t* seed, float* matrices, int64_t first, int64_t last, StreamHandle);

/// Integers as `bits` each above `least` and back.
void narrow(const int64_t* x, int64_t values, int64_t least, int bits, uint8_t* codes, StreamHandle);
void widen(const uint8_t* codes, int64_t values, int64_t least, int bits, int64_t* x, StreamHandle);

/// y = A·x, both row after row with `width` columns, to the bit what the CPU gives. `scratch` holds multiply_scratch_values(…)
/// floats. Rows that `long_row` leaves out are summed by one warp each, however long.
int64_t multiply_scratch_values(const Sparse&, int64_t width);
void multiply(const Sparse&, const float* x, int64_t width, float* y, float* scratch, StreamHandle);

/// The chain of chain.h, to the bit what the CPU gives. Null pointers mean what they mean in CpuKernels; `seed` is read only where
/// values are dropped. z may be x, out may be g.
void chain(const Chain&, const float* x, const float* gamma, const float* beta, const uint8_t* on, const uint64_t* seed, float* z,
           StreamHandle);
void chain_back(const Chain&, const float* g, const uint8_t* on, const uint64_t* seed, float* out, StreamHandle);
void chain_on(const Chain&, const float* x, const float* gamma, const float* beta, uint8_t* on, StreamHandle);
void side_on(const SideCode&, const uint8_t* codes, uint8_t* on, StreamHandle);

/// *seed = the next seed of the run: for captured graphs, one thread.
void advance_seed(uint64_t* seed, StreamHandle);

}  // namespace satchel::cuda
