// What the kernels share: vector loads and stores of values, codes in groups of 8, warp reductions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "satchel/core/layout.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/kernels/cuda/launch.h"
#include "satchel/kernels/dispatch.h"

namespace satchel::cuda {

constexpr int kThreads = 256;

inline unsigned blocks_for(int64_t threads) { return grid_size(ceil_div(threads, kThreads)); }

inline bool is_aligned(const void* p, uintptr_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline void check_aligned(std::initializer_list<const void*> pointers, const char* op) {
  for (const void* p : pointers) {
    if (!is_aligned(p)) fail(op, "activations, codes and headers must start at a multiple of 16");
  }
}

/// Thread blocks of a launch, threads of each, and bytes of shared memory beside those that the kernel declares.
struct LaunchSize {
  dim3 blocks;
  unsigned threads = kThreads;
  size_t shared = 0;
};

/// Starts a kernel; throws if the launch is refused.
template <class... P>
void launch_kernel(const char* op, StreamHandle stream, const LaunchSize& size, void (*kernel)(P...),
                   const std::type_identity_t<P>&... args) {
  kernel<<<size.blocks, size.threads, size.shared, static_cast<cudaStream_t>(stream)>>>(args...);
  check_launch(op);
}

/// An address in device memory that stays in its register: the compiler would work it out anew at every turn of a loop.
template <class T>
__device__ inline T* held(T* p) {
  asm volatile("// held" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ inline int64_t channel_of(int64_t value, int64_t channels) { return value - quotient(value, channels) * channels; }

/// How many of a group's eight values exist.
__device__ inline int count_of(int64_t group, int64_t values) {
  const int64_t left = values - group * 8;
  return left >= 8 ? 8 : left <= 0 ? 0 : static_cast<int>(left);
}

__device__ inline float float_of_f16(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

/// Eight values from an address that is a multiple of 16 bytes.
template <DType type>
__device__ inline void load8(const void* x, int64_t i, float (&v)[8]) {
  if constexpr (type == DType::f32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(x) + i);
    const float4 a = __ldg(p), b = __ldg(p + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + i));
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint16_t h = static_cast<uint16_t>(w[j / 2] >> (j % 2 * 16));
      v[j] = type == DType::f16 ? float_of_f16(h) : from_bf16(h);
    }
  }
}

/// Values i … i + 7, those past `end` as `pad`.
template <DType type, bool vector>
__device__ inline void load8_until(const void* x, int64_t i, int64_t end, float pad, float (&v)[8]) {
  if (vector && i + 8 <= end) return load8<type>(x, i, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = i + j < end ? load(x, type, i + j) : pad;
}

/// A value of a type that is known when the kernel runs.
__device__ inline float load_any(const void* x, DType type, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(x)[i];
  const uint16_t h = static_cast<const uint16_t*>(x)[i];
  return type == DType::f16 ? float_of_f16(h) : from_bf16(h);
}

/// Four values to an address that is a multiple of 4 of them.
template <DType type>
__device__ inline void store4(void* x, int64_t i, const float (&v)[4]) {
  if constexpr (type == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(x) + i) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    uint16_t h[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) h[j] = type == DType::f16 ? to_f16(v[j]) : to_bf16(v[j]);
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(x) + i) =
        make_uint2(h[0] | static_cast<uint32_t>(h[1]) << 16, h[2] | static_cast<uint32_t>(h[3]) << 16);
  }
}

/// The `bits` bytes of 8 codes; only the first `count` codes' bytes exist.
template <int bits>
__device__ inline void store_codes(uint8_t* codes, int64_t group, uint64_t eight, int count) {
  uint8_t* out = codes + group * bits;
  if (count == 8) {
    if constexpr (bits == 1)
      *out = static_cast<uint8_t>(eight);
    else if constexpr (bits == 2)
      *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(eight);
    else if constexpr (bits == 4)
      *reinterpret_cast<uint32_t*>(out) = static_cast<uint32_t>(eight);
    else if constexpr (bits == 8)
      *reinterpret_cast<uint2*>(out) = make_uint2(static_cast<uint32_t>(eight), static_cast<uint32_t>(eight >> 32));
    else if constexpr (bits == 6) {
#pragma unroll
      for (int k = 0; k < 3; ++k) reinterpret_cast<uint16_t*>(out)[k] = static_cast<uint16_t>(eight >> (16 * k));
    } else {
#pragma unroll
      for (int k = 0; k < bits; ++k) out[k] = static_cast<uint8_t>(eight >> (8 * k));
    }
  } else {
    const int bytes = (count * bits + 7) / 8;
    for (int k = 0; k < bytes; ++k) out[k] = static_cast<uint8_t>(eight >> (8 * k));
  }
}

/// … of bits known when the kernel runs.
__device__ inline void store_codes(int bits, uint8_t* codes, int64_t group, uint64_t eight, int count) {
  if (count == 8) return with_bits(bits, [&](auto known) { store_codes<known()>(codes, group, eight, 8); });
  const int bytes = (count * bits + 7) / 8;
  for (int k = 0; k < bytes; ++k) codes[group * bits + k] = static_cast<uint8_t>(eight >> (8 * k));
}

/// The seed, read from device memory into the warp's uniform registers: its round keys then cost no vector instruction. Every
/// thread of the warp must call this.
struct UniformSeed {
  uint32_t k0, k1;

