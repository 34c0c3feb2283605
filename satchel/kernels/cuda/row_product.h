// Rows of 16-bit activations by one or two small matrices of weights, in one pass over rows and result; sums in float32. Where CMake found
// no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// to = a[0]·b[0] (+ a[1]·b[1]) (+ bias), all of one type. Rows of `to` share no memory with a.
struct RowProductSides {
  DType type = DType::f16;
  int count = 1;
  int64_t rows = 0, columns = 0;
  const void* a[2] = {};     // rows × depth, values of a row side by side
  int64_t a_stride[2] = {};  // values from row to row
  const void* b[2] = {};     // depth × columns: value (k, n) stands at k·by_depth + n·by_column
  int64_t depth[2] = {}, by_depth[2] = {}, by_column[2] = {};
  const void* bias = nullptr;  // a value a column; null: none
  void* to = nullptr;
  int64_t to_stride = 0;
};

/// Does the kernel serve these on the current device? It copies eight values at a time, and keeps the weights of 128 columns in shared
/// memory, beside rows and results of 90 KiB: a GPU with 99 KiB never has the room.
bool row_product_fits(const RowProductSides&);
void row_product(const RowProductSides&, StreamHandle);

}  // namespace satchel::cuda
