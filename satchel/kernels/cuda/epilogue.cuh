// What the fused passes of norms share: how warps walk over the values, tables of channels, dropout.
//
//   step of 256 values = 32 groups of 8    lane   0        1              31
//                                          value 0 … 7   8 … 15   …   248 … 255
//
// A warp takes a step at a time. A thread block takes steps b, b + grid, b + 2·grid, …, and 256·grid is a multiple of the channels:
// whatever the warp and the turn, lane l always meets the same eight channels. Their numbers stand in tables in shared memory or in
// registers.
#pragma once

#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/kernels/cuda/side.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda::epilogue {

constexpr int64_t kBlock = 256;                                   // values of a step
constexpr int kWarps = 8;                                         // of a thread block
constexpr int64_t kFewBlocks = kSumProcessors * kFewWalk.each;    // thread blocks that sum up, at most, where a thread has up to 80
constexpr int64_t kManyBlocks = kSumProcessors * kManyWalk.each;  // registers, and up to 64
static_assert(kWarps * 32 == kBlock && kFewWalk.threads == kBlock &&
              kManyWalk.threads == kBlock);  // a thread a value, where tables are filled and sums are added up

/// Thread blocks for `values` in stretches of `stretch`, so that lanes keep their channels; 0 where `most` are too few for that.
inline int64_t walk_blocks(int64_t values, int64_t channels, int64_t most, int64_t stretch = kBlock) {
  const int64_t unit = channels / side::common_divisor(stretch, channels), whole = most / unit * unit;
  const int64_t wanted = ceil_div(ceil_div(ceil_div(values, stretch), kWarps), unit) * unit;
  return wanted < whole ? wanted : whole;
}

/// … of a kernel that sums nothing up: as many as the device holds. 0 where walk_blocks() is.
inline int64_t free_walk_blocks(int64_t values, int64_t channels, const BlockNeeds& needs, int64_t stretch = kBlock) {
  const int64_t unit = channels / side::common_divisor(stretch, channels);
  if (unit > kSumProcessors * needs.each) return 0;
  return blocks_in_units(ceil_div(ceil_div(values, stretch), kWarps), unit, resident(this_gpu(), needs));
}

inline bool is_straight_256(const Grid& g) { return g.block == kBlock && g.is_straight(); }

/// Of the value that this thread has of the thread block's first step.
__device__ inline int64_t own_channel(int64_t channels) { return channel_of(blockIdx.x * kBlock + threadIdx.x, channels); }

/// The steps of one warp among [first, last): start, start + every, …, `count` of them.
struct Walk {
  int lane, warp;
  uint32_t start, every;
  int count;

  __device__ inline Walk(uint32_t first, uint32_t last)
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        start(first + blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x),
        every(gridDim.x * kWarps),
        count(start < last ? static_cast<int>((last - 1 - start) / every) + 1 : 0) {}
  __device__ inline uint32_t step(int k) const { return start + static_cast<uint32_t>(k) * every; }
};

__device__ inline uint32_t steps_of(int64_t values) { return static_cast<uint32_t>(ceil_div(values, kBlock)); }

/// One number a value of `pieces` steps: written by value, read by lane without bank conflicts.
template <int pieces = 1>
struct Table {
  alignas(16) float at[pieces * kBlock];

  __device__ static inline int place(int value) { return value / 256 * 256 + value % 8 / 4 * 128 + value % 256 / 8 * 4 + value % 4; }
  __device__ inline void put(int value, float x) { at[place(value)] = x; }
  __device__ inline float of(int value) const { return at[place(value)]; }
  __device__ inline void get(int lane, float (&x)[8]) const {
    const float4 a = *reinterpret_cast<const float4*>(at + lane * 4), b = *reinterpret_cast<const float4*>(at + 128 + lane * 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
  /// Half (0 or 1) of a lane's eight, every time anew: the compiler keeps nothing in registers.
  __device__ inline void get_half(int lane, int half, float (&x)[4], int piece = 0) const {
    const unsigned from =
        static_cast<unsigned>(__cvta_generic_to_shared(at)) + static_cast<unsigned>(piece * 1024 + half * 512 + lane * 16);
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
  }
};

/// Mean and rstd of the channels of `pieces` steps, γ and β too.
template <int pieces = 1>
struct NormTables {
  Table<pieces> mean, rstd, gamma, beta;

  /// `first` is the thread block's first value; null γ: neither γ nor β.
  __device__ inline void fill(const NormParameters& p, int64_t channels, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < pieces * kBlock; k += static_cast<int>(blockDim.x)) {
      const int64_t c = channel_of(first + k, channels);
      mean.put(k, p.mean[c]);
      rstd.put(k, p.rstd[c]);
      if (p.gamma != nullptr) gamma.put(k, p.gamma[c]), beta.put(k, p.beta[c]);
    }
  }

  /// x̂ of a lane's eight.
  template <DType type>
  __device__ inline void normalise(int lane, const Eight<type>& x, float (&hat)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m[4], r[4];
      mean.get_half(lane, half, m);
      rstd.get_half(lane, half, r);
#pragma unroll
      for (int k = 0, j = 4 * half; k < 4; ++k, ++j) hat[j] = (x[j] - m[k]) * r[k];
    }
  }
};

