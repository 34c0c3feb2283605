// BatchNorm of maps in channels_last order for the methods that keep each function's own: the normalised values as a block code, a bit a
// value for ReLU's mask; a residual sum may stand between the two. Where CMake found no CUDA, none.cpp stands in: nothing fits, and the
// rest throws.
#pragma once

#include <cstdint>

#include "satchel/core/per_sample.h"
#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// The code of x̂ = (x − mean)·rstd in even levels: of all samples alike as core/layout.h has it, or as core/mixed.h has it.
struct NormImageCode {
  int64_t samples, values;  // values a sample
  int64_t channels, block;
  int bits;  // of every sample; 0: its own, as its share says
  HeaderType header;
  Rounding rounding;
  uint8_t* codes;  // codes and headers at a multiple of 16
  void* headers;
  const uint32_t* entries;  // null where bits are given
};

/// Fits: 1 to 8 bits in blocks of 256 values that fill every sample, and channels of which 396·256 can be a multiple: all up to 396, and
/// more with a power of two in them. Else pack, pack_mask and chain serve. The pointers are not looked at.
bool norm_image_fits(const NormImageCode&);
int64_t norm_image_scratch_bytes();

/// Extremes of every block of x̂, as per_sample_measure() gives them.
void norm_image_measure(const NormImageCode&, const void* x, DType, const NormParameters&, F32Header* ranges, StreamHandle);

/// What the forward pass reads and writes beside the code; activations start at multiples of 16.
struct NormImagePass {
  const void *x, *skip;     // skip: null where nothing is added
  const F32Header* ranges;  // of x̂; null: taken in passing
  uint8_t* on;              // ReLU's mask, a byte for every 8 values; null: no ReLU
  void* z;                  // may be x or skip
  F32Header* z_ranges;      // extremes of every block of z as it stands in memory; null: not wanted
};
/// y = γ·x̂ + β (+ skip); z = relu(y), or y where there is no mask. The bytes of encode() or per_sample_encode() of x̂ and of mask() of y;
/// shares of per-sample bits stand already.
void norm_image_encode(const NormImageCode&, const NormImagePass&, DType, const NormParameters&, const uint64_t* seed, StreamHandle);

/// Σ gy (β's gradient) and Σ gy·x̂ (γ's) a channel; gy = g where `on` lets it pass (null: everywhere). `scratch` holds
/// norm_image_scratch_bytes().
void norm_image_sums(const NormImageCode&, const uint8_t* on, const void* g, DType, float* sum_g, float* sum_gx, void* scratch,
                     StreamHandle);

/// What the last pass writes; null: not wanted.
struct NormImageGradients {
  void *skip, *x;  // either may be g
  float* squares;  // Σ of x's squared gradients a block
};
/// One read of g: gy goes to skip, γ·rstd·(gy − Σgy/N − x̂·Σgy·x̂/N) to x.
void norm_image_back(const NormImageCode&, const uint8_t* on, const void* g, DType, const float* gamma, const float* rstd,
                     const float* sum_g, const float* sum_gx, const NormImageGradients&, StreamHandle);

}  // namespace satchel::cuda