  __device__ inline explicit UniformSeed(const uint64_t* seed, bool is_read = true) {
    const uint64_t s = is_read ? __ldg(reinterpret_cast<const unsigned long long*>(seed)) : 0;
    k0 = __reduce_or_sync(~0u, static_cast<uint32_t>(s));
    k1 = __reduce_or_sync(~0u, static_cast<uint32_t>(s >> 32));
  }
  /// The keys of a round.
  __device__ inline uint2 operator()(uint32_t round) const { return make_uint2(k0 + round * kPhiloxW0, k1 + round * kPhiloxW1); }
};

__device__ inline void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  asm("{.reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p;}" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}

/// What load_four() asks of the codes' address.
inline uintptr_t code_alignment(int bits) { return bits == 8 ? 4 : bits == 4 ? 2 : 1; }

/// Four codes from bit 4·bits·quad on.
template <int bits>
__device__ inline uint32_t load_four(const uint8_t* codes, int64_t quad) {
  if constexpr (bits == 2) return __ldg(codes + quad);
  if constexpr (bits == 4) return __ldg(reinterpret_cast<const uint16_t*>(codes) + quad);
  if constexpr (bits == 8) return __ldg(reinterpret_cast<const uint32_t*>(codes) + quad);
  const int64_t at = quad * bits / 2;  // 4·bits bits are bits/2 bytes: an odd quad may start in the middle of one
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < (bits + 1) / 2; ++k) word |= static_cast<uint32_t>(__ldg(codes + at + k)) << (8 * k);
  return quad * bits % 2 != 0 ? word >> 4 : word;
}

/// Eight codes from bit 8·bits·group on, of an address that is a multiple of 8.
template <int bits>
__device__ inline uint64_t load_eight(const uint8_t* codes, int64_t group) {
  if constexpr (bits == 1) return __ldg(codes + group);
  if constexpr (bits == 2) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  if constexpr (bits == 4) return __ldg(reinterpret_cast<const uint32_t*>(codes) + group);
  if constexpr (bits == 8) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(codes) + group);
    return w.x | static_cast<uint64_t>(w.y) << 32;
  }
  uint64_t eight = 0;
#pragma unroll
  for (int k = 0; k < bits; ++k) eight |= static_cast<uint64_t>(__ldg(codes + group * bits + k)) << (8 * k);
  return eight;
}

/// … of bits known when the kernel runs.
__device__ inline uint64_t load_eight(int bits, const uint8_t* codes, int64_t group) {
  uint64_t eight = 0;
  with_bits(bits, [&](auto known) { eight = load_eight<known()>(codes, group); });
  return eight;
}

/// One of Philox's rounds.
__device__ inline Words philox_round(const Words& c, uint32_t k0, uint32_t k1) {
  uint32_t high0, low0, high1, low1;
  multiply_wide(c.w[0], kPhiloxM0, high0, low0);
  multiply_wide(c.w[2], kPhiloxM1, high1, low1);
  return {high1 ^ c.w[1] ^ k0, low1, high0 ^ c.w[3] ^ k1, low0};
}

/// noise_group() of core/noise.h; `key` gives the two keys of a round.
template <class F>
__device__ inline Words noise_of_group(Stream stream, uint64_t group, F&& key) {
  Words c = {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), static_cast<uint32_t>(stream), 0};
