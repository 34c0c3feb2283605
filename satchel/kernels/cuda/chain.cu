// Passes over values with a channel each: the chain of kernels/chain.h, and the last step of a norm's gradient from decoded values. Eight
// values a thread, so that one draw of noise and one byte of bits serve them all. Values are fp32, bf16 or f16 in memory and fp32 in
// between.
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

/// Numbers of the channels of eight values, the first of which is of channel c. `neighbours`: 8 divides the channels, so that they never
/// wrap around, and the numbers start at a multiple of 16 bytes.
template <bool neighbours>
__device__ inline void channel_numbers(const float* of, int64_t c, int64_t channels, float (&to)[8]) {
  if constexpr (neighbours) {
    load8<DType::f32>(of, c, to);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j, c = c + 1 < channels ? c + 1 : 0) to[j] = __ldg(of + c);
  }
}

/// Which of values i … i + 7 are kept, a bit each.
__device__ inline uint32_t kept_bits(const Chain& c, const uint64_t* seed, int64_t i) {
  if (c.drop == 0) return 0xffu;
  const uint64_t key = __ldg(reinterpret_cast<const unsigned long long*>(seed));
  const Words words = noise_group(key, Stream::dropout, static_cast<uint64_t>((c.origin + i) / kGroup));
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) bits |= (noise_of(words, j) >= c.drop ? 1u : 0u) << j;
  return bits;
}

__device__ inline uint32_t positive_bits(const float (&v)[8]) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) bits |= (v[j] > 0.0f ? 1u : 0u) << j;
  return bits;
}

/// y in the place of eight x; null γ: x itself.
struct Affine {
  Chain c;
  const float *gamma, *beta;

  bool fits() const { return gamma == nullptr || (c.channels % 8 == 0 && is_aligned(gamma) && is_aligned(beta)); }
  template <bool neighbours>
  __device__ inline void apply(int64_t i, float (&v)[8]) const {
    if (gamma == nullptr) return;
    const int64_t first = channel_of(c.origin + i, c.channels);
    float scale[8], shift[8];
    channel_numbers<neighbours>(gamma, first, c.channels, scale);
    channel_numbers<neighbours>(beta, first, c.channels, shift);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = fmaf(scale[j], v[j], shift[j]);
  }
};

// What is made of values i … i + 7: apply(). kChannels: it reads numbers of channels. kWrites: values, in the place of those read.

/// The chain forward, or a gradient back through it.
template <bool forward>
struct Through {
  static constexpr bool kChannels = forward, kWrites = true;
  Affine affine;  // forward
  const uint8_t* on;
  const uint64_t* seed;

  template <DType, bool, bool neighbours>
  __device__ inline void apply(int64_t i, int64_t, float (&v)[8]) const {
    const Chain& c = affine.c;
    if constexpr (forward) affine.apply<neighbours>(i, v);
    const uint32_t bits = on != nullptr ? __ldg(on + i / 8) : forward ? positive_bits(v) : 0xffu, kept = kept_bits(c, seed, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float factor = chain_factor(c, bits >> j & 1, kept >> j & 1);
      v[j] = forward ? chain_output(v[j], factor) : v[j] * factor;
    }
  }
};

struct Mask {
  static constexpr bool kChannels = true, kWrites = false;
  Affine affine;
  uint8_t* on;

  template <DType, bool, bool neighbours>
  __device__ inline void apply(int64_t i, int64_t values, float (&v)[8]) const {
    affine.apply<neighbours>(i, v);
    const int64_t left = values - i;
    on[i / 8] = static_cast<uint8_t>(positive_bits(v) & (left >= 8 ? 0xffu : (1u << left) - 1));  // β alone may be positive
  }
};

struct NormBackward {
  static constexpr bool kChannels = true, kWrites = true;
  const void* x;
  int64_t channels;
  ChannelLine line;

  template <DType type, bool vector, bool neighbours>
  __device__ inline void apply(int64_t i, int64_t values, float (&v)[8]) const {
    const Eight<type> other = read8_until<type, vector>(x, i, values);
    const int64_t first = channel_of(i, channels);
    float scale[8], along[8], offset[8];
    channel_numbers<neighbours>(line.scale, first, channels, scale);
    channel_numbers<neighbours>(line.along, first, channels, along);
    channel_numbers<neighbours>(line.offset, first, channels, offset);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = fmaf(scale[j], v[j], fmaf(along[j], other[j], offset[j]));
  }
};

