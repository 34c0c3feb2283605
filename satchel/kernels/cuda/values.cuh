// Eight activations a thread, fp32, bf16 or f16, in buffers that the same launch may write: 16-byte accesses where addresses allow.
#pragma once

#include <type_traits>

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {

/// Two bf16 or f16, `low` in the lower half: nearest even, NaN stays NaN, what is too large becomes infinite, as torch rounds.
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline uint32_t f16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Both for a type of 16 bits, and the way back.
template <DType type>
__device__ inline uint32_t half_pair(float low, float high) {
  return type == DType::bf16 ? bf16_pair(low, high) : f16_pair(low, high);
}
/// … of relu(low) and relu(high).
template <DType type>
__device__ inline uint32_t relu_pair(float low, float high) {
  uint32_t pair;
  if constexpr (type == DType::bf16)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <DType type>
__device__ inline float low_half(uint32_t pair) {
  return type == DType::bf16 ? __uint_as_float(pair << 16) : float_of_f16(static_cast<uint16_t>(pair));
}
template <DType type>
__device__ inline float high_half(uint32_t pair) {
  return type == DType::bf16 ? __uint_as_float(pair & 0xffff0000u) : float_of_f16(static_cast<uint16_t>(pair >> 16));
}

/// Least and most of values of a type of 16 bits, two at a time, as they stand in memory; NaN if any of them is.
template <DType type>
struct PairExtremes {
  uint32_t least, most;  // of the values in the lower halves, and of those in the upper ones

  __device__ static inline uint32_t less_of_pairs(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (type == DType::bf16)
      asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
      asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static inline uint32_t more_of_pairs(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (type == DType::bf16)
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }

  __device__ inline void add(uint32_t pair) { least = less_of_pairs(least, pair), most = more_of_pairs(most, pair); }

  /// Of all values of a team of `lanes` neighbouring threads (a power of two); every thread of the warp takes part. −least and most travel
  /// as one pair, of which both halves want the maximum.
  __device__ inline Extremes reduced(uint32_t lanes) const {
    const uint32_t minus = least ^ 0x80008000u;
    uint32_t both = more_of_pairs(__byte_perm(minus, most, 0x5410), __byte_perm(minus, most, 0x7632));
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
      if (o < static_cast<int>(lanes)) both = more_of_pairs(both, __shfl_xor_sync(~0u, both, o));
    }
    return {-low_half<type>(both), high_half<type>(both)};
  }
};

/// Eight values as they stand in memory: halves become floats where they are used, so that nobody waits for a read ahead of its time.
template <DType type>
struct Eight {
  using Raw = uint16_t;
  uint32_t w[4];

  __device__ inline float operator[](int j) const { return j % 2 == 0 ? low_half<type>(w[j / 2]) : high_half<type>(w[j / 2]); }
  /// One after the other, from j = 0 on.
  __device__ inline void put(int j, Raw x) { w[j / 2] = j % 2 == 0 ? x : w[j / 2] | static_cast<uint32_t>(x) << 16; }
  __device__ inline Raw raw(int j) const { return static_cast<Raw>(j % 2 == 0 ? w[j / 2] : w[j / 2] >> 16); }
  __device__ inline void load(const Raw* x) {
    const uint4 a = *reinterpret_cast<const uint4*>(x);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
  }
  __device__ inline void store(Raw* x) const { *reinterpret_cast<uint4*>(x) = make_uint4(w[0], w[1], w[2], w[3]); }
  /// v rounded, or relu(v), of which NaN stays NaN.
  template <bool relu = false>
  __device__ inline void set(const float (&v)[8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = relu ? relu_pair<type>(v[2 * k], v[2 * k + 1]) : half_pair<type>(v[2 * k], v[2 * k + 1]);
  }
};

template <>
struct Eight<DType::f32> {
  using Raw = float;
  float v[8];

  __device__ inline float operator[](int j) const { return v[j]; }
  __device__ inline void put(int j, Raw x) { v[j] = x; }
  __device__ inline Raw raw(int j) const { return v[j]; }
  __device__ inline void load(const Raw* x) {
    const float4 a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
  __device__ inline void store(Raw* x) const {
    float4* to = reinterpret_cast<float4*>(x);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  template <bool relu = false>
  __device__ inline void set(const float (&from)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = relu ? max_nan(from[j], 0.0f) : from[j];
  }
};

template <DType type>
__device__ inline void to_floats(const Eight<type>& from, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = from[j];
}

template <DType type>
__device__ inline float read1(const void* x, int64_t i) {
  if constexpr (type == DType::f32)
    return static_cast<const float*>(x)[i];
  else
    return low_half<type>(static_cast<const uint16_t*>(x)[i]);
}

template <DType type>
__device__ inline void write1(void* x, int64_t i, float v) {
  if constexpr (type == DType::f32)
    static_cast<float*>(x)[i] = v;
  else
    static_cast<uint16_t*>(x)[i] = static_cast<uint16_t>(half_pair<type>(v, 0.0f));
}

/// For places where the type is not worth a constant.
__device__ inline void write_any(void* x, DType type, int64_t i, float v) {
  if (type == DType::f32)
    write1<DType::f32>(x, i, v);
  else if (type == DType::bf16)
    write1<DType::bf16>(x, i, v);
  else
    write1<DType::f16>(x, i, v);
}

/// Values i … i + 7.
template <DType type, bool vector>
__device__ inline Eight<type> read8(const void* x, int64_t i) {
  const auto* p = static_cast<const typename Eight<type>::Raw*>(x) + i;
  Eight<type> e;
  if constexpr (vector) {
    e.load(p);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) e.put(j, p[j]);
  }
  return e;
}

/// Values i … i + 7; those past `end` as 0.
template <DType type, bool vector>
__device__ inline Eight<type> read8_until(const void* x, int64_t i, int64_t end) {
  if (i + 8 <= end) return read8<type, vector>(x, i);
  const auto* p = static_cast<const typename Eight<type>::Raw*>(x) + i;
  Eight<type> e;
#pragma unroll
  for (int j = 0; j < 8; ++j) e.put(j, i + j < end ? p[j] : typename Eight<type>::Raw{});
  return e;
}

template <DType type, bool vector>
__device__ inline void write8(void* x, int64_t i, const float (&v)[8]) {
  if constexpr (vector) {
    Eight<type> e;
    e.set(v);
    e.store(static_cast<typename Eight<type>::Raw*>(x) + i);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) write1<type>(x, i + j, v[j]);
  }
}

/// Values i … i + 7, those inside [begin, end), to a buffer that starts with value `begin`.
template <DType type, bool vector>
__device__ inline void write8_within(void* x, int64_t i, int64_t begin, int64_t end, const float (&v)[8]) {
  if (i >= begin && i + 8 <= end) return write8<type, vector>(x, i - begin, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (i + j >= begin && i + j < end) write1<type>(x, i + j - begin, v[j]);
  }
}

/// A value as it stands in memory, and four neighbours.
template <DType type>
using Cell = std::conditional_t<type == DType::f32, float, uint16_t>;
template <DType type>
using Quad = std::conditional_t<type == DType::f32, float4, uint2>;

template <DType type>
__device__ inline Quad<type> load_quad(const void* x, int64_t i) {
  return __ldg(reinterpret_cast<const Quad<type>*>(static_cast<const Cell<type>*>(x) + i));
}

template <DType type>
__device__ inline Cell<type> cell_of(const Quad<type>& q, int k) {
  if constexpr (type == DType::f32) {
    return k == 0 ? q.x : k == 1 ? q.y : k == 2 ? q.z : q.w;
  } else {
    return static_cast<uint16_t>((k < 2 ? q.x : q.y) >> (k % 2 * 16));
  }
}

template <DType type>
__device__ inline float value_of_cell(Cell<type> cell) {
  if constexpr (type == DType::f32) return cell;
  if constexpr (type == DType::bf16) return __uint_as_float(static_cast<uint32_t>(cell) << 16);
  if constexpr (type == DType::f16) return float_of_f16(cell);
}

/// Calls f with the type of activations and with whether 16-byte accesses serve, both as integral constants.
template <class F>
void with_values(DType type, bool vector, F&& f) {
  with_type(type, [&](auto t) { return vector ? f(t, std::true_type()) : f(t, std::false_type()); });
}

}  // namespace satchel::cuda