#pragma unroll
  for (int round = 0; round < kNoiseRounds; ++round) {
    const uint2 k = key(round);
    c = philox_round(c, k.x, k.y);
  }
  return c;
}

/// What rounds to nearest.
__device__ inline Words nearest_noise() {
  constexpr uint32_t kBoth = kNearestNoise | kNearestNoise << 16;
  return {kBoth, kBoth, kBoth, kBoth};
}

/// Noise of a group of 8 values.
__device__ inline Words group_noise(UniformSeed seed, Rounding rounding, int64_t group) {
  if (rounding == Rounding::nearest) return nearest_noise();
  return noise_of_group(Stream::rounding, group, seed);
}

/// The round keys of a seed in shared memory, for kernels that draw at every step: a read brings two rounds' keys, where a seed in
/// registers costs an addition a key.
struct RoundKeys {
  uint4 pair[ceil_div(kNoiseRounds, 2)];

  /// The caller synchronises.
  __device__ inline void fill(const uint64_t* seed) {
    const uint32_t own = threadIdx.x;
    if (own >= sizeof(pair) / sizeof(uint4)) return;
    const uint64_t s = __ldg(reinterpret_cast<const unsigned long long*>(seed));
    const uint32_t k0 = static_cast<uint32_t>(s) + 2 * own * kPhiloxW0, k1 = static_cast<uint32_t>(s >> 32) + 2 * own * kPhiloxW1;
    pair[own] = make_uint4(k0, k1, k0 + kPhiloxW0, k1 + kPhiloxW1);
  }
  /// Read every time anew: they would fill registers.
  __device__ inline uint4 of(int rounds) const {
    uint4 k;
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(pair + rounds));
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(k.x), "=r"(k.y), "=r"(k.z), "=r"(k.w) : "r"(from) : "memory");
    return k;
  }
};

__device__ inline Words rounding_noise(const RoundKeys& keys, uint64_t group) {
  uint4 k = {};
  return noise_of_group(Stream::rounding, group, [&](int round) {
    if (round % 2 == 0) k = keys.of(round / 2);
    return round % 2 == 0 ? make_uint2(k.x, k.y) : make_uint2(k.z, k.w);
  });
}

__device__ inline Words group_noise(const RoundKeys& keys, Rounding rounding, uint64_t group) {
  return rounding == Rounding::nearest ? nearest_noise() : rounding_noise(keys, group);
}

/// The same for one stream and groups below 2^32: what does not depend on the group is worked out once, and the first two rounds come down
/// to two products.
struct ShortKeys : RoundKeys {
  /// The caller synchronises.
  __device__ inline void fill(const uint64_t* seed, Stream stream) {
    RoundKeys::fill(seed);
    if (threadIdx.x != 0) return;
    const uint4 k = pair[0];
    uint32_t high1, low1, high0, low0;
    multiply_wide(static_cast<uint32_t>(stream), kPhiloxM1, high1, low1);
    multiply_wide(high1 ^ k.x, kPhiloxM0, high0, low0);
    pair[0] = make_uint4(k.y, low1 ^ k.z, high0 ^ k.w, low0);
  }
  __device__ inline Words draw(uint32_t group) const {
    uint32_t high0, low0, high1, low1;
    uint4 k = of(0);
    multiply_wide(group, kPhiloxM0, high0, low0);
    multiply_wide(high0 ^ k.x, kPhiloxM1, high1, low1);
    Words c = {high1 ^ k.y, low1, low0 ^ k.z, k.w};
#pragma unroll
    for (int round = 2; round < kNoiseRounds; ++round) {
      if (round % 2 == 0) k = of(round / 2);
      c = round % 2 == 0 ? philox_round(c, k.x, k.y) : philox_round(c, k.z, k.w);
    }
    return c;
  }
};
constexpr int64_t kShortValues = int64_t{8} << 32;  // so many values have groups that ShortKeys serve

/// rounding_noise() of groups first, first + step, … in one go: every key is read once.
template <int count>
__device__ inline void rounding_noises(const RoundKeys& keys, uint32_t first, uint32_t step, Words (&noise)[count]) {
#pragma unroll
  for (int c = 0; c < count; ++c) noise[c] = {first + static_cast<uint32_t>(c) * step, 0, static_cast<uint32_t>(Stream::rounding), 0};
#pragma unroll
  for (int round = 0; round < kNoiseRounds; round += 2) {
    const uint4 k = keys.of(round / 2);
#pragma unroll
    for (int c = 0; c < count; ++c) {
      noise[c] = philox_round(noise[c], k.x, k.y);
      if (round + 1 < kNoiseRounds) noise[c] = philox_round(noise[c], k.z, k.w);
    }
  }
}

