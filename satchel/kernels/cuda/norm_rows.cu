// One read of g and x, one write of g: eight values a thread, whose channels are neighbours where 8 divides their number.
#include "satchel/kernels/cuda/norm_rows.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

__device__ inline void numbers_at(const float* from, int64_t c, float (&to)[8]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from + c)), b = __ldg(reinterpret_cast<const float4*>(from + c) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/// `neighbours`: 8 divides the channels, and everything lies at multiples of 16 bytes.
template <DType type, bool neighbours>
__global__ void __launch_bounds__(kThreads)
    back_values(void* g, const void* x, int64_t values, int64_t channels, const __grid_constant__ ChannelLine line) {
  const int64_t i = thread_index() * 8;
  if (i >= values) return;
  const int64_t first = i - quotient(i, channels) * channels;
  const Eight<type> given = read8_until<type, neighbours>(g, i, values), other = read8_until<type, neighbours>(x, i, values);
  float scale[8], along[8], offset[8], v[8];
  if constexpr (neighbours) {
    numbers_at(line.scale, first, scale);
    numbers_at(line.along, first, along);
    numbers_at(line.offset, first, offset);
  } else {
    int64_t c = first;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      scale[j] = __ldg(line.scale + c), along[j] = __ldg(line.along + c), offset[j] = __ldg(line.offset + c);
      c = c + 1 == channels ? 0 : c + 1;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = fmaf(scale[j], given[j], fmaf(along[j], other[j], offset[j]));
  write8_within<type, neighbours>(g, i, 0, values, v);
}

}  // namespace

void norm_rows_back(void* g, const void* x, DType type, int64_t rows, int64_t channels, const ChannelLine& line, StreamHandle stream) {
  const int64_t values = rows * channels;
  if (values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool neighbours =
      channels % 8 == 0 && is_aligned(g) && is_aligned(x) && is_aligned(line.scale) && is_aligned(line.along) && is_aligned(line.offset);
  with_values(type, neighbours, [&](auto t, auto n) {
    back_values<t(), n()><<<blocks_for(ceil_div(values, 8)), kThreads, 0, s>>>(g, x, values, channels, line);
  });
  check_launch("norm");
}

}  // namespace satchel::cuda
