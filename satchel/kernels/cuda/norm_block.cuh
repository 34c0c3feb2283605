// What the fused passes of BatchNorm → ReLU → dropout with a block code share.
//
//   step of 256 values = 32 groups of 8    lane   0        1              31
//                                          value 0 … 7   8 … 15   …   248 … 255
//
// A warp takes `pieces` such steps at once, as one stretch. A thread block takes stretches b, b + grid, b + 2·grid, …, and grid
// stretches are a multiple of the channels: whatever the warp and the turn, a lane's values belong to the same channels, whose numbers
// stand in tables in shared memory.
#pragma once

#include <utility>

#include "satchel/kernels/cuda/norm_block.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda::norm_block {

constexpr int kWarps = 8;
constexpr int64_t kStep = 256;            // values
constexpr int kPieces = 4;                // of the encoder: its stretch is the longest block
constexpr int64_t kFewBlocks = 132 * 3;   // thread blocks of the encoder and of the sums, all resident at once on an H200
constexpr int64_t kManyBlocks = 132 * 4;  // of the last pass

inline int64_t common_divisor(int64_t a, int64_t b) {
  while (b != 0) std::swap(a %= b, b);
  return a;
}

/// Thread blocks for `values` in stretches of `stretch`, so that lanes keep their channels; 0 where `most` are too few for that.
inline int64_t walk_blocks(int64_t values, int64_t channels, int64_t stretch, int64_t most) {
  const int64_t unit = channels / common_divisor(stretch, channels), whole = most / unit * unit;
  const int64_t wanted = ceil_div(ceil_div(ceil_div(values, stretch), kWarps), unit) * unit;
  return wanted < whole ? wanted : whole;
}

__device__ inline int64_t channel_of(int64_t value, int64_t channels) { return value - quotient(value, channels) * channels; }

/// One number a value of a stretch: written by value, read by lane without bank conflicts.
template <int pieces>
struct Table {
  alignas(16) float at[pieces * kStep];

  __device__ inline void put(int value, float x) { at[value / 256 * 256 + value % 8 / 4 * 128 + value % 256 / 8 * 4 + value % 4] = x; }
  /// Half (0 or 1) of a lane's eight, every time anew: the compiler keeps nothing in registers.
  __device__ inline void get_half(int lane, int piece, int half, float (&x)[4]) const {
    const unsigned from =
        static_cast<unsigned>(__cvta_generic_to_shared(at)) + static_cast<unsigned>(piece * 1024 + half * 512 + lane * 16);
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
  }
};

/// Steps of one warp: start, start + every, …, `count` of them.
struct Walk {
  int lane, warp;
  uint32_t start, every;
  int count;

  __device__ inline explicit Walk(int64_t values)
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        start(blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x),
        every(gridDim.x * kWarps) {
    const uint32_t steps = static_cast<uint32_t>(ceil_div(values, kStep));
    count = start < steps ? static_cast<int>((steps - 1 - start) / every) + 1 : 0;
  }
  /// The lane's group in turn k.
  __device__ inline int64_t group(int k) const { return (static_cast<int64_t>(start) + static_cast<int64_t>(k) * every) * 32 + lane; }
};

/// Eight values of a buffer that the same launch may write.
template <DType type>
__device__ inline void read8(const void* x, int64_t i, float (&v)[8]) {
  if constexpr (type == DType::f32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(x) + i);
    const float4 a = p[0], b = p[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const Eight<type> eight = cuda::read8<type, true>(x, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = eight[j];
  }
}

/// The first `count` of them; the rest as `pad`.
template <DType type>
__device__ inline void read_some(const void* x, int64_t i, int count, float pad, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = j < count ? load(x, type, i + j) : pad;
}

template <DType type>
__device__ inline void write8(void* x, int64_t i, const float (&v)[8]) {
  cuda::write8<type, true>(x, i, v);
}

template <DType type>
__device__ inline void write_some(void* x, int64_t i, int count, const float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= count) break;
    write1<type>(x, i + j, v[j]);
  }
}

/// Which of a group's values dropout keeps. Every thread of the warp must construct it.
struct Dropout {
  uint64_t key;  // in the warp's uniform registers, as UniformSeed has it
  uint32_t drop;

  __device__ inline Dropout(uint32_t chance, const uint64_t* seed) : drop(chance) {
    const uint64_t s = drop == 0 ? 0 : __ldg(reinterpret_cast<const unsigned long long*>(seed));
    key = static_cast<uint64_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(s >> 32))) << 32 |
          __reduce_or_sync(~0u, static_cast<uint32_t>(s));
  }
  /// A bit a value.
  __device__ inline uint32_t kept(int64_t group) const {
    if (drop == 0) return 0xffu;
    const Words words = noise_group(key, Stream::dropout, static_cast<uint64_t>(group));
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (noise_of(words, j) >= drop ? 1u : 0u) << j;
    return bits;
  }
};

inline void check_fit(const BlockCode& code, const Chain& chain, const void* x, const NormBlockSaves& saves, const char* op) {
  if (!norm_block_fits(code, chain.channels)) fail(op, "norm_block_fits must be true of code and channels");
  if (!is_aligned(x) || !is_aligned(saves.codes) || !is_aligned(saves.headers))
    fail(op, "values, codes and headers must start at a multiple of 16");
}

}  // namespace satchel::cuda::norm_block
