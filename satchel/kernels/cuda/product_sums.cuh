// A thread's sums of the product from codes (product_kernel.cuh): G and Z stand in shared memory row after row, and a step's rows are
// added by FMA or by tensor cores.
#pragma once

#include "satchel/kernels/cuda/product_tile.h"
#include "satchel/kernels/cuda/tensor_core.cuh"

namespace satchel::cuda::epilogue::product {

/// A number of G or Z in shared memory.
template <Math math>
using Raw = std::conditional_t<is_half(math), uint16_t, float>;
template <Math math>
constexpr DType kHalfType = math == Math::f16 ? DType::f16 : DType::bf16;

template <int fragments, int across, bool panels = false>
struct Tile {
  static constexpr bool kPanels = panels;
  static constexpr TileShape kShape = {fragments, across};
  static constexpr int kFragments = fragments, kAcross = across, kWidth = kShape.width(), kPitch = kShape.pitch(), kSums = kShape.sums();
  static constexpr int kTeams = kShape.teams(), kTeamThreads = kBlockThreads / kTeams, kTeamRows = kRows / kTeams;
};

__device__ inline uint32_t rounded_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

/// Where numbers of G and of Z stand in a step. Rows one after the other; or panels of 64 numbers a row, as Hopper reads them: 128 bytes,
/// whose sixteens change places by row.
template <class T>
struct Places {
  static constexpr int kG = kRows * T::kPitch, kZ = kRows * kPitch;
  __device__ static inline int of_g(int row, int column) { return row * T::kPitch + column; }
  __device__ static inline int of_z(int row, int channel) { return row * kPitch + channel; }
};
template <class T>
requires(T::kPanels) struct Places<T> {
  static constexpr int kPanel = kRows * 64, kG = kRows * T::kWidth, kZ = kRows * kChannels;
  __device__ static inline int of_g(int row, int column) {
    return column / 64 * kPanel + row * 64 + ((column / 8 ^ row) % 8) * 8 + column % 8;
  }
  __device__ static inline int of_z(int row, int channel) { return of_g(row, channel); }
};

/// What this thread has copied and written to shared memory may be read by wgmma behind the next barrier.
__device__ inline void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Where a warp's sums lie in a tile, and which rows of a step it adds: from its thread's number, asked for anew each time.
template <class T>
struct WarpPlace {
  int lane, column, channel, row;

  __device__ inline WarpPlace() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int warp = thread / 32;
    lane = thread % 32, column = warp / 4 % T::kAcross * 16 * T::kFragments, channel = warp % 4 * 32;
    row = warp / (4 * T::kAcross) * T::kTeamRows;
  }
};

/// A thread's sums by FMA: 2·fragments columns × 8 channels. Lanes stand so that neighbours (i, i ^ 1) share G's values and (i, i ^ 2)
/// Z's: 16-byte reads of both then go out two quarters of a warp at a time.
template <class T, Math math>
struct Sums {
  static constexpr int kPiece = T::kFragments % 2 == 0 ? 4 : 2, kMine = 2 * T::kFragments;
  float sum[T::kSums] = {};
  int column, channel, row;  // the first of a thread's

  __device__ inline Sums() {
    const WarpPlace<T> warp;
    column = warp.column + ((warp.lane >> 1 & 1) | (warp.lane >> 2 & 6)) * kPiece;
    channel = warp.channel + ((warp.lane & 1) | (warp.lane >> 1 & 2)) * 4;
    row = warp.row;
  }

  __device__ inline void add(const float* g, const float* z) {
#pragma unroll 2
    for (int r = 0; r < T::kTeamRows; ++r) {
      float a[kMine], b[8];
#pragma unroll
      for (int i = 0; i < kMine; i += kPiece) {
        const float* from = g + (row + r) * T::kPitch + column + i * 8;
        if constexpr (kPiece == 4) {
          const float4 v = *reinterpret_cast<const float4*>(from);
          a[i] = v.x, a[i + 1] = v.y, a[i + 2] = v.z, a[i + 3] = v.w;
        } else {
          const float2 v = *reinterpret_cast<const float2*>(from);
          a[i] = v.x, a[i + 1] = v.y;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const float4 v = *reinterpret_cast<const float4*>(z + (row + r) * kPitch + channel + j * 4);
        b[j] = v.x, b[j + 1] = v.y, b[j + 2] = v.z, b[j + 3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i * 8 + j] = fmaf(a[i], b[j], sum[i * 8 + j]);
      }
    }
  }

  /// Calls f(column, channel, x, y) for neighbouring channels.
  template <class F>
  __device__ inline void for_pairs(F&& f) const {
#pragma unroll
    for (int k = 0; k < T::kSums; k += 2) {
      const int i = k / 8, j = k % 8;
      f(column + i / kPiece * kPiece * 8 + i % kPiece, channel + j / 4 * 16 + j % 4, sum[k], sum[k + 1]);
    }
  }
};

/// A thread's sums by tensor cores: fragments of 16 columns × 8 channels.
template <class T>
struct FragmentSums {
  float sum[T::kSums] = {};
  int from, with;  // where a thread's first numbers of G and of Z stand in a step

