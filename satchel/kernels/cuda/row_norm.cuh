// What forward and backward of norms by row share: a row's sums over a thread block, eight values and eight channels at a time.
#pragma once

#include "satchel/kernels/cuda/row_norm.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {

constexpr int kMostThreads = 1024;  // eight values each: the longest row

/// Threads that hold a row.
inline unsigned row_threads(int64_t width) { return static_cast<unsigned>(ceil_div(width, 256) * 32); }

template <DType type>
__device__ inline void to_floats(const Eight<type>& from, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = from[j];
}

/// v as memory of that type gives it back.
template <DType type>
__device__ inline void as_stored(float (&v)[8]) {
  if constexpr (type != DType::f32) {
    Eight<type> e;
    e.set(v);
    to_floats(e, v);
  }
}

/// Sums of four numbers over the thread block, for every thread, in one fixed order. `parts` is not that of the call before: who still
/// reads those has not been waited for.
__device__ inline float4 row_sums(float4 x, float4 (&parts)[32]) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    x.x += __shfl_xor_sync(~0u, x.x, o);
    x.y += __shfl_xor_sync(~0u, x.y, o);
    x.z += __shfl_xor_sync(~0u, x.z, o);
  }
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int w = 1; w < warps; ++w) {
    const float4 other = parts[w];
    x.x += other.x, x.y += other.y, x.z += other.z;
  }
  return x;
}

}  // namespace satchel::cuda
