// Hopper's own products, for the emulated GPU, which has not their instructions (wgmma): the same results by loops, within the same bounds,
// and in the same order of reads and writes, so that what may be written over is. Codes are multiplied as on other GPUs.
#include "satchel/kernels/cuda/split_product.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "satchel/kernels/cuda/product_kernel.cuh"

namespace satchel::cuda {
namespace {

constexpr int64_t kTileRows = 128;

}  // namespace

bool split_fits() { return true; }

int64_t split_factor_bytes(const SplitFactor& f) { return (f.depth[0] + f.depth[1]) * f.columns * static_cast<int64_t>(sizeof(float)); }

void split_factor(const SplitFactor& f, void* pieces, StreamHandle) {
  auto* to = static_cast<float*>(pieces);
  for (int i = 0; i < f.count; ++i) {
    for (int64_t k = 0; k < f.depth[i]; ++k) {
      for (int64_t n = 0; n < f.columns; ++n) *to++ = f.b[i][k * f.by_depth[i] + n * f.by_column[i]];
    }
  }
}

void split_product(const SplitRows& x, const SplitFactor& f, const void* pieces, const float* bias, float* out, int64_t out_stride,
                   StreamHandle) {
  std::vector<double> sums(static_cast<size_t>(kTileRows * kSplitColumns));
  for (int64_t column = 0; column < f.columns; column += kSplitColumns) {
    const int64_t width = std::min(kSplitColumns, f.columns - column);
    for (int64_t row = 0; row < x.rows; row += kTileRows) {
      const int64_t rows = std::min(kTileRows, x.rows - row);
      const auto* b = static_cast<const float*>(pieces) + column;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t n = 0; n < width; ++n) sums[r * width + n] = bias == nullptr ? 0.0 : bias[column + n];
      }
      for (int i = 0; i < f.count; ++i) {
        for (int64_t k = 0; k < f.depth[i]; ++k, b += f.columns) {
          for (int64_t r = 0; r < rows; ++r) {
            const double a = x.a[i][(row + r) * x.stride[i] + k];
            for (int64_t n = 0; n < width; ++n) sums[r * width + n] += a * b[n];
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) std::copy_n(&sums[r * width], width, out + (row + r) * out_stride + column);
    }
  }
}

int64_t split_gradient_scratch_bytes(const TallPair&) { return 0; }

void split_gradient(const TallPair& p, bool add, float* out, void*, StreamHandle) {
  std::vector<double> sums(static_cast<size_t>(p.g_columns * p.x_columns));
  if (add) std::copy_n(out, sums.size(), sums.begin());
  for (int64_t row = 0; row < p.rows; ++row) {
    const float *g = p.g + row * p.g_stride, *x = p.x + row * p.x_stride;
    for (int64_t m = 0; m < p.g_columns; ++m) {
      for (int64_t n = 0; n < p.x_columns; ++n) sums[m * p.x_columns + n] += static_cast<double>(g[m]) * x[n];
    }
  }
  std::copy(sums.begin(), sums.end(), out);
}

namespace epilogue::product {

void multiply_panels(const Product& a, Math math, dim3 grid, StreamHandle stream, const char* op) {
  const auto run = [&](auto known) {
    using T = Tile<4, 4>;
    launch_kernel(op, stream, {grid, kBlockThreads, T::kShape.bytes(known())}, multiply_codes<T, known()>, a);
  };
  if (math == Math::f16)
    run(std::integral_constant<Math, Math::f16>());
  else
    run(std::integral_constant<Math, Math::bf16>());
}

}  // namespace epilogue::product
}  // namespace satchel::cuda
