// Eight activations a thread, fp32 or bf16, in buffers that the same launch may write: 16-byte accesses where addresses allow.
#pragma once

#include <type_traits>

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {

/// Eight values as they stand in memory: bf16 becomes float where it is used, so that nobody waits for a read ahead of its time.
template <DType type>
struct Eight;

template <>
struct Eight<DType::f32> {
  using Raw = float;
  float v[8];

  __device__ inline float operator[](int j) const { return v[j]; }
  __device__ inline void put(int j, Raw x) { v[j] = x; }
  __device__ inline void load(const Raw* x) {
    const float4 a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
};

template <>
struct Eight<DType::bf16> {
  using Raw = uint16_t;
  uint32_t w[4];

  __device__ inline float operator[](int j) const { return __uint_as_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xffff0000u); }
  /// One after the other, from j = 0 on.
  __device__ inline void put(int j, Raw x) { w[j / 2] = j % 2 == 0 ? x : w[j / 2] | static_cast<uint32_t>(x) << 16; }
  __device__ inline void load(const Raw* x) {
    const uint4 a = *reinterpret_cast<const uint4*>(x);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
  }
};

/// Two bf16, `low` in the lower half: nearest even, NaN stays NaN, what is too large becomes infinite, as torch rounds.
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <DType type>
__device__ inline void write1(void* x, int64_t i, float v) {
  if constexpr (type == DType::f32)
    static_cast<float*>(x)[i] = v;
  else
    static_cast<uint16_t*>(x)[i] = static_cast<uint16_t>(bf16_pair(v, 0.0f));
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
  if constexpr (!vector) {
#pragma unroll
    for (int j = 0; j < 8; ++j) write1<type>(x, i + j, v[j]);
  } else if constexpr (type == DType::f32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(x) + i);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(x) + i) =
        make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
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

/// Calls f with the type of activations and with whether 16-byte accesses serve, both as integral constants.
template <class F>
void with_values(DType type, bool vector, const char* op, F&& f) {
  using F32 = std::integral_constant<DType, DType::f32>;
  using Bf16 = std::integral_constant<DType, DType::bf16>;
  if (type == DType::f32) return vector ? f(F32(), std::true_type()) : f(F32(), std::false_type());
  if (type != DType::bf16) fail(op, "values must be f32 or bf16", name_of(type));
  return vector ? f(Bf16(), std::true_type()) : f(Bf16(), std::false_type());
}

}  // namespace satchel::cuda