/// Subnormals to zero in one instruction of the FMA pipe; unlike flush() it keeps the zero's sign.
__device__ inline float flush_signed(float x) {
  float y;
  asm("mul.ftz.f32 %0, %1, 0f3F800000;" : "=f"(y) : "f"(x));
  return y;
}

/// flush() in one instruction: subnormals and −0 become +0.
__device__ inline float flush_once(float x) {
  float y;
  asm("add.ftz.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 where a > b, else 0: a comparison and an FMA add a bit to a number in two instructions, one of them of the FMA pipe.
__device__ inline float one_above(float a, float b) {
  float y;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/// 1 where a is not above b.
__device__ inline float one_up_to(float a, float b) {
  float y;
  asm("set.leu.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// NaN if either is.
__device__ inline float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// A sum over the warp, for every lane.
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

/// Floats as integers in the same order (−0 below +0, NaN above all), for the warp's integer reductions.
__device__ inline int ordered(float x) {
  const int b = __float_as_int(x);
  return b ^ (b >> 31 & 0x7fffffff);
}
__device__ inline float unordered(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }

/// Least and most value of those some threads hold; `most` is NaN if any of them is.
struct Extremes {
  float least = float_of(0x7f800000u), most = float_of(0xff800000u);

  __device__ inline void add(float v) {
    least = min_nan(least, v);
    most = max_nan(most, v);
  }

  /// Of eight values alone, as a tree: short chains of dependent instructions.
  __device__ static inline Extremes of8(const float (&v)[8]) {
    const float a = min_nan(min_nan(v[0], v[1]), min_nan(v[2], v[3])), b = min_nan(min_nan(v[4], v[5]), min_nan(v[6], v[7]));
    const float c = max_nan(max_nan(v[0], v[1]), max_nan(v[2], v[3])), d = max_nan(max_nan(v[4], v[5]), max_nan(v[6], v[7]));
    return {min_nan(a, b), max_nan(c, d)};
  }
  __device__ inline void add8(const float (&v)[8]) {
    const Extremes e = of8(v);
    least = min_nan(least, e.least);
    most = max_nan(most, e.most);
  }

  __device__ inline void reduce_warp() {
    least = unordered(__reduce_min_sync(~0u, ordered(least)));
    most = unordered(__reduce_max_sync(~0u, ordered(most)));
  }

  /// Over teams of `lanes` neighbouring threads (a power of two, 1 to 32); every thread of the warp takes part.
  __device__ inline void reduce(int lanes) {
    if (lanes == 32) return reduce_warp();
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
      if (o >= lanes) continue;
      least = min_nan(least, __shfl_xor_sync(~0u, least, o));
      most = max_nan(most, __shfl_xor_sync(~0u, most, o));
    }
  }

  /// Over the whole thread block of up to 32 warps, for its first warp alone; `shared` holds a number pair a warp.
  __device__ inline void reduce_block(float2* shared) {
    reduce_warp();
    const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) shared[threadIdx.x / 32] = make_float2(least, most);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float2 other = shared[lane < warps ? lane : 0];
    least = other.x;
    most = other.y;
    reduce_warp();
  }

  __device__ inline bool finite() const { return is_finite(least) && is_finite(most); }
  __device__ inline Header header(int top, HeaderType type) const { return make_header(flush(least), flush(most), finite(), top, type); }
  __device__ inline Range range(HeaderType type) const {
    if (type == HeaderType::bf16 && fabsf(least) <= 0x1p60f && fabsf(most) <= 0x1p60f) {  // of usual size: nothing can overflow
      return {from_bf16(bf16_down(flush(least))), flush(from_bf16(bf16_up(flush(most))))};
    }
    return make_range(flush(least), flush(most), finite(), type);
  }
};

/// Bits of the least and the most of a block with values on both sides of 0: the least's are the largest as an unsigned integer, the most's
/// as a signed one, and three integers are compared in one instruction. Of other blocks they are anything; NaN shows in one of them.
struct AroundZero {
  uint32_t least;
  int most;

  __device__ static inline AroundZero of8(const float (&v)[8]) {
    AroundZero e = {__float_as_uint(v[0]), __float_as_int(v[0])};
#pragma unroll
    for (int j = 1; j < 8; ++j) e = {max(e.least, __float_as_uint(v[j])), max(e.most, __float_as_int(v[j]))};
    return e;
  }
  __device__ inline void reduce_warp() { least = __reduce_max_sync(~0u, least), most = __reduce_max_sync(~0u, most); }
  /// The bits of a number rounded away from 0 to bf16.
  __device__ static inline float outwards(uint32_t bits) { return __uint_as_float((bits + 0xffffu) & 0xffff0000u); }
};

/// 1/x correctly rounded, for x far from the ends of the range: __frcp_rn() without its tests.
__device__ inline float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

/// What encode8 needs of a block. `plain`: the range is of usual size, so make_header() and make_ruler() come down to a few
/// instructions, the scale is 1, and a subnormal x cannot be told from 0.
struct BlockRuler {
  Header header;
  Ruler ruler;
  bool plain;
};

/// … of a plain block; not `plain`: of any other.
__device__ inline BlockRuler plain_ruler(int bits, const Extremes& e, HeaderType type) {
  const float top = static_cast<float>((1 << bits) - 1), reciprocal_of_top = 1.0f / top;
  const float least = flush(e.least), most = flush(e.most);
  const float low = type == HeaderType::bf16 ? from_bf16(bf16_down(least)) : least, span = most - low;
  if (!(fabsf(least) <= 0x1p60f && fabsf(most) <= 0x1p60f && span >= 0x1p-30f)) return {{}, {}, false};
  // span / top, correctly rounded: a quotient within an ulp and one step with the correctly rounded reciprocal (Markstein).
  const float near = span * reciprocal_of_top;
  float step = fmaf(fmaf(-top, near, span), reciprocal_of_top, near);
  if (type == HeaderType::bf16)
    step = from_bf16(bf16_up(step));
  else if (fmaf(step, top, -span) < 0.0f)
    step = __uint_as_float(__float_as_uint(step) + 1);
  return {{low, step}, {1.0f, -low, 65536.0f * __frcp_rn(step)}, true};
}

__device__ inline BlockRuler block_ruler(int bits, const Extremes& e, HeaderType type) {
  if (const BlockRuler plain = plain_ruler(bits, e, type); plain.plain) return plain;
  const Header h = e.header((1 << bits) - 1, type);
  return {h, make_ruler(h), false};
}

/// The same for a header of bf16, in fewer instructions and for blocks of usual size alone; not `plain`: of any other block. `rounded`: the
/// values are of bf16, and so is the least of them.
template <int bits, bool rounded>
__device__ inline BlockRuler usual_ruler(const Extremes& e, HeaderType type) {
  constexpr float kTop = (1 << bits) - 1, kReciprocal = 1.0f / kTop;
  const float least = flush_once(e.least);
  const int b = __float_as_int(least);
  const float low = rounded ? least : __int_as_float((b + (b >> 31 & 0xffff)) & ~0xffff), span = e.most - low, near = span * kReciprocal;
  const bool plain = type == HeaderType::bf16 && fabsf(least) <= 0x1p60f && fabsf(e.most) <= 0x1p60f && span >= 0x1p-30f;
  const float step = AroundZero::outwards(__float_as_uint(fmaf(fmaf(-kTop, near, span), kReciprocal, near)));  // as block_ruler() has it
  return {{low, step}, {1.0f, -low, 65536.0f * reciprocal(step)}, plain};
}

/// The same for a warp's block with values of usual size on both sides of 0 and a header of bf16, in fewer instructions; not `plain`: of
/// any other block.
template <int bits>
__device__ inline BlockRuler usual_ruler(const AroundZero& e, HeaderType type) {
  constexpr float kTop = (1 << bits) - 1, kReciprocal = 1.0f / kTop;
  constexpr uint32_t kLeast = 0x30800000, kMost = 0x5d800000;  // 2^-30 and 2^60
  const uint32_t most = static_cast<uint32_t>(e.most);
  const bool plain = type == HeaderType::bf16 && e.least - (kLeast | 0x80000000u) <= kMost - kLeast && most - kLeast <= kMost - kLeast;
  const float low = AroundZero::outwards(e.least), span = __uint_as_float(most) - low, near = span * kReciprocal;
  const float step = AroundZero::outwards(__float_as_uint(fmaf(fmaf(-kTop, near, span), kReciprocal, near)));  // as block_ruler() has it
  return {{low, step}, {1.0f, -low, 65536.0f * reciprocal(step)}, plain};
}

/// A header of bf16 as it stands in memory.
__device__ inline uint32_t bf16_header(Header h) { return __byte_perm(__float_as_uint(h.low), __float_as_uint(h.step), 0x7632); }

/// The ruler of a block that a whole thread block holds: its first warp works it out and writes the header.
__device__ inline BlockRuler shared_ruler(int bits, Extremes e, HeaderType type, void* headers, int64_t block, float2* pairs,
                                          BlockRuler* ruler) {
  e.reduce_block(pairs);
  if (threadIdx.x == 0) {
    *ruler = block_ruler(bits, e, type);
    store_header(headers, type, block, ruler->header);
  }
  __syncthreads();
  return *ruler;
}

/// A code's place times 2^16 from y16, which lies between the ends of the levels.
template <int bits, bool even>
__device__ inline float on_levels(float y16, const LevelTable& levels) {
  constexpr int kTop = (1 << bits) - 1;
  if constexpr (even) return y16;
  float c = fmaf(y16, levels.slope, levels.base);
#pragma unroll
  for (int p = 1; 2 * p < kTop; ++p) {
    c = fmaf(fminf(fmaxf(y16, levels.at[p] * 65536.0f), levels.at[kTop - p] * 65536.0f), levels.bend[p], c);
  }
  return c;
}

/// code_of() of core/code.h for compile-time bits, in the same order of the same operations. `bounded`: y16 exceeds its top by
/// rounding only, which rint takes back: no clamp. At 4 bits and any levels the code is off by at most .375 there.
template <int bits, bool even, bool bounded>
__device__ inline uint32_t quantise(float y16, const LevelTable& levels, uint32_t noise) {
  constexpr int kTop = (1 << bits) - 1;
  const float c = on_levels<bits, even>(bounded && bits <= 4 ? y16 : fminf(y16, static_cast<float>(kTop) * 65536.0f), levels);
  if constexpr (bits <= 6) {
    // Adding 1.5·2^23 rounds to the nearest even integer and leaves it in the low bits: no conversion instruction.
    return (__float_as_uint(c + 12582912.0f) + noise) >> 16 & static_cast<uint32_t>(kTop);
  } else {
    return (__float2uint_rn(c) + noise) >> 16;
  }
}

/// Codes of 8 values of one block, packed; 0 for a poisoned one: code_of() of core/code.h for bits that are known when the kernel runs.
__device__ inline uint64_t encode8(int bits, bool even, const float (&v)[8], const BlockRuler& b, const LevelTable& levels,
                                   const Words& noise) {
  if (is_poisoned(b.header)) return 0;
  const int top = (1 << bits) - 1;
  float y[8], c[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) c[j] = y[j] = fminf(position(v[j], b.ruler), static_cast<float>(top) * 65536.0f);
  if (!even) {
#pragma unroll
    for (int j = 0; j < 8; ++j) c[j] = fmaf(y[j], levels.slope, levels.base);
#pragma unroll 1
    for (int p = 1; 2 * p < top; ++p) {
      const float least = levels.at[p] * 65536.0f, most = levels.at[top - p] * 65536.0f, bend = levels.bend[p];
#pragma unroll
      for (int j = 0; j < 8; ++j) c[j] = fmaf(fminf(fmaxf(y[j], least), most), bend, c[j]);
    }
  }
  uint32_t half[2] = {};
#pragma unroll
  for (int j = 7; j >= 0; --j) half[j / 4] = half[j / 4] << bits | (__float2uint_rn(c[j]) + noise_of(noise, j)) >> 16;
  return half[0] | static_cast<uint64_t>(half[1]) << (4 * bits);
}

/// The same for bits and levels that the compiler knows, quick in plain blocks. A value of another block
/// has some code, and leaves the others alone.
template <int bits, bool even>
__device__ inline uint64_t encode8(const float (&v)[8], const BlockRuler& b, const LevelTable& levels, const Words& noise) {
  using Acc = std::conditional_t<(bits <= 4), uint32_t, uint64_t>;
  Acc eight = 0;
  if (b.plain) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float y16 = (v[j] + b.ruler.offset) * b.ruler.inverse;
      eight |= static_cast<Acc>(quantise<bits, even, true>(y16, levels, noise_of(noise, j))) << (bits * j);
    }
  } else {
    eight = static_cast<Acc>(encode8(bits, even, v, b, levels, noise));
  }
  return eight;
}

/// encode8() of a plain block that all eight belong to, for 2, 4 and 8 bits: noise is added by a product of 16 bits, which leaves a code in
/// byte 2 of a word, and bytes are brought together four at a time.
template <int bits, bool even>
__device__ inline uint64_t encode8_by_bytes(const float (&v)[8], const BlockRuler& b, const LevelTable& levels, const Words& noise) {
  static_assert(bits == 2 || bits == 4 || bits == 8);
  uint32_t sum[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float y16 = (v[j] + b.ruler.offset) * b.ruler.inverse;
    const uint32_t whole = bits == 8 ? __float2uint_rn(fminf(y16, 255.0f * 65536.0f))
                                     : __float_as_uint(on_levels<bits, even>(y16, levels) + 12582912.0f);  // 0x40 beside the code
    sum[j] = __dp2a_lo(noise.w[j / 2], j % 2 == 0 ? 0x001u : 0x100u, whole);
  }
  const auto four = [&](int first, int step) {
    return __byte_perm(__byte_perm(sum[first], sum[first + step], 0x0062),
                       __byte_perm(sum[first + 2 * step], sum[first + 3 * step], 0x0062), 0x5410);
  };
  if constexpr (bits == 2) {
    constexpr uint32_t kPlaces = 0x40100401, kRest = 0x40 * 0x55;  // 1, 4, 16, 64
    return __dp4a(four(0, 1), kPlaces, 0u - kRest) + (__dp4a(four(4, 1), kPlaces, 0u - kRest) << 8);
  } else if constexpr (bits == 4) {
    return four(0, 2) + four(1, 2) * 16 - 0x40404040u * 17;
  } else {
    return four(0, 1) | static_cast<uint64_t>(four(4, 1)) << 32;
  }
}

/// encode8() where all eight values belong to the block.
template <int bits, bool even>
__device__ inline uint64_t encode8_inside(const float (&v)[8], const BlockRuler& b, const LevelTable& levels, const Words& noise) {
  if constexpr (bits == 2 || bits == 4 || bits == 8) {
    if (b.plain) return encode8_by_bytes<bits, even>(v, b, levels, noise);
  }
  return encode8<bits, even>(v, b, levels, noise);
}

/// Header and codes of a warp's whole block, eight values a lane. `own`: the lane's exist; where not, they are another lane's, and the
/// block's extremes stay.
template <int bits, bool even>
__device__ inline void put_block(const LevelTable& levels, HeaderType type, void* headers, uint32_t block, uint8_t* codes, int64_t group,
                                 bool own, const float (&v)[8], const Words& noise) {
  const bool leads = threadIdx.x % 32 == 0;
  AroundZero near = AroundZero::of8(v);
  near.reduce_warp();
  const BlockRuler usual = usual_ruler<bits>(near, type);
  if (usual.plain) {
    if (leads) static_cast<uint32_t*>(headers)[block] = bf16_header(usual.header);
    const uint64_t eight = encode8_inside<bits, even>(v, {usual.header, usual.ruler, true}, levels, noise);
    if (own) store_codes<bits>(codes, group, eight, 8);
    return;
  }
  Extremes e = Extremes::of8(v);
  e.reduce_warp();
  const BlockRuler ruler = block_ruler(bits, e, type);
  if (leads) store_header(headers, type, block, ruler.header);
  if (own) store_codes<bits>(codes, group, encode8_inside<bits, even>(v, ruler, levels, noise), 8);
}

/// n / divisor for 32-bit n by one multiplication; the host works out the magic number once.
struct FastDivisor {
  uint32_t divisor, magic, shift;

  explicit FastDivisor(uint32_t d) : divisor(d), magic(0), shift(static_cast<uint32_t>(log2_up(static_cast<int>(d)))) {
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ inline uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(__umulhi(n, magic)) + n) >> shift);
  }
};

}  // namespace satchel::cuda
