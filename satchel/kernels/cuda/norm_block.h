// BatchNorm → ReLU → dropout for the methods that keep each function's own: the norm's input as a block code and a bit a value for
// either mask. Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// What forward writes and backward reads. Codes and headers stand as core/layout.h has them, both at a multiple of 16.
struct NormBlockSaves {
  uint8_t* codes;
  void* headers;
  uint8_t* on;    // ReLU's mask, a byte for every 8 values begun
  uint8_t* kept;  // dropout's; null: none dropped, or redrawn from the seed
};

/// Fits: 2 bits in straight blocks of 128, 256, 512 or 1024 values, activations at a multiple of 16, and channels of which 396·256 can
/// be a multiple: all up to 396, and more with a power of two in them. Else pack, pack_mask and chain serve.
bool norm_block_fits(const BlockCode&, int64_t channels);
int64_t norm_block_scratch_bytes();

/// One read of h, one write of z (which may be h), of the saves and of the gap between codes and headers: the bytes of encode() of h, of
/// mask() of y = γ·(h − mean)·rstd + β and of mask() of what is kept; z = kept·relu(y)·scale. Of the chain channels, drop and scale are
/// read; `drop_seed` only where drop > 0.
void norm_block_encode(const BlockCode&, const Chain&, const void* h, DType, const NormParameters&, const uint64_t* code_seed,
                       const uint64_t* drop_seed, const NormBlockSaves&, void* z, StreamHandle);

/// Σ gz (β's gradient) and Σ gz·x̂ (γ's) a channel; x̂ = (decoded h − mean)·rstd, gz = g where it passes both masks. `drop_seed` is read
/// where drop > 0 and `kept` is null; of the parameters mean and rstd are read. `scratch` holds norm_block_scratch_bytes().
void norm_block_sums(const BlockCode&, const Chain&, const void* g, DType, const NormParameters&, const uint64_t* drop_seed,
                     const NormBlockSaves&, float* sum_g, float* sum_gx, void* scratch, StreamHandle);

/// g becomes γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N), in place.
void norm_block_back(const BlockCode&, const Chain&, const NormParameters&, const uint64_t* drop_seed, const NormBlockSaves&,
                     const float* sum_g, const float* sum_gx, void* g, DType, StreamHandle);

}  // namespace satchel::cuda
