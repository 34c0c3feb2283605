// What forward and backward of norms by row share: a row's sums over a thread block, eight values and eight channels at a time.
#pragma once

#include "satchel/kernels/cuda/row_norm.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {

constexpr int kMostThreads = 1024;  // eight values each: the longest row

/// Threads that hold a row.
inline unsigned row_threads(int64_t width) { return static_cast<unsigned>(ceil_div(width, 256) * 32); }

/// v as memory of that type gives it back.
template <DType type>
__device__ inline void as_stored(float (&v)[8]) {
  if constexpr (type != DType::f32) {
    Eight<type> e;
    e.set(v);
    to_floats(e, v);
  }
}

/// Four sums over a warp, one for each quarter of its lanes: 6 exchanges instead of 20.
__device__ inline float quarter_sums(float4 x) {
  const unsigned lane = threadIdx.x % 32;
  const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
  const float a = (upper ? x.z : x.x) + __shfl_xor_sync(~0u, upper ? x.x : x.z, 16);
  const float b = (upper ? x.w : x.y) + __shfl_xor_sync(~0u, upper ? x.y : x.w, 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
  for (int o = 4; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

/// Sums over the thread block, for every thread, in one fixed order. `parts` is not that of the call before: who still reads those has not
/// been waited for.
__device__ inline float row_sum(float x, float (&parts)[32]) {
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < warps ? parts[lane] : 0.0f);
}
__device__ inline float4 row_sums(const float4& x, float4 (&parts)[32]) {
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float sum = quarter_sums(x);
  if (warps > 1) {
    if (lane % 8 == 0) reinterpret_cast<float*>(parts)[threadIdx.x / 32 * 4 + lane / 8] = sum;
    __syncthreads();
    sum = quarter_sums(lane < warps ? parts[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
  return make_float4(__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 8), __shfl_sync(~0u, sum, 16), __shfl_sync(~0u, sum, 24));
}

}  // namespace satchel::cuda
