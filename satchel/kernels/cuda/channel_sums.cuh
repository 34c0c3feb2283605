// How the backward passes of norms end: partial sums of thread blocks, in which channels repeat, become one pair a channel.
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFinishWarps = 32;

/// A thread a channel, rows of partial sums shared out over the warps, always in the same order.
__global__ void __launch_bounds__(kFinishWarps * 32)
    finish_sums(const float2* partial, int64_t entries, int64_t channels, float* sum_g, float* sum_gx) {
  __shared__ double2 shared[kFinishWarps][33];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  double2 total = make_double2(0, 0);
  if (c < channels) {
#pragma unroll 16
    for (int64_t p = c + channels * warp; p < entries; p += channels * kFinishWarps) {
      const float2 part = partial[p];
      total.x += part.x, total.y += part.y;
    }
  }
  shared[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || c >= channels) return;
  for (int w = 1; w < kFinishWarps; ++w) total.x += shared[w][lane].x, total.y += shared[w][lane].y;
  sum_g[c] = static_cast<float>(total.x);
  sum_gx[c] = static_cast<float>(total.y);
}

}  // namespace
}  // namespace satchel::cuda
