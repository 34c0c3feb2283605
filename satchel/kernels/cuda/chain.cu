// The chain of kernels/chain.h: eight values a thread, so that one draw of noise and one byte of bits serve them all.
// Values are fp32, bf16 or f16 in memory and fp32 in between.
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

/// Channel of a group's first value, then one after the other.
struct ChannelOf {
  int64_t channel, channels;

  __device__ inline ChannelOf(const Chain& c, int64_t i) : channels(c.channels) {
    const int64_t n = c.origin + i;
    channel = n - quotient(n, c.channels) * c.channels;
  }
  __device__ inline void next() { channel = channel + 1 < channels ? channel + 1 : 0; }
};

/// y of values i … i + 7. `affine_vector`: eight neighbouring channels never wrap around, and γ and β are aligned.
template <bool affine_vector>
__device__ inline void apply_affine(const Chain& c, const float* gamma, const float* beta, int64_t i, float (&v)[8]) {
  if (gamma == nullptr) return;
  ChannelOf at(c, i);
  if constexpr (affine_vector) {
    float scale[8], shift[8];
    load8<DType::f32>(gamma, at.channel, scale);
    load8<DType::f32>(beta, at.channel, shift);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = fmaf(scale[j], v[j], shift[j]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j, at.next()) v[j] = fmaf(__ldg(gamma + at.channel), v[j], __ldg(beta + at.channel));
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

template <DType type, bool vector>
__device__ inline void read_group(const void* x, int64_t i, int64_t end, float (&v)[8]) {
  const Eight<type> eight = read8_until<type, vector>(x, i, end);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = eight[j];
}

template <DType type, bool vector, bool affine_vector>
__global__ void __launch_bounds__(kThreads) chain_groups(const __grid_constant__ Chain c, const void* x, const float* gamma,
                                                         const float* beta, const uint8_t* on, const uint64_t* seed, void* z) {
  const int64_t i = thread_index() * 8;
  if (i >= c.values) return;
  float v[8];
  read_group<type, vector>(x, i, c.values, v);
  apply_affine<affine_vector>(c, gamma, beta, i, v);
  const uint32_t bits = on == nullptr ? positive_bits(v) : __ldg(on + i / 8), kept = kept_bits(c, seed, i);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = chain_output(v[j], chain_factor(c, bits >> j & 1, kept >> j & 1));
  write8_within<type, vector>(z, i, 0, c.values, v);
}

template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads)
    back_groups(const __grid_constant__ Chain c, const void* g, const uint8_t* on, const uint64_t* seed, void* out) {
  const int64_t i = thread_index() * 8;
  if (i >= c.values) return;
  float v[8];
  read_group<type, vector>(g, i, c.values, v);
  const uint32_t bits = on == nullptr ? 0xffu : __ldg(on + i / 8), kept = kept_bits(c, seed, i);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = v[j] * chain_factor(c, bits >> j & 1, kept >> j & 1);
  write8_within<type, vector>(out, i, 0, c.values, v);
}

template <DType type, bool vector, bool affine_vector>
__global__ void __launch_bounds__(kThreads)
    on_groups(const __grid_constant__ Chain c, const void* x, const float* gamma, const float* beta, uint8_t* on) {
  const int64_t i = thread_index() * 8;
  if (i >= c.values) return;
  float v[8];
  read_group<type, vector>(x, i, c.values, v);
  apply_affine<affine_vector>(c, gamma, beta, i, v);
  const uint32_t exist = c.values - i >= 8 ? 0xffu : (1u << (c.values - i)) - 1;  // β alone may be positive
  on[i / 8] = static_cast<uint8_t>(positive_bits(v) & exist);
}

/// 32 codes a thread: `bits` words in, one word out.
template <int bits>
__global__ void __launch_bounds__(kThreads) side_on_words(const uint8_t* codes, uint32_t off, int64_t words, uint8_t* on) {
  const int64_t at = thread_index();
  if (at >= words) return;
  uint32_t in[bits + 1] = {}, out = 0;
#pragma unroll
  for (int k = 0; k < bits; ++k) in[k] = __ldg(reinterpret_cast<const uint32_t*>(codes) + at * bits + k);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int word = j * bits / 32, shift = j * bits % 32;
    const uint32_t code = __funnelshift_r(in[word], in[word + 1], shift) & ((1u << bits) - 1);
    out |= (code >= off ? 1u : 0u) << j;
  }
  reinterpret_cast<uint32_t*>(on)[at] = out;
}

