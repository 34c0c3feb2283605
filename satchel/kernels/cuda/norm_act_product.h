// The weights' gradient from the packed input of a layer: Gᵀ·Z, Z decoded inside the product (theory.md 10). Where CMake found no CUDA,
// none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// One or two gradients of `width` columns each, rows `stride` values apart, and where their products (width × channels) go.
struct ProductGradients {
  DType type = DType::f32;
  bool tf32 = false;  // float32 may go through the tensor cores, each factor rounded to tf32
  int count = 1;
  int64_t width = 0;
  const void* g[2] = {};
  int64_t stride[2] = {};
  float* out[2] = {};
};

/// Fits, beside norm_act_fits: channels a multiple of 8, up to 512, that fill at least two thirds of tiles of 128; 1 or 2 gradients
/// with 1 to 256 columns; a current device with 65 KiB of shared memory a thread block. Any stride and address does;
/// multiples of 16 bytes are copied faster.
bool norm_act_product_fits(const SideCode&, const ProductGradients&);
int64_t norm_act_product_scratch_bytes(const SideCode&, const ProductGradients&);
/// out[i] = g[i]ᵀ·Z for the Z of norm_act_input(), to the bit: of float32, or of 16 bits where g is. Sums in float32 whose order depends on
/// sizes, types and the GPU's model: last bits differ between models. `scratch` starts at a multiple of 16.
void norm_act_product(const SideCode&, const Chain&, const uint8_t* bytes, const uint64_t* seed, const ProductGradients&, void* scratch,
                      StreamHandle);

}  // namespace satchel::cuda
