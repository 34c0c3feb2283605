// The weights' gradient of a projected save without decoding it: Ĥᵀ·g = P·(Zᵀ·g), Z from its codes (theory.md 4). Where CMake found no
// CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Fits: one matrix of independent signs, 16 or 32 wide, codes of 2 bits in straight blocks of a power of two (a row of Z at least), and g
/// whose columns are a multiple of 4 (width 16) or 2 (width 32).
bool project_product_fits(const Projection&, const BlockCode&, int64_t columns);
int64_t project_product_scratch_bytes(const Projection&, int64_t columns);
/// out = P·(Zᵀ·g), p.columns × columns of fp32, in fp32; the order of the sums depends on the sizes and the GPU's model. Codes, headers and
/// g (rows × columns) start at a multiple of 16.
void project_product(const Projection&, const BlockCode&, const uint8_t* codes, const void* headers, const uint64_t* seed, const void* g,
                     DType, int64_t columns, float* out, void* scratch, StreamHandle);

}  // namespace satchel::cuda