/// Any codes from value `first` on, a multiple of 8: eight a thread.
__global__ void __launch_bounds__(kThreads)
    side_on_groups(const uint8_t* codes, int bits, uint32_t off, int64_t first, int64_t values, uint8_t* on) {
  const int64_t i = first + thread_index() * 8;
  if (i >= values) return;
  uint32_t out = 0;
  for (int j = 0; j < 8 && i + j < values; ++j) out |= (get_code(codes, bits, i + j) >= off ? 1u : 0u) << j;
  on[i / 8] = static_cast<uint8_t>(out);
}

bool affine_fits(const Chain& c, const float* gamma, const float* beta) {
  return gamma == nullptr || (c.channels % 8 == 0 && is_aligned(gamma) && is_aligned(beta));
}

}  // namespace

void chain(const Chain& c, const void* x, DType type, const float* gamma, const float* beta, const uint8_t* on, const uint64_t* seed,
           void* z, StreamHandle stream) {
  if (c.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_for(ceil_div(c.values, 8));
  const bool affine = affine_fits(c, gamma, beta);
  with_values(type, is_aligned(x) && is_aligned(z), [&](auto t, auto vector) {
    if (vector() && affine)
      chain_groups<t(), vector(), vector()><<<blocks, kThreads, 0, s>>>(c, x, gamma, beta, on, seed, z);
    else
      chain_groups<t(), vector(), false><<<blocks, kThreads, 0, s>>>(c, x, gamma, beta, on, seed, z);
  });
  check_launch("chain");
}

void chain_back(const Chain& c, const void* g, DType type, const uint8_t* on, const uint64_t* seed, void* out, StreamHandle stream) {
  if (c.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_for(ceil_div(c.values, 8));
  with_values(type, is_aligned(g) && is_aligned(out),
              [&](auto t, auto vector) { back_groups<t(), vector()><<<blocks, kThreads, 0, s>>>(c, g, on, seed, out); });
  check_launch("chain_back");
}

void chain_on(const Chain& c, const void* x, DType type, const float* gamma, const float* beta, uint8_t* on, StreamHandle stream) {
  if (c.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = blocks_for(ceil_div(c.values, 8));
  const bool affine = affine_fits(c, gamma, beta);
  with_values(type, is_aligned(x), [&](auto t, auto vector) {
    if (vector() && affine)
      on_groups<t(), vector(), vector()><<<blocks, kThreads, 0, s>>>(c, x, gamma, beta, on);
    else
      on_groups<t(), vector(), false><<<blocks, kThreads, 0, s>>>(c, x, gamma, beta, on);
  });
  check_launch("chain_on");
}

void side_on(const SideCode& code, const uint8_t* codes, uint8_t* on, StreamHandle stream) {
  const int64_t values = code.grid.values;
  if (values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int bits = code.table.bits;
  const auto off = static_cast<uint32_t>(code.table.off);
  const int64_t words = bits >= 2 && bits <= 4 && is_aligned(codes, 4) && is_aligned(on, 4) ? values / 32 : 0;
  if (words > 0) {
    if (bits == 2)
      side_on_words<2><<<blocks_for(words), kThreads, 0, s>>>(codes, off, words, on);
    else if (bits == 3)
      side_on_words<3><<<blocks_for(words), kThreads, 0, s>>>(codes, off, words, on);
    else
      side_on_words<4><<<blocks_for(words), kThreads, 0, s>>>(codes, off, words, on);
    check_launch("side_on");
  }
  if (words * 32 == values) return;
  side_on_groups<<<blocks_for(ceil_div(values - words * 32, 8)), kThreads, 0, s>>>(codes, bits, off, words * 32, values, on);
  check_launch("side_on");
}

}  // namespace satchel::cuda
