// BatchNorm, residual sum and ReLU, z = relu(γ·x̂ + β + skip) with x̂ = (x − mean)·rstd: the normalised values as a block code, z in its
// ReLU form. Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Codes and headers of one packed tensor as core/layout.h has them, both at a multiple of 16.
struct CodeParts {
  uint8_t* codes;
  void* headers;
};

/// What forward writes and backward reads, rows × channels each.
struct NormAddCode {
  BlockCode norm;  // of x̂, fp32
  SideCode sum;    // of z, as it stands in memory
  int64_t channels;
  CodeParts norm_at, sum_at;
  ExtraBitView extra = {};  // of the sum: samples of 3 bits among those of 2, whose blocks of 256 fill every sample
};

/// Fits: straight blocks of 256 values, 1 to 4 bits of x̂, Side::relu in 2 or 3 bits of z, and channels of which 396·256 can be a
/// multiple: all up to 396, and more with a power of two in them. Else pack and chain serve. The pointers are not looked at.
bool norm_add_fits(const NormAddCode&);
int64_t norm_add_scratch_bytes();

/// One read of x and skip, one write of z (which may be x or skip), of the codes and of the gaps before the headers: the bytes of encode()
/// of x̂ and of side_encode() of z. Activations start at multiples of 16.
void norm_add_encode(const NormAddCode&, const void* x, const void* skip, DType, const NormParameters&, const uint64_t* norm_seed,
                     const uint64_t* sum_seed, void* z, StreamHandle);

/// Σ gz (β's gradient) and Σ gz·x̂ (γ's) a channel; gz = g where z is above 0. `scratch` holds norm_add_scratch_bytes().
void norm_add_sums(const NormAddCode&, const void* g, DType, float* sum_g, float* sum_gx, void* scratch, StreamHandle);

/// One read of g: gz goes to g_skip, γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N) to dx. Either may be g, or null: not wanted. Null sums: γ·rstd·gz, for
/// statistics that are not the batch's.
void norm_add_back(const NormAddCode&, const void* g, DType, const float* gamma, const float* rstd, const float* sum_g, const float* sum_gx,
                   void* g_skip, void* dx, StreamHandle);

}  // namespace satchel::cuda
