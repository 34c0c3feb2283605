// How the backward passes of norms end: two sums a channel.
#pragma once

#include "satchel/kernels/cuda/finish.cuh"

namespace satchel::cuda {
namespace {

/// From `entries` parts in all.
__global__ void __launch_bounds__(kFinishThreads, kFinishEach)
    finish_sums(const float2* partial, int64_t entries, int64_t channels, float* sum_g, float* sum_gx) {
  const FinishShare share;
  double sums[2] = {};
  if (share.channel < channels) {
    share.each(partial, quotient(entries, channels), channels, [&](int64_t, float2 part) { sums[0] += part.x, sums[1] += part.y; });
  }
  if (!share.add_up(sums) || share.channel >= channels) return;
  sum_g[share.channel] = static_cast<float>(sums[0]);
  sum_gx[share.channel] = static_cast<float>(sums[1]);
}

}  // namespace
}  // namespace satchel::cuda
