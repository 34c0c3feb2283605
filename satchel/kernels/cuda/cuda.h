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

/// `rows`: how x lies where it has gaps. The codes are those of the values one after the other.
void encode(const BlockCode&, const void* x, DType, const uint64_t* seed, uint8_t* codes, void* headers, StreamHandle,
            RowsWithGaps rows = {});
void decode(const BlockCode&, const uint8_t* codes, const void* headers, void* x, DType, StreamHandle);
/// The same of exp(x), and log() of what decode() gives; float32. Not to the bit what the CPU gives: exp and log differ in their last bits.
void encode_exp(const BlockCode&, const float* x, const uint64_t* seed, uint8_t* codes, void* headers, StreamHandle);
void decode_log(const BlockCode&, const uint8_t* codes, const void* headers, float* x, StreamHandle);

/// Also writes the channels' off means where the table has a single off code; `channels` is null for the relu form.
/// `scratch` holds side_scratch_bytes(code) bytes.
int64_t side_scratch_bytes(const SideCode&);
void side_encode(const SideCode&, const void* x, DType, Channel* channels, const uint64_t* seed, uint8_t* codes, void* headers,
                 void* scratch, StreamHandle);
void side_decode(const SideCode&, const uint8_t* codes, const Channel* channels, const void* headers, void* x, DType, StreamHandle);
/// Values [first, last), multiples of 8, of a ReLU code of 2 bits with samples of 3; x starts with value `first`, at a multiple of 16.
void side_decode_extra(const SideCode&, const ExtraBitView&, const uint8_t* codes, const void* headers, int64_t first, int64_t last,
                       void* x, DType, StreamHandle);

/// One bit a value, 1 where x > 0 or where a flag is not 0.
void mask(const void* x, DType, int64_t values, uint8_t* mask, StreamHandle);
void mask_flags(const uint8_t* flags, int64_t values, uint8_t* mask, StreamHandle);
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

/// Rows of `width` values (float32, float16 or bfloat16; sums in float32), `stride` apart. y = plus + A·x, `plus` null: A·x; y overlaps
/// neither.
struct ProductSides {
  DType type = DType::f32;
  int64_t width = 0;
  const void* x = nullptr;
  int64_t x_stride = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  const void* plus = nullptr;
  int64_t plus_stride = 0;
};

/// In float32 to the bit what the CPU gives. `scratch` holds multiply_scratch_values(…) floats; the lists of groups
/// and of rows of more than kStretch entries must be there.
int64_t multiply_scratch_values(const Sparse&, int64_t width);
void multiply(const Sparse&, const ProductSides&, float* scratch, StreamHandle);

/// Activations are f32, bf16 or f16 in memory (DType, of what stands before it and of what is written) and f32 in between: to the bit what
/// f32 gives of the same numbers, rounded to nearest even at the end.
///
/// The chain of chain.h, to the bit what the CPU gives. Null pointers mean what they mean in CpuKernels; `seed` is read only where
/// values are dropped. z may be x, out may be g.
void chain(const Chain&, const void* x, DType, const float* gamma, const float* beta, const uint8_t* on, const uint64_t* seed, void* z,
           StreamHandle);
void chain_back(const Chain&, const void* g, DType, const uint8_t* on, const uint64_t* seed, void* out, StreamHandle);
void chain_on(const Chain&, const void* x, DType, const float* gamma, const float* beta, uint8_t* on, StreamHandle);
void side_on(const SideCode&, const uint8_t* codes, uint8_t* on, StreamHandle);

/// Three numbers a channel, float32.
struct ChannelLine {
  const float *scale, *along, *offset;
};

/// The last step of a norm's gradient from values that stand decoded: g = scale·g + along·x + offset, channel by channel, in place.
void norm_rows_back(void* g, const void* x, DType, int64_t rows, int64_t channels, const ChannelLine&, StreamHandle);

/// Mean, rstd = 1/√(var + eps) and, where not null, the biased variance of every channel; running statistics, where not null, move by
/// `momentum` (the variance by the unbiased one).
struct Moments {
  float *mean = nullptr, *rstd = nullptr, *var = nullptr, *running_mean = nullptr, *running_var = nullptr;
  double eps = 1e-5, momentum = 0.1;
};

/// Of rows × channels (at least one row), read once; the order of the sums depends on the sizes alone.
int64_t column_moments_scratch_bytes(int64_t channels);
void column_moments(const void* h, DType, int64_t rows, int64_t channels, const Moments&, void* scratch, StreamHandle);

/// Sums of columns of rows × columns (at least one row) in float32; their order depends on the sizes alone.
int64_t column_sums_scratch_bytes(int64_t rows, int64_t columns);
void column_sums(const void* g, DType, int64_t rows, int64_t columns, float* sums, void* scratch, StreamHandle);

/// *seed = the next seed of the run: for captured graphs, one thread.
void advance_seed(uint64_t* seed, StreamHandle);

}  // namespace satchel::cuda