/// chain_factor() of kernels/chain.h, eight at a time. Every thread of the warp must construct it.
struct Dropout {
  UniformSeed seed;  // read where something is dropped
  uint32_t least;    // noise in the upper half of a word, at `least` or above: kept
  float on, off;

  /// `draws`: the seed is read.
  __device__ inline Dropout(const Chain& c, const uint64_t* of, bool draws = true)
      : seed(of, draws && c.drop != 0), least(c.drop << 16), on(c.scale), off(c.slope * c.scale) {}

  /// Anything where nothing is dropped.
  __device__ inline Words draw(int64_t group) const { return least == 0 ? Words{} : noise_of_group(Stream::dropout, group, seed); }

  /// Of the word with a slot's noise: is it kept?
  __device__ inline bool keeps(uint32_t word, int slot) const { return (slot % 2 == 0 ? word << 16 : word) >= least; }
  __device__ inline bool keeps(const Words& noise, int slot) const { return keeps(noise.w[slot / 2], slot); }
  __device__ inline float factor(const Words& noise, int slot, bool is_on) const { return keeps(noise, slot) ? (is_on ? on : off) : 0.0f; }
  /// Which of a group's values are kept, a bit each.
  __device__ inline uint32_t kept(int64_t group) const {
    if (least == 0) return 0xffu;
    const Words noise = draw(group);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (keeps(noise, j) ? 1u : 0u) << j;
    return bits;
  }
};

/// The first `count` of eight values.
template <DType type>
__device__ inline void write_some(void* to, int64_t first, int count, bool aligned, const float (&v)[8]) {
  if (count == 8 && aligned) return write8<type, true>(to, first, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < count) write1<type>(to, first + j, v[j]);
  }
}

/// Codes of 8 values of 2 bits, of which `count` exist; the others as 0.
__device__ inline uint32_t load_eight(const uint8_t* codes, int64_t group, int count) {
  if (count == 8) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  uint32_t eight = 0;
  for (int k = 0; k * 4 < count; ++k) eight |= static_cast<uint32_t>(__ldg(codes + group * 2 + k)) << (8 * k);
  return eight;
}

/// Where the codes of each step of an image's x̂ stand: of equal bits, or of bits per sample. A bit of all values of a step is 32 bytes.
struct Places {
  uint8_t* first;
  const uint32_t* entries;
  FastDivisor each;  // steps a sample
  int bits;

  explicit Places(const NormImageCode& c)
      : first(c.at.codes), entries(c.entries), each(static_cast<uint32_t>(c.values / kBlock)), bits(c.bits) {}
  Places(uint8_t* codes, int fixed) : first(codes), entries(nullptr), each(1), bits(fixed) {}

  struct Step {
    uint8_t* codes;
    int bits;
  };
  __device__ inline Step of(uint32_t step) const {
    if (entries == nullptr) return {first + static_cast<int64_t>(step) * (32 * bits), bits};
    const uint32_t n = each.divide(step), entry = __ldg(entries + n);
    const int own = entry_bits(entry);
    return {first + (entry_before(entry) * each.divisor + static_cast<int64_t>(step - n * each.divisor) * own) * 32, own};
  }
};

/// A thread block's sums of two numbers a value of its steps, its warps one after the other.
template <int warps>
__device__ inline void write_sums(const float (&a)[8], const float (&b)[8], float2* partial) {
  __shared__ float2 shared[warps][kBlock];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[warp][lane * 8 + j] = make_float2(a[j], b[j]);
  __syncthreads();
#pragma unroll 1
  for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += warps * 32) {
    float2 total = shared[0][k];
    for (int w = 1; w < warps; ++w) total.x += shared[w][k].x, total.y += shared[w][k].y;
    partial[blockIdx.x * kBlock + k] = total;
  }
}

__host__ __device__ inline int64_t values_of(const NormImageCode& c) { return c.samples * c.values; }

// What every launch checks, next to the activations' addresses.

void check_fit(const NormAddCode& code, const char* op);
void check_fit(const NormBlockCode& code, const char* op);
void check_fit(const NormImageCode& code, const char* op);

}  // namespace satchel::cuda::epilogue
