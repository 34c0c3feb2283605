// Codes of slopes: a thread takes 8 values, a warp's noise comes from device memory's seed, the levels stand in shared memory.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/dispatch.h"
#include "satchel/kernels/slope.h"

namespace satchel::cuda {
namespace {

template <Smooth kind, DType type, int bits>
__global__ void __launch_bounds__(kThreads)
    encode_slopes(const void* x, int64_t values, const float* levels, const uint64_t* seed, uint8_t* codes, bool vector) {
  __shared__ float shared[1 << bits];
  for (int k = threadIdx.x; k < 1 << bits; k += kThreads) shared[k] = levels[k];
  __syncthreads();
  const int64_t group = thread_index();
  if (group * 8 >= values) return;
  float v[8];
  if (vector)
    load8_until<type, true>(x, group * 8, values, 0.0f, v);
  else
    load8_until<type, false>(x, group * 8, values, 0.0f, v);
  const Words noise = noise_group(__ldg(reinterpret_cast<const unsigned long long*>(seed)), Stream::rounding, static_cast<uint64_t>(group));
  const int count = static_cast<int>(values - group * 8 < 8 ? values - group * 8 : 8);
  uint64_t eight = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint64_t code = j < count ? level_code(slope<kind>(v[j]), shared, bits, noise_of(noise, j)) : 0;
    eight |= code << (j * bits);
  }
  store_codes<bits>(codes, group, eight, count);
}

template <DType type, int bits>
__global__ void __launch_bounds__(kThreads) decode_table(const uint8_t* codes, int64_t values, const float* table, void* x, bool vector) {
  __shared__ float shared[1 << bits];
  for (int k = threadIdx.x; k < 1 << bits; k += kThreads) shared[k] = table[k];
  __syncthreads();
  const int64_t first = thread_index() * 8;
  if (first >= values) return;
  const int count = static_cast<int>(values - first < 8 ? values - first : 8);
  const int bytes = (count * bits + 7) / 8;
  uint64_t eight = 0;
  for (int k = 0; k < bytes; ++k) eight |= static_cast<uint64_t>(__ldg(codes + first / 8 * bits + k)) << (8 * k);
  float v[2][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j / 4][j % 4] = shared[eight >> (j * bits) & ((1u << bits) - 1)];
  if (vector && count == 8) {
    store4<type>(x, first, v[0]);
    store4<type>(x, first + 4, v[1]);
    return;
  }
  for (int j = 0; j < count; ++j) store(x, type, first + j, v[j / 4][j % 4]);
}

}  // namespace

void slope_encode(Smooth kind, const void* x, DType type, int64_t values, const float* levels, int bits, const uint64_t* seed,
                  uint8_t* codes, void* stream) {
  if (values == 0) return;
  const unsigned blocks = blocks_for(ceil_div(values, 8));
  const bool vector = is_aligned(x);
  const auto launch = [&](auto k, auto t, auto b) {
    encode_slopes<k(), t(), b()><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, values, levels, seed, codes, vector);
  };
  with_type(type, [&](auto t) {
    with_bits(bits, [&](auto b) {
      switch (kind) {
        case Smooth::gelu: return launch(std::integral_constant<Smooth, Smooth::gelu>(), t, b);
        case Smooth::gelu_tanh: return launch(std::integral_constant<Smooth, Smooth::gelu_tanh>(), t, b);
        case Smooth::silu: return launch(std::integral_constant<Smooth, Smooth::silu>(), t, b);
        case Smooth::mish: return launch(std::integral_constant<Smooth, Smooth::mish>(), t, b);
      }
    });
  });
  check_launch("slope_encode");
}

void table_decode(const uint8_t* codes, int64_t values, int bits, const float* table, void* x, DType type, void* stream) {
  if (values == 0) return;
  const unsigned blocks = blocks_for(ceil_div(values, 8));
  with_type(type, [&](auto t) {
    with_bits(bits, [&](auto b) {
      decode_table<t(), b()><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(codes, values, table, x, is_aligned(x));
    });
  });
  check_launch("table_decode");
}

}  // namespace satchel::cuda