template <class Made, DType type, bool vector, bool neighbours>
__global__ void __launch_bounds__(kThreads) make_groups(const __grid_constant__ Made made, const void* x, int64_t values, void* to) {
  const int64_t i = thread_index() * 8;
  if (i >= values) return;
  float v[8];
  to_floats(read8_until<type, vector>(x, i, values), v);
  made.template apply<type, vector, neighbours>(i, values, v);
  if constexpr (Made::kWrites) write8_within<type, vector>(to, i, 0, values, v);
}

/// `vector`: values may be read and written 16 bytes at a time. `neighbours`: so may channel_numbers().
template <class Made>
void make(const char* op, const Made& made, const void* x, int64_t values, void* to, DType type, bool vector, bool neighbours,
          StreamHandle stream) {
  if (values == 0) return;
  with_values(type, vector, [&](auto t, auto by_16) {
    auto* kernel = make_groups<Made, t(), by_16(), false>;
    if constexpr (Made::kChannels && by_16()) kernel = neighbours ? make_groups<Made, t(), true, true> : kernel;
    launch_kernel(op, stream, {blocks_for(ceil_div(values, 8))}, kernel, made, x, values, to);
  });
}

/// 32 codes a thread: `bits` words in, one word out; one after the other where there are fewer or, not `aligned`, no words.
template <int bits>
__global__ void __launch_bounds__(kThreads) side_on_words(const uint8_t* codes, uint32_t off, int64_t values, bool aligned, uint8_t* on) {
  const int64_t at = thread_index(), left = values - at * 32;
  if (left <= 0) return;
  uint32_t in[bits + 1] = {}, out = 0;
  if (aligned && left >= 32) {
#pragma unroll
    for (int k = 0; k < bits; ++k) in[k] = __ldg(reinterpret_cast<const uint32_t*>(codes) + at * bits + k);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int word = j * bits / 32, shift = j * bits % 32;
      const uint32_t code = __funnelshift_r(in[word], in[word + 1], shift) & ((1u << bits) - 1);
      out |= (code >= off ? 1u : 0u) << j;
    }
    reinterpret_cast<uint32_t*>(on)[at] = out;
    return;
  }
#pragma unroll 1
  for (int j = 0; j < 32 && j < left; ++j) out |= (get_code(codes, bits, at * 32 + j) >= off ? 1u : 0u) << j;
  for (int k = 0; k < 4 && k * 8 < left; ++k) on[at * 4 + k] = static_cast<uint8_t>(out >> (8 * k));
}

}  // namespace

void chain(const Chain& c, const void* x, DType type, const float* gamma, const float* beta, const uint8_t* on, const uint64_t* seed,
           void* z, StreamHandle stream) {
  const Affine affine = {c, gamma, beta};
  make("chain", Through<true>{affine, on, seed}, x, c.values, z, type, is_aligned(x) && is_aligned(z), affine.fits(), stream);
}

void chain_back(const Chain& c, const void* g, DType type, const uint8_t* on, const uint64_t* seed, void* out, StreamHandle stream) {
  make("chain_back", Through<false>{{c, nullptr, nullptr}, on, seed}, g, c.values, out, type, is_aligned(g) && is_aligned(out), false,
       stream);
}

void chain_on(const Chain& c, const void* x, DType type, const float* gamma, const float* beta, uint8_t* on, StreamHandle stream) {
  const Affine affine = {c, gamma, beta};
  make("chain_on", Mask{affine, on}, x, c.values, nullptr, type, is_aligned(x), affine.fits(), stream);
}

void norm_rows_back(void* g, const void* x, DType type, int64_t rows, int64_t channels, const ChannelLine& line, StreamHandle stream) {
  const bool neighbours = channels % 8 == 0 && is_aligned(line.scale) && is_aligned(line.along) && is_aligned(line.offset);
  const int64_t values = rows * channels;
  make("norm", NormBackward{x, channels, line}, g, values, g, type, is_aligned(g) && is_aligned(x), neighbours, stream);
}

void side_on(const SideCode& code, const uint8_t* codes, uint8_t* on, StreamHandle stream) {
  const int64_t values = code.grid.values;
  if (values == 0) return;
  const int bits = code.table.bits;
  const auto kernel = bits == 2 ? side_on_words<2> : bits == 3 ? side_on_words<3> : side_on_words<4>;
  launch_kernel("side_on", stream, {blocks_for(ceil_div(values, 32))}, kernel, codes, static_cast<uint32_t>(code.table.off), values,
                is_aligned(codes, 4) && is_aligned(on, 4), on);
}

}  // namespace satchel::cuda
