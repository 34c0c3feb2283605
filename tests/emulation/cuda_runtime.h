// What the kernels use of CUDA, for the CPU: the types, the functions, and the PTX instructions, which translate.py turns into calls. A
// thread is a fiber (emulator.cpp), a block's threads take turns, and blocks run one after the other. Not emulated: time, memory that is
// not coherent, races. Tensor cores: the products of a warp, not those of four; asynchronous copies are there at once, so that a wait that
// is missing does not show.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static  // one block runs at a time
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_assume(x) static_cast<void>(0)
#define __isGlobal(p) true

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
using cudaStream_t = void*;

namespace emulation {

struct Place {
  dim3 thread, block, threads, blocks;
};
/// Of the thread that runs.
const Place& here();
void* dynamic_shared();
void sync_block();

/// Waits until all threads of the warp that `mask` names have come with their values, and gives them: one a lane.
const uint64_t* gather(uint32_t mask, uint64_t value);
unsigned lane();

/// Runs a kernel when it is given one.
struct Launch {
  dim3 blocks, threads;
  int64_t bytes;
  Launch(dim3 blocks, dim3 threads, int64_t bytes, cudaStream_t) : blocks(blocks), threads(threads), bytes(bytes) {}
  void operator<<(const std::function<void()>& kernel) const;
};

template <class T>
uint64_t bits_of(T v) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  return bits;
}
template <class T>
T value_of(uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof(T));
  return v;
}
template <class T>
T shuffled(uint32_t mask, T v, unsigned from) {
  return value_of<T>(gather(mask, bits_of(v))[from % 32]);
}
template <class T, class F>
T reduced(uint32_t mask, T v, const F& f) {
  const uint64_t* all = gather(mask, bits_of(v));
  T result = v;
  for (unsigned i = 0; i < 32; ++i) {
    if (mask >> i & 1) result = f(result, value_of<T>(all[i]));
  }
  return result;
}

}  // namespace emulation

#define threadIdx (::emulation::here().thread)
#define blockIdx (::emulation::here().block)
#define blockDim (::emulation::here().threads)
#define gridDim (::emulation::here().blocks)

// ---- functions of CUDA ------------------------------------------------------------------------------------------------------------------

inline void __syncthreads() { ::emulation::sync_block(); }
inline void __syncwarp(uint32_t mask = ~0u) { ::emulation::gather(mask, 0); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, const T& v) {
  *p = v;
}
template <class T>
T __shfl_sync(uint32_t mask, T v, int from) {
  return ::emulation::shuffled(mask, v, static_cast<unsigned>(from));
}
/// `width` lanes, a power of two, are a warp of their own.
template <class T>
T __shfl_sync(uint32_t mask, T v, int from, int width) {
  const unsigned within = static_cast<unsigned>(width) - 1;
  return ::emulation::shuffled(mask, v, (::emulation::lane() & ~within) | (static_cast<unsigned>(from) & within));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int with) {
  return ::emulation::shuffled(mask, v, ::emulation::lane() ^ static_cast<unsigned>(with));
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, unsigned by) {
  const unsigned lane = ::emulation::lane();
  return ::emulation::shuffled(mask, v, lane >= by ? lane - by : lane);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, unsigned by) {
  const unsigned lane = ::emulation::lane();
  return ::emulation::shuffled(mask, v, lane + by < 32 ? lane + by : lane);
}
inline bool __all_sync(uint32_t mask, bool v) {
  return ::emulation::reduced(mask, v, [](bool a, bool b) { return a && b; });
}
inline uint32_t __ballot_sync(uint32_t mask, bool v) {
  const uint64_t* all = ::emulation::gather(mask, v ? 1 : 0);
  uint32_t bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= (mask >> i & 1 & static_cast<uint32_t>(all[i])) << i;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool v) {
  return ::emulation::reduced(mask, v, [](bool a, bool b) { return a || b; });
}
template <class T>
T __reduce_min_sync(uint32_t mask, T v) {
  return ::emulation::reduced(mask, v, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
T __reduce_max_sync(uint32_t mask, T v) {
  return ::emulation::reduced(mask, v, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_or_sync(uint32_t mask, T v) {
  return ::emulation::reduced(mask, v, [](T a, T b) { return a | b; });
}
template <class T>
T __reduce_add_sync(uint32_t mask, T v) {  // the first value is the thread's own, which comes again
  const uint64_t* all = ::emulation::gather(mask, ::emulation::bits_of(v));
  T sum = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (mask >> i & 1) sum += ::emulation::value_of<T>(all[i]);
  }
  return sum;
}

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline uint32_t __float2uint_rn(float x) { return static_cast<uint32_t>(std::rint(x)); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by < 32 ? by : 32));
}
inline uint32_t __dp2a_lo(uint32_t words, uint32_t bytes, uint32_t sum) {
  return sum + (words & 0xffffu) * (bytes & 0xffu) + (words >> 16) * (bytes >> 8 & 0xffu);
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xffu) * (b >> i & 0xffu);
  return sum;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = select >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (nibble & 7))) & 0xffu;
    if (nibble & 8) byte = byte & 0x80u ? 0xffu : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline uint32_t min(uint32_t a, uint32_t b) { return b < a ? b : a; }
inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }

// ---- instructions -----------------------------------------------------------------------------------------------------------------------

namespace emulation {

inline char anchor;  // addresses in shared memory are distances to it
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
template <class T>
void ld_volatile_shared_v4_u32(T& a, T& b, T& c, T& d, unsigned from) {
  const T* p = reinterpret_cast<const T*>(&anchor + static_cast<int>(from));
  a = p[0], b = p[1], c = p[2], d = p[3];
}
inline void ld_volatile_shared_v4_f32(float& a, float& b, float& c, float& d, unsigned from) {
  ld_volatile_shared_v4_u32(a, b, c, d, from);
}
inline void mul_wide_u32_mov_b64(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
  const uint64_t p = static_cast<uint64_t>(a) * b;
  low = static_cast<uint32_t>(p), high = static_cast<uint32_t>(p >> 32);
}
inline void mul_ftz_f32(float& y, float x) { y = flushed(x); }         // times 1
inline void add_ftz_f32(float& y, float x) { y = flushed(x) + 0.0f; }  // plus 0
inline void add_sat_f32(float& y, float a, float b) { y = a + b > 0.0f ? (a + b < 1.0f ? a + b : 1.0f) : 0.0f; }
inline void set_gt_f32_f32(float& y, float a, float b) { y = a > b ? 1.0f : 0.0f; }
inline void set_leu_f32_f32(float& y, float a, float b) { y = a > b ? 0.0f : 1.0f; }
inline float canonical_nan() { return std::bit_cast<float>(0x7fffffffu); }
inline void min_NaN_f32(float& y, float a, float b) {
  y = a != a || b != b ? canonical_nan() : a < b || (a == b && std::signbit(a)) ? a : b;
}
inline void max_NaN_f32(float& y, float a, float b) {
  y = a != a || b != b ? canonical_nan() : a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline void rcp_approx_ftz_f32(float& y, float x) { y = flushed(1.0f / flushed(x)); }
inline void ex2_approx_ftz_f32(float& y, float x) { y = flushed(std::exp2(flushed(x))); }
inline void setp_ne_u32_selp_f32(float& y, uint32_t bits, float a, float b) { y = bits != 0 ? a : b; }
inline void setp_ne_u32_fma_rn_f32(float& y, uint32_t bits, float a, float b, float c) { y = bits != 0 ? std::fma(a, b, c) : y; }
inline void fma_rn_f32_setp_gt_f32_or_b32_add_f32_add_f32(uint32_t& codes, float& sum, float& count, float gamma, float beta, float v,
                                                          uint32_t code) {
  if (std::fma(gamma, v, beta) > 0.0f) {
    codes |= code;
  } else {
    sum += v;
    count += 1.0f;
  }
}

// Nearest even; NaN is 0x7fff, as the instructions have it.
inline uint16_t bf16_of(float x) {
  if (x != x) return 0x7fff;
  const uint32_t b = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
}
inline uint16_t f16_of(float x) { return x != x ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float float_of_bf16(uint32_t h) { return std::bit_cast<float>(h << 16); }
inline float relu_of(float x) { return x != x ? x : x > 0.0f ? x : 0.0f; }
inline void cvt_rn_bf16x2_f32(uint32_t& pair, float high, float low) { pair = bf16_of(low) | static_cast<uint32_t>(bf16_of(high)) << 16; }
inline void cvt_rn_f16x2_f32(uint32_t& pair, float high, float low) { pair = f16_of(low) | static_cast<uint32_t>(f16_of(high)) << 16; }
inline void cvt_rn_relu_bf16x2_f32(uint32_t& pair, float high, float low) { cvt_rn_bf16x2_f32(pair, relu_of(high), relu_of(low)); }
inline void cvt_rn_relu_f16x2_f32(uint32_t& pair, float high, float low) { cvt_rn_f16x2_f32(pair, relu_of(high), relu_of(low)); }
inline void cvt_f32_f16(float& x, uint16_t h) { x = static_cast<float>(std::bit_cast<_Float16>(h)); }
template <class F>
void each_bf16(uint32_t& c, uint32_t a, uint32_t b, const F& f) {
  float low, high;
  f(low, float_of_bf16(a & 0xffffu), float_of_bf16(b & 0xffffu));
  f(high, float_of_bf16(a >> 16), float_of_bf16(b >> 16));
  cvt_rn_bf16x2_f32(c, high, low);
}
template <class F>
void each_f16(uint32_t& c, uint32_t a, uint32_t b, const F& f) {
  float x[2], y[2], z[2];
  for (int i = 0; i < 2; ++i)
    cvt_f32_f16(x[i], static_cast<uint16_t>(a >> (16 * i))), cvt_f32_f16(y[i], static_cast<uint16_t>(b >> (16 * i)));
  for (int i = 0; i < 2; ++i) f(z[i], x[i], y[i]);
  cvt_rn_f16x2_f32(c, z[1], z[0]);
}
inline void min_NaN_f16x2(uint32_t& c, uint32_t a, uint32_t b) { each_f16(c, a, b, min_NaN_f32); }
inline void max_NaN_f16x2(uint32_t& c, uint32_t a, uint32_t b) { each_f16(c, a, b, max_NaN_f32); }
inline void min_NaN_bf16x2(uint32_t& c, uint32_t a, uint32_t b) { each_bf16(c, a, b, min_NaN_f32); }
inline void max_NaN_bf16x2(uint32_t& c, uint32_t a, uint32_t b) { each_bf16(c, a, b, max_NaN_f32); }

inline void ld_global_nc_v4_f32(float& a, float& b, float& c, float& d, const float* from) {
  a = from[0], b = from[1], c = from[2], d = from[3];
}

/// C += A·B of 16 × 16 and 16 × 8 numbers of 16 bits, spread over the warp as PTX has it; a sum is made number after number in float32,
/// where the tensor core's own order and rounding are not known.
template <class F>
void multiply_halves(float* const (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, const F& number) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  uint64_t upper[32], lower[32], columns[32];  // two words each; what gather() gives lasts until the next but one
  std::memcpy(upper, gather(~0u, both(a0, a2)), sizeof upper);
  std::memcpy(lower, gather(~0u, both(a1, a3)), sizeof lower);
  std::memcpy(columns, gather(~0u, both(b0, b1)), sizeof columns);
  const auto at = [&](const uint64_t* words, unsigned line, unsigned k) {  // number k of 16 of a row of A or a column of B
    return number(static_cast<uint16_t>(words[line * 4 + k % 8 / 2] >> (k / 8 * 32 + k % 2 * 16)));
  };
  const unsigned row = lane() / 4, column = lane() % 4 * 2;
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned k = 0; k < 16; ++k) *c[i] += at(i < 2 ? upper : lower, row, k) * at(columns, column + i % 2, k);
  }
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                                uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_halves({&c0, &c1, &c2, &c3}, a0, a1, a2, a3, b0, b1, float_of_bf16);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                              uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_halves({&c0, &c1, &c2, &c3}, a0, a1, a2, a3, b0, b1, [](uint16_t h) { return static_cast<float>(std::bit_cast<_Float16>(h)); });
}

/// The same of 16 × 8 and 8 × 8 numbers of tf32, whose lower 13 bits are not looked at.
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                               uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  uint64_t upper[32], lower[32], columns[32];
  std::memcpy(upper, gather(~0u, both(a0, a2)), sizeof upper);
  std::memcpy(lower, gather(~0u, both(a1, a3)), sizeof lower);
  std::memcpy(columns, gather(~0u, both(b0, b1)), sizeof columns);
  const auto at = [](const uint64_t* words, unsigned line, unsigned k) {
    return std::bit_cast<float>(static_cast<uint32_t>(words[line * 4 + k % 4] >> (k / 4 * 32)) & 0xffffe000u);
  };
  const unsigned row = lane() / 4, column = lane() % 4 * 2;
  float* const c[4] = {&c0, &c1, &c2, &c3};
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned k = 0; k < 8; ++k) *c[i] += at(i < 2 ? upper : lower, row, k) * at(columns, column + i % 2, k);
  }
}
inline void cvt_rna_tf32_f32(uint32_t& y, float x) {
  y = std::bit_cast<uint32_t>(x);
  if (std::isfinite(x)) y = (y + 0x1000u) & 0xffffe000u;
}
/// Where an address in shared memory is.
inline char* shared_at(unsigned address) {
  return reinterpret_cast<char*>(reinterpret_cast<intptr_t>(&anchor) + static_cast<int>(address));
}

