// DIVISION's norms on channels_last planes: BatchNorm [+ residual sum] [→ ReLU] and the low-pass code of its input in two reads of it
// forward, and backward straight from the codes. Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// A packed low-pass of whole samples: shape and code, and where its parts stand, codes and headers at a multiple of 16.
struct LowPassParts {
  LowPassShape maps;
  BlockCode code;
  int64_t channels;
  uint8_t* codes;
  void* headers;
  uint16_t* means;
};

/// Fits: planes in windows of 8, 2 bits, even levels, one block a map of 8 values or more, channels in multiples of 8, less than 2^24
/// rows; rows of pixels in multiples of 4 that make maps of multiples of 8, or maps of which 32 fit shared memory. The pointers are
/// not looked at.
bool norm_low_pass_fits(const LowPassParts&, DType);

/// For each of the three functions that take scratch.
int64_t norm_low_pass_scratch_bytes(const LowPassParts&);

/// One read of x (as all activations, from a multiple of 16 bytes on): the moments and, where the maps are not small, means and headers.
void norm_low_pass_measure(const LowPassParts&, const void* x, DType, const Moments&, void* scratch, StreamHandle);

/// After norm_low_pass_measure(), one read of x: the rest of the code, to the bit what low_pass_last_encode() gives, and z = γ'·x + β' of
/// the folded norm (γ' = γ·rstd, β' = β − mean·γ'), as chain() gives it. `mask` not null: z = relu(γ'·x + β' + skip) and its on bits, a bit
/// a value of samples × pixels × channels; `skip` null: no sum. z may be x or skip.
void norm_low_pass_encode(const LowPassParts&, const void* x, const void* skip, DType, const NormParameters&, const uint64_t* seed,
                          uint8_t* mask, void* z, StreamHandle);

/// Σ gz (β's gradient) and Σ gz·x̂ (γ's) a channel; gz = g where the mask says on; null: everywhere. γ and β of the norm are not read.
void norm_low_pass_sums(const LowPassParts&, const void* g, DType, const uint8_t* mask, const NormParameters&, float* sum_g, float* sum_gx,
                        void* scratch, StreamHandle);

/// One read of g: gz goes to g_skip, γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N) to dx. Either may be g, or null: not wanted.
void norm_low_pass_back(const LowPassParts&, const void* g, DType, const uint8_t* mask, const NormParameters&, const float* sum_g,
                        const float* sum_gx, void* g_skip, void* dx, StreamHandle);

}  // namespace satchel::cuda
