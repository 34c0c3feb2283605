// Products of float32 matrices on tensor cores with the errors of fp32, for tall matrices (rows of activations) and small ones (weights).
// Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
//
//   |error| ≤ (3·2^−22 + (depth/32 + 8)·2^−23) · Σ|x||w| + 2^−39 · Σ over groups of 32 of the depth (max|x|·Σ|w| + Σ|x|·max|w|)
//
// The second part shows only where values of one group of 32 differ by more than 2^17. Infinities give NaN; rows with values past
// 2^107 may overflow.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Is there code for the current device (Hopper)?
bool split_fits();

/// One or two small matrices, depth[i] × columns each, whose values (k, n) stand at k·by_depth + n·by_column.
struct SplitFactor {
  int count = 1;
  int64_t columns = 0;
  int64_t depth[2] = {};
  const float* b[2] = {};
  int64_t by_depth[2] = {}, by_column[2] = {};
};
/// Bytes of a factor cut into pieces, and the cutting. `pieces` starts at a multiple of 16.
int64_t split_factor_bytes(const SplitFactor&);
void split_factor(const SplitFactor&, void* pieces, StreamHandle);

/// Rows of values in one piece each, `stride` values apart.
struct SplitRows {
  int64_t rows = 0;
  const float* a[2] = {};
  int64_t stride[2] = {};
};
/// Columns that one thread block has at most: it has read a row of a tile before it writes the row's result.
constexpr int64_t kSplitColumns = 128;
/// out = a[0]·b[0] (+ a[1]·b[1]) (+ bias); rows of `out` are out_stride values apart. They share no memory with a or, up to kSplitColumns
/// columns, each begins where the same row of a[0] or a[1] does.
void split_product(const SplitRows&, const SplitFactor&, const void* pieces, const float* bias, float* out, int64_t out_stride,
                   StreamHandle);

/// Two tall matrices, values of a row side by side.
struct TallPair {
  int64_t rows = 0;
  const float *g = nullptr, *x = nullptr;
  int64_t g_columns = 0, x_columns = 0, g_stride = 0, x_stride = 0;
};
int64_t split_gradient_scratch_bytes(const TallPair&);
/// out (g_columns × x_columns, in one piece) = gᵀ·x, or, with `add`, += gᵀ·x. Sums in an order that depends on the sizes and the GPU's
/// model.
void split_gradient(const TallPair&, bool add, float* out, void* scratch, StreamHandle);

}  // namespace satchel::cuda
