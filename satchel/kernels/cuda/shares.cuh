// Sums that thread blocks made of their shares of the rows, added up by a kernel of its own.
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kShareWarps = 8;

/// A lane a result; the shares are dealt out to the warps, always in the same order. Results from `each` on go to out1.
__global__ void __launch_bounds__(kShareWarps * 32)
    add_shares(const float* partial, int64_t shares, int64_t values, bool add, int64_t each, float* out0, float* out1) {
  __shared__ float sums[kShareWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0.0f;
  if (i < values) {
#pragma unroll 8
    for (int64_t s = warp; s < shares; s += kShareWarps) total += __ldg(partial + s * values + i);
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || i >= values) return;
  for (int w = 1; w < kShareWarps; ++w) total += sums[w][lane];
  float& out = i < each ? out0[i] : out1[i - each];
  out = add ? out + total : total;
}

/// `shares` times `values` of them one after the other; the first `each` results go to out0 and the others to out1.
void add_up(const float* partial, int64_t shares, int64_t values, bool add, int64_t each, float* out0, float* out1, cudaStream_t stream,
            const char* op) {
  add_shares<<<grid_size(ceil_div(values, 32)), kShareWarps * 32, 0, stream>>>(partial, shares, values, add, each, out0, out1);
  check_launch(op);
}

}  // namespace
}  // namespace satchel::cuda
