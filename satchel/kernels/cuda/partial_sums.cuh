// Sums that thread blocks made of their parts of the rows, added up by a kernel of its own.
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kPartWarps = 8;

/// A lane a result; the parts are dealt out to the warps, always in the same order. Results from `each` on go to out1.
__global__ void __launch_bounds__(kPartWarps * 32)
    add_parts(const float* partial, int64_t parts, int64_t values, bool add, int64_t each, float* out0, float* out1) {
  __shared__ float sums[kPartWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0.0f;
  if (i < values) {
#pragma unroll 8
    for (int64_t s = warp; s < parts; s += kPartWarps) total += __ldg(partial + s * values + i);
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || i >= values) return;
  for (int w = 1; w < kPartWarps; ++w) total += sums[w][lane];
  float& out = i < each ? out0[i] : out1[i - each];
  out = add ? out + total : total;
}

/// `parts` times `values` of them one after the other; the first `each` results go to out0 and the others to out1.
void add_up(const float* partial, int64_t parts, int64_t values, bool add, int64_t each, float* out0, float* out1, StreamHandle stream,
            const char* op) {
  launch_kernel(op, stream, {grid_size(ceil_div(values, 32)), kPartWarps * 32}, add_parts, partial, parts, values, add, each, out0, out1);
}

}  // namespace
}  // namespace satchel::cuda
