// How passes over all values end: partial sums of thread blocks, in which channels repeat, become numbers of channels. Always in the same
// order: a channel's parts are dealt out to 64 or 128 threads in turn, what eight neighbours of these have is added up as a tree, and what
// the warps have one after the other.
//
//   parts, a row of float2        channel  0 1 2 3 | 4 5 6 7 | …      a thread block has four channels: 32 bytes of a row
//                        row 0, 64, …      thread 0 of each channel
//                        row 1, 65, …      thread 1 of each channel
#pragma once

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFinishChannels = 4, kFinishThreads = 512;  // at most
constexpr int kFinishBatch = 16;                          // reads of a thread that are under way together

/// Four channels a thread block, and enough threads that each finds a few of the `rows`.
inline LaunchSize finish_size(int64_t channels, int64_t rows) {
  const int threads = rows > 64 * 8 ? kFinishThreads : kFinishThreads / 2;
  return {grid_size(ceil_div(channels, kFinishChannels)), static_cast<unsigned>(threads)};
}

/// What a thread has to add up.
struct FinishShare {
  int64_t channel;
  int own, all;  // rows own, own + all, …

  __device__ inline FinishShare()
      : channel(static_cast<int64_t>(blockIdx.x) * kFinishChannels + threadIdx.x % kFinishChannels),
        own(static_cast<int>(threadIdx.x) / kFinishChannels),
        all(static_cast<int>(blockDim.x) / kFinishChannels) {}

  /// Calls add(row, part) for each of its rows, of which there are `rows`.
  template <class F>
  __device__ inline void each(const float2* partial, int64_t rows, int64_t channels, F&& add) const {
    const int64_t step = all * channels;
    for (int64_t row = own; row < rows; row += kFinishBatch * all) {
      const float2* from = partial + row * channels + channel;
      float2 part[kFinishBatch];
#pragma unroll
      for (int u = 0; u < kFinishBatch; ++u) {
        if (row + u * all < rows) part[u] = __ldg(from + u * step);
      }
#pragma unroll
      for (int u = 0; u < kFinishBatch; ++u) {
        if (row + u * all < rows) add(row + u * all, part[u]);
      }
    }
  }

  /// Sums of its rows, of `entries` parts in all.
  __device__ inline void add_pairs(const float2* partial, int64_t entries, int64_t channels, double (&sums)[2]) const {
    each(partial, quotient(entries, channels), channels, [&](int64_t, float2 part) { sums[0] += part.x, sums[1] += part.y; });
  }

  /// The sums of all shares, for the thread that gets true. Every thread of the block must call this.
  template <int count>
  __device__ inline bool add_up(double (&sums)[count]) const {
    __shared__ double shared[count][kFinishThreads / 32][kFinishChannels];
    const int slot = static_cast<int>(threadIdx.x) % kFinishChannels, warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int o = 16; o >= kFinishChannels; o /= 2) sums[k] += __shfl_xor_sync(~0u, sums[k], o);
    }
    if (threadIdx.x % 32 < kFinishChannels) {
#pragma unroll
      for (int k = 0; k < count; ++k) shared[k][threadIdx.x / 32][slot] = sums[k];
    }
    __syncthreads();
    if (own != 0) return false;
    for (int w = 1; w < warps; ++w) {
#pragma unroll
      for (int k = 0; k < count; ++k) sums[k] += shared[k][w][slot];
    }
    return true;
  }
};

/// The first value from `from` on that is of channel c, where channels repeat value by value.
__device__ inline int64_t first_of_channel(int64_t from, int64_t c, int64_t channels) {
  const int64_t past = channel_of(from, channels);
  return from + (c >= past ? c - past : c - past + channels);
}

/// Count, mean and sum of squared differences from it, of four channels, merged by Chan's formula, eight values a channel at a time.
struct Gathered {
  float count = 0.0f, mean[4] = {}, squares[4] = {};

  template <bool whole>
  __device__ inline void add(int k, const float (&v)[8], float sum, int n, float each, float fraction) {
    const float m = sum * each, apart = m - mean[k];
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) square = whole || j < n ? fmaf(v[j] - m, v[j] - m, square) : square;
    mean[k] = count == 0.0f ? m : fmaf(apart, fraction, mean[k]);
    squares[k] = count == 0.0f ? square : squares[k] + fmaf(apart * fraction * count, apart, square);
  }
};

/// Groups with a mean and squares each become one, in double, relative to the first group's mean.
struct Merge {
  double shift, count = 0, sum = 0, squares = 0;

  __device__ inline explicit Merge(double from) : shift(from) {}
  __device__ inline void add(double n, double mean, double square) {
    const double d = mean - shift;
    count += n, sum += n * d, squares += square + n * d * d;
  }
  __device__ inline double mean() const { return shift + sum / count; }
  __device__ inline double square() const {
    const double s = squares - sum * (sum / count);
    return s < 0 ? 0 : s;  // NaN stays
  }
};

/// The moments of channel c from all its rows.
__device__ inline void write_moments(const Merge& all, const Moments& to, int64_t c) {
  const auto blend = [&](float& old, double now) { old = static_cast<float>((1 - to.momentum) * old + to.momentum * now); };
  const double mean = all.mean(), square = all.square(), var = square / all.count;
  to.mean[c] = static_cast<float>(mean);
  to.rstd[c] = static_cast<float>(1 / sqrt(var + to.eps));
  if (to.var != nullptr) to.var[c] = static_cast<float>(var);
  if (to.running_mean != nullptr) blend(to.running_mean[c], mean);
  if (to.running_var != nullptr) blend(to.running_var[c], square / (all.count - 1));
}

}  // namespace

/// Two sums a channel, from `entries` parts in all.
void finish_sums(const char* op, const float2* partial, int64_t entries, int64_t channels, float* sum_g, float* sum_gx,
                 StreamHandle stream);

}  // namespace satchel::cuda