  template <class F>
  __device__ inline void for_pairs(F&& f) const {
    const WarpPlace<T> warp;
#pragma unroll
    for (int k = 0; k < T::kSums; k += 2)
      f(warp.column + k / 16 * 16 + k % 4 / 2 * 8 + warp.lane / 4, warp.channel + k / 4 % 4 * 8 + warp.lane % 4 * 2, sum[k], sum[k + 1]);
  }
};

/// … of float32 as tf32, eight rows at a time.
template <class T>
struct Sums<T, Math::tf32> : FragmentSums<T> {
  using Base = FragmentSums<T>;
  using Base::sum, Base::from, Base::with;

  __device__ inline Sums() {
    const WarpPlace<T> warp;
    from = (warp.row + warp.lane % 4) * T::kPitch + warp.column + warp.lane / 4;
    with = (warp.row + warp.lane % 4) * kPitch + warp.channel + warp.lane / 4;
  }

  __device__ static inline void multiply(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  __device__ inline void add(const float* g, const float* z) {
#pragma unroll 1  // two at a time take more than 128 registers
    for (int r = 0; r < T::kTeamRows; r += 8) {
      const float *of_g = g + from + r * T::kPitch, *of_z = z + with + r * kPitch;
      uint32_t b[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][0] = __float_as_uint(of_z[j * 8]), b[j][1] = __float_as_uint(of_z[j * 8 + 4 * kPitch]);
#pragma unroll
      for (int i = 0; i < T::kFragments; ++i) {
        const uint32_t a[4] = {rounded_tf32(of_g[i * 16]), rounded_tf32(of_g[i * 16 + 8]), rounded_tf32(of_g[i * 16 + 4 * T::kPitch]),
                               rounded_tf32(of_g[i * 16 + 8 + 4 * T::kPitch])};
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sum + (i * 4 + j) * 4, a, b[j]);
      }
    }
  }
};

/// … of 16 bits, sixteen rows at a time. Both factors stand row after row, so ldmatrix turns them into columns.
template <class T, Math math>
requires(is_half(math) && !T::kPanels) struct Sums<T, math> : FragmentSums<T> {
  using Base = FragmentSums<T>;
  using Base::sum, Base::from, Base::with;

  __device__ inline Sums() {
    const WarpPlace<T> warp;
    const int line = warp.lane % 8, second = warp.lane / 8 % 2 * 8,
              third = warp.lane / 16 * 8;  // the lane's line, and its 8 × 8 numbers of four
    from = (warp.row + line + third) * T::kPitch + warp.column + second;
    with = (warp.row + line + second) * kPitch + warp.channel + third;
  }

  __device__ inline void add(const uint16_t* g, const uint16_t* z) {
#pragma unroll
    for (int r = 0; r < T::kTeamRows; r += 16) {
      uint32_t b[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) load_halves<true>(b[j], z + with + r * kPitch + j * 16);
#pragma unroll
      for (int i = 0; i < T::kFragments; ++i) {
        uint32_t a[4];
        load_halves<true>(a, g + from + r * T::kPitch + i * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply_halves<kHalfType<math>>(sum + (i * 4 + j) * 4, a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

/// Team 0's sums become those of all teams, which hold the same columns and channels thread by thread.
template <class T>
__device__ inline void add_teams(float (&sum)[T::kSums], float* shared) {
  const int own = static_cast<int>(threadIdx.x) % T::kTeamThreads, team = static_cast<int>(threadIdx.x) / T::kTeamThreads;
#pragma unroll 1
  for (int t = 1; t < T::kTeams; ++t) {
    __syncthreads();  // what stood in shared memory has been read
    if (team == t) {
#pragma unroll
      for (int k = 0; k < T::kSums; ++k) shared[k * T::kTeamThreads + own] = sum[k];
    }
    __syncthreads();
    if (team == 0) {
#pragma unroll
      for (int k = 0; k < T::kSums; ++k) sum[k] += shared[k * T::kTeamThreads + own];
    }
  }
}

}  // namespace satchel::cuda::epilogue::product