/// Four times 8 × 8 numbers of 16 bits: lane 8·j + i names line i of the j-th, and lane l gets numbers l % 4 · 2 and + 1 of line l / 4; or,
/// turned, numbers l / 4 of lines l % 4 · 2 and + 1.
inline void load_matrices(bool turned, uint32_t* const (&to)[4], unsigned line) {
  uint64_t lines[32];
  std::memcpy(lines, gather(~0u, line), sizeof lines);
  for (unsigned j = 0; j < 4; ++j) {
    const auto at = [&](unsigned row, unsigned column) {
      uint16_t h;
      std::memcpy(&h, shared_at(static_cast<unsigned>(lines[8 * j + row])) + 2 * column, sizeof h);
      return static_cast<uint32_t>(h);
    };
    const unsigned pair = lane() % 4 * 2, other = lane() / 4;
    *to[j] = turned ? at(pair, other) | at(pair + 1, other) << 16 : at(other, pair) | at(other, pair + 1) << 16;
  }
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned line) {
  load_matrices(false, {&a, &b, &c, &d}, line);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned line) {
  load_matrices(true, {&a, &b, &c, &d}, line);
}
template <class T>
void mov_u32(T& x) {
  x = static_cast<T>(here().thread.x);
}  // %tid.x

/// `size` bytes of `all`, zeros for the others.
inline void copy_to_shared(unsigned to, const void* from, int size, int all) {
  char* p = shared_at(to);
  std::memset(p, 0, static_cast<size_t>(all));
  if (size > 0) std::memcpy(p, from, static_cast<size_t>(size));
}
inline void cp_async_cg_shared_global(unsigned to, const void* from, int size) { copy_to_shared(to, from, size, 16); }
inline void cp_async_ca_shared_global(unsigned to, const void* from, int size) { copy_to_shared(to, from, size, 4); }
inline void prefetch_global_L2(const void*) {}
struct fence_proxy_async_shared {
  static void cta() {}
};
inline void cp_async_commit_group() {}
inline void cp_async_wait_group(int) {}

}  // namespace emulation

inline uint32_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - &::emulation::anchor);
}
