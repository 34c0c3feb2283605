// Bit masks, integers in the fewest bits, and the seed that a captured graph moves on.
#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads) mask_groups(const void* x, int64_t values, uint8_t* mask) {
  const int64_t group = thread_index();
  if (group * 8 >= values) return;
  float v[8];
  load8_until<type, vector>(x, group * 8, values, 0.0f, v);
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) bits |= (flush(v[j]) > 0.0f ? 1u : 0u) << j;
  mask[group] = static_cast<uint8_t>(bits);
}

/// Four bits as four bytes of 0 or 1, and four bytes that are 0 or not as bits: the factors move bit j to bit 8·j, and bit 8·j to bit 28 +
/// j; no two of their products meet.
__device__ inline uint32_t bytes_of(uint32_t four) { return four * 0x00204081u & 0x01010101u; }
__device__ inline uint32_t bits_of_bytes(uint32_t four) {
  four |= four >> 4;  // bit 0 of a byte becomes the or of its eight
  four |= four >> 2;
  four |= four >> 1;
  return (four & 0x01010101u) * 0x10204080u >> 28;
}

/// Eight flags a thread; `whole`: the flags' address is a multiple of 8 bytes.
__global__ void __launch_bounds__(kThreads) mask_flags_of(const uint8_t* flags, int64_t values, uint8_t* mask, bool whole) {
  const int64_t group = thread_index();
  if (group * 8 >= values) return;
  uint32_t bits = 0;
  if (whole && group * 8 + 8 <= values) {
    const uint2 eight = __ldg(reinterpret_cast<const uint2*>(flags) + group);
    bits = bits_of_bytes(eight.x) | bits_of_bytes(eight.y) << 4;
  } else {
    for (int j = 0; j < 8 && group * 8 + j < values; ++j) bits |= (flags[group * 8 + j] != 0 ? 1u : 0u) << j;
  }
  mask[group] = static_cast<uint8_t>(bits);
}

__global__ void __launch_bounds__(kThreads) unmask_values(const uint8_t* mask, int64_t values, uint8_t* flags, bool whole) {
  const int64_t group = thread_index();
  if (group * 8 >= values) return;
  const uint32_t bits = mask[group];
  if (whole && group * 8 + 8 <= values) {
    *reinterpret_cast<uint2*>(flags + group * 8) = make_uint2(bytes_of(bits & 15u), bytes_of(bits >> 4));
    return;
  }
  for (int j = 0; j < 8 && group * 8 + j < values; ++j) flags[group * 8 + j] = bits >> j & 1;
}

/// Byte k of a group of 8 values, a byte a thread.
__global__ void __launch_bounds__(kThreads)
    narrow_bytes(const int64_t* x, int64_t values, int64_t least, int bits, uint8_t* codes, int64_t bytes) {
  const int64_t at = thread_index();
  if (at >= bytes) return;
  uint32_t byte = 0;
  const int64_t first_bit = at * 8;
  for (int64_t i = first_bit / bits; i < values && i * bits < first_bit + 8; ++i) {
    const uint64_t v = static_cast<uint64_t>(x[i]) - static_cast<uint64_t>(least);
    const int64_t shift = first_bit - i * bits;  // bits of the value that lie before this byte
    byte |= static_cast<uint32_t>(shift >= 0 ? v >> shift : v << -shift) & 0xffu;
  }
  codes[at] = static_cast<uint8_t>(byte);
}

__global__ void __launch_bounds__(kThreads) widen_values(const uint8_t* codes, int64_t values, int64_t least, int bits, int64_t* x) {
  const int64_t i = thread_index();
  if (i >= values) return;
  uint64_t v = 0;
  int have = 0;
  for (int64_t bit = i * bits; have < bits;) {
    const int shift = static_cast<int>(bit % 8), take = min(8 - shift, bits - have);
    v |= static_cast<uint64_t>(codes[bit / 8] >> shift & ((1 << take) - 1)) << have;
    have += take;
    bit += take;
  }
  x[i] = static_cast<int64_t>(v + static_cast<uint64_t>(least));
}

__global__ void next_seed(uint64_t* seed) { *seed = derive_seed(*seed, 1, 0, 0); }

}  // namespace

void mask(const void* x, DType type, int64_t values, uint8_t* mask, StreamHandle stream) {
  if (values == 0) return;
  with_type(type, [&](auto t) {
    const auto kernel = is_aligned(x) ? mask_groups<t(), true> : mask_groups<t(), false>;
    launch_kernel("mask", stream, {blocks_for(ceil_div(values, 8))}, kernel, x, values, mask);
  });
}

void mask_flags(const uint8_t* flags, int64_t values, uint8_t* mask, StreamHandle stream) {
  if (values == 0) return;
  launch_kernel("mask", stream, {blocks_for(ceil_div(values, 8))}, mask_flags_of, flags, values, mask, is_aligned(flags, 8));
}

void unmask(const uint8_t* mask, int64_t values, uint8_t* flags, StreamHandle stream) {
  if (values == 0) return;
  launch_kernel("unmask", stream, {blocks_for(ceil_div(values, 8))}, unmask_values, mask, values, flags, is_aligned(flags, 8));
}

void narrow(const int64_t* x, int64_t values, int64_t least, int bits, uint8_t* codes, StreamHandle stream) {
  const int64_t bytes = code_bytes(values, bits);
  if (bytes == 0) return;
  launch_kernel("narrow", stream, {blocks_for(bytes)}, narrow_bytes, x, values, least, bits, codes, bytes);
}

void widen(const uint8_t* codes, int64_t values, int64_t least, int bits, int64_t* x, StreamHandle stream) {
  if (values == 0) return;
  launch_kernel("widen", stream, {blocks_for(values)}, widen_values, codes, values, least, bits, x);
}

void advance_seed(uint64_t* seed, StreamHandle stream) { launch_kernel("advance_seed", stream, {1, 1}, next_seed, seed); }

}  // namespace satchel::cuda
