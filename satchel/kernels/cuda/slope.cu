// Codes of slopes: a thread takes 8 values at a time, noise comes from device memory's seed, the levels stand in shared memory.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/smooth.cuh"
#include "satchel/kernels/cuda/values.cuh"
#include "satchel/kernels/dispatch.h"
#include "satchel/kernels/slope.h"

namespace satchel::cuda {
namespace {

constexpr int kMostLevels = 256;
constexpr unsigned kMostEncoders = 4096;  // thread blocks: each sets up its levels once for many values

/// slope<kind>() of core/slope.h, within a few ulp.
template <SlopeOf kind>
__device__ inline float slope_of(float x) {
  x = fminf(fmaxf(x, -30.0f), 30.0f);
  if constexpr (kind == SlopeOf::gelu) return gelu_of(x).slope;
  if constexpr (kind == SlopeOf::gelu_tanh) return gelu_tanh_of(x).slope;
  if constexpr (kind == SlopeOf::silu) return silu_of(x).slope;
  return slope<kind>(x);
}

/// Levels in shared memory. A bin of the levels' range has at most one of them, so that a value finds its level in two looks.
struct Levels {
  float level[kMostLevels], inverse[kMostLevels];  // inverse: 1/(distance to the next)
  uint8_t first[8 * kMostLevels];                  // the last level that is not above a bin's start

  __device__ void fill(const float* levels, int top, int bins) {
    for (int k = threadIdx.x; k <= top; k += kThreads) {
      level[k] = levels[k];
      inverse[k] = k < top ? 1.0f / (levels[k + 1] - levels[k]) : 0.0f;
    }
    __syncthreads();
    const float low = level[0], width = (level[top] - low) / static_cast<float>(bins);
    for (int k = threadIdx.x; k < bins; k += kThreads) {
      int at = 0;
      while (at < top && level[at + 1] <= fmaf(static_cast<float>(k), width, low)) ++at;
      first[k] = static_cast<uint8_t>(at);
    }
    __syncthreads();
  }

  /// level_code() of core/slope.h; `last` is the last bin.
  __device__ uint32_t code(float value, float low, float bins, float last, int top, uint32_t noise) const {
    const int bin = static_cast<int>(fminf(fmaxf((value - low) * bins, 0.0f), last));  // NaN: 0
    int at = first[bin];
    while (at < top && level[at + 1] <= value) ++at;
    return at + (fmaf(static_cast<float>(noise), 0x1p-16f, 0x1p-17f) < (value - level[at]) * inverse[at] ? 1u : 0u);
  }
};

template <SlopeOf kind, DType type>
__global__ void __launch_bounds__(kThreads)
    encode_slopes(const void* x, int64_t values, const float* levels, int bits, const uint64_t* seed, uint8_t* codes, bool vector) {
  __shared__ Levels shared;
  const int top = (1 << bits) - 1, all = 8 << bits;
  shared.fill(levels, top, all);
  const float low = shared.level[0], bins = static_cast<float>(all) / (shared.level[top] - low), last = static_cast<float>(all - 1);
  const uint64_t key = __ldg(reinterpret_cast<const unsigned long long*>(seed));
  for (int64_t group = thread_index(); group * 8 < values; group += static_cast<int64_t>(gridDim.x) * kThreads) {
    float v[8];
    if (vector)
      load8_until<type, true>(x, group * 8, values, 0.0f, v);
    else
      load8_until<type, false>(x, group * 8, values, 0.0f, v);
    const Words noise = noise_group(key, Stream::rounding, static_cast<uint64_t>(group));
    const int count = static_cast<int>(values - group * 8 < 8 ? values - group * 8 : 8);
    uint64_t eight = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint64_t code = j < count ? shared.code(slope_of<kind>(v[j]), low, bins, last, top, noise_of(noise, j)) : 0;
      eight |= code << (j * bits);
    }
    store_codes(bits, codes, group, eight, count);
  }
}

/// Eight values a thread; `vector`: x stands at a multiple of 16 bytes, and the codes at one of 8.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    decode_table(const uint8_t* codes, int64_t values, int bits, const float* table, void* x, bool vector) {
  __shared__ float shared[kMostLevels];
  for (int k = threadIdx.x; k < 1 << bits; k += kThreads) shared[k] = table[k];
  __syncthreads();
  const int64_t first = thread_index() * 8;
  if (first >= values) return;
  if (vector && values - first >= 8) {
    const uint64_t eight = load_eight(bits, codes, first / 8);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = shared[eight >> (j * bits) & ((1u << bits) - 1)];
    return write8<type, true>(x, first, v);
  }
  for (int j = 0; j < 8 && first + j < values; ++j) store(x, type, first + j, shared[get_code(codes, bits, first + j)]);
}

}  // namespace

void slope_encode(SlopeOf kind, const void* x, DType type, int64_t values, const float* levels, int bits, const uint64_t* seed,
                  uint8_t* codes, void* stream) {
  if (values == 0) return;
  const unsigned blocks = std::min(blocks_for(ceil_div(values, 8)), kMostEncoders);
  const auto launch = [&](auto k, auto t) {
    launch_kernel("slope_encode", stream, {blocks}, encode_slopes<k(), t()>, x, values, levels, bits, seed, codes, is_aligned(x));
  };
  with_type(type, [&](auto t) {
    switch (kind) {
      case SlopeOf::gelu: return launch(std::integral_constant<SlopeOf, SlopeOf::gelu>(), t);
      case SlopeOf::gelu_tanh: return launch(std::integral_constant<SlopeOf, SlopeOf::gelu_tanh>(), t);
      case SlopeOf::silu: return launch(std::integral_constant<SlopeOf, SlopeOf::silu>(), t);
      case SlopeOf::mish: return launch(std::integral_constant<SlopeOf, SlopeOf::mish>(), t);
    }
  });
}

void table_decode(const uint8_t* codes, int64_t values, int bits, const float* table, void* x, DType type, void* stream) {
  if (values == 0) return;
  const bool vector = is_aligned(x) && is_aligned(codes, 8);
  with_type(type, [&](auto t) {
    launch_kernel("table_decode", stream, {blocks_for(ceil_div(values, 8))}, decode_table<t()>, codes, values, bits, table, x, vector);
  });
}

}  // namespace satchel::cuda
