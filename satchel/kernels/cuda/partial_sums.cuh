// Sums that thread blocks made of their parts of the rows, added up by a kernel of its own.
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kPartWarps = 8;
constexpr int kPartBatch = 18;                         // reads of a thread that are under way together
constexpr int64_t kFewResults = kSumProcessors * 128;  // with up to so many, a thread has one

/// A lane has `each` neighbouring results; the parts are dealt out to the warps, always in the same order. Results from `first` on go to
/// out1.
template <int warps, int each>
__global__ void __launch_bounds__(warps * 32)
    add_parts(const float* partial, int64_t parts, int64_t values, bool add, int64_t first, float* out0, float* out1) {
  __shared__ float sums[warps][32 * each];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * each;
  float total[each] = {};
  if (i < values) {
#pragma unroll 1
    for (int64_t s = warp; s < parts; s += kPartBatch * warps) {
      float own[kPartBatch][each];
#pragma unroll
      for (int u = 0; u < kPartBatch; ++u) {
        const bool is_part = s + u * warps < parts;
        const float* from = partial + (s + u * warps) * values + i;
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (each == 4) {
          if (is_part) four = __ldg(reinterpret_cast<const float4*>(from));
          own[u][0] = four.x, own[u][1] = four.y, own[u][2] = four.z, own[u][3] = four.w;
        } else {
          own[u][0] = is_part ? __ldg(from) : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < kPartBatch; ++u) {
#pragma unroll
        for (int j = 0; j < each; ++j) total[j] += own[u][j];  // a sum that starts with +0 stays itself with another +0
      }
    }
  }
#pragma unroll
  for (int j = 0; j < each; ++j) sums[warp][j * 32 + lane] = total[j];
  __syncthreads();
  const int k = static_cast<int>(threadIdx.x);  // of the block's results, number k / 32 of lane k % 32
  if (k >= 32 * each) return;
  const int64_t own = (static_cast<int64_t>(blockIdx.x) * 32 + k % 32) * each + k / 32;
  if (own >= values) return;
  float sum = sums[0][k];
#pragma unroll
  for (int w = 1; w < warps; ++w) sum += sums[w][k];
  float& out = own < first ? out0[own] : out1[own - first];
  out = add ? out + sum : sum;
}

/// `parts` times `values` of them one after the other; the first `first` results go to out0 and the others to out1. The order of a sum
/// depends on `warps` and `parts` alone.
template <int warps = kPartWarps>
void add_up(const float* partial, int64_t parts, int64_t values, bool add, int64_t first, float* out0, float* out1, StreamHandle stream,
            const char* op) {
  const bool fours = warps == kPartWarps && values > kFewResults && values % 4 == 0 && is_aligned(partial);
  const LaunchSize size = {grid_size(ceil_div(values, fours ? 128 : 32)), warps * 32};
  launch_kernel(op, stream, size, fours ? add_parts < warps, warps == kPartWarps ? 4 : 1 > : add_parts<warps, 1>, partial, parts, values,
                add, first, out0, out1);
}

}  // namespace
}  // namespace satchel::cuda
