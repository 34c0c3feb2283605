// How passes over all values end: partial sums of thread blocks, in which channels repeat, become numbers of channels. Always in the same
// order: a channel's parts are dealt out to 32 threads in turn, and what these have is added up one after the other.
//
//   parts, a row of float2        channel  0 1 2 3 | 4 5 6 7 | …      a thread block has four channels: 32 bytes of a row
//                        row 0, 32, …      thread 0 of each channel
//                        row 1, 33, …      thread 1 of each channel
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFinishChannels = 4, kFinishShares = 32, kFinishThreads = kFinishChannels * kFinishShares;
constexpr int kFinishEach = 4;  // thread blocks a multiprocessor: said, so that the compiler keeps a batch of reads in registers

inline unsigned finish_blocks(int64_t channels) { return grid_size(ceil_div(channels, kFinishChannels)); }

/// What a thread has to add up.
struct FinishShare {
  int64_t channel;
  int own;  // rows own, own + 32, …

  __device__ inline FinishShare()
      : channel(static_cast<int64_t>(blockIdx.x) * kFinishChannels + threadIdx.x % kFinishChannels),
        own(static_cast<int>(threadIdx.x) / kFinishChannels) {}

  /// Calls add(row, part) for each of its rows, of which there are `rows`.
  template <class F>
  __device__ inline void each(const float2* partial, int64_t rows, int64_t channels, F&& add) const {
    batches<1>(partial, rows, channels, batches<4>(partial, rows, channels, batches<16>(partial, rows, channels, own, add), add), add);
  }

  /// The sums of all shares, for the thread that gets true. Every thread of the block must call this.
  template <int count>
  __device__ inline bool add_up(double (&sums)[count]) const {
    __shared__ double shared[count][kFinishShares][kFinishChannels];
    const int slot = static_cast<int>(threadIdx.x) % kFinishChannels;
#pragma unroll
    for (int k = 0; k < count; ++k) shared[k][own][slot] = sums[k];
    __syncthreads();
    if (own != 0) return false;
    for (int s = 1; s < kFinishShares; ++s) {
#pragma unroll
      for (int k = 0; k < count; ++k) sums[k] += shared[k][s][slot];
    }
    return true;
  }

 private:
  /// So many rows at once while there are that many, from `row` on: their reads are under way together. Returns the next row.
  template <int count, class F>
  __device__ inline int64_t batches(const float2* partial, int64_t rows, int64_t channels, int64_t row, F&& add) const {
    for (; row + (count - 1) * kFinishShares < rows; row += count * kFinishShares) {
      float2 part[count];
#pragma unroll
      for (int u = 0; u < count; ++u) part[u] = __ldg(partial + (row + u * kFinishShares) * channels + channel);
#pragma unroll
      for (int u = 0; u < count; ++u) add(row + u * kFinishShares, part[u]);
    }
    return row;
  }
};

}  // namespace
}  // namespace satchel::cuda
