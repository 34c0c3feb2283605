// The parts of the product from codes (norm_act_product.cu): tiles, copies of G, decoding of Z, and a thread's sums.
#pragma once

#include <type_traits>

#include "satchel/kernels/cuda/one_sided.cuh"
#include "satchel/kernels/cuda/product_tile.h"

namespace satchel::cuda {
namespace epilogue::product {

static_assert(sizeof(ChannelTables) == kTableBytes);

template <Math math>
using Raw = std::conditional_t<is_half(math), uint16_t, float>;
template <Math math>
constexpr DType kHalfType = math == Math::f16 ? DType::f16 : DType::bf16;

template <int fragments, int across>
struct Tile {
  static constexpr TileShape kShape = {fragments, across};
  static constexpr int kFragments = fragments, kAcross = across, kWidth = kShape.width(), kPitch = kShape.pitch(), kSums = kShape.sums();
  static constexpr int kTeams = kShape.teams(), kTeamThreads = kBlockThreads / kTeams, kTeamRows = kRows / kTeams;
};

/// The thread's number, asked for anew each time: what follows from it is worked out where it is needed and takes no register between.
__device__ inline int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

struct Product {
  SideCode code;
  Chain chain;
  const uint64_t* seed;
  Parts from;
  const void *g0, *g1;
  int64_t stride0, stride1, rows, width, columns;  // columns: of all gradients
  int chunk;                                       // bytes of G that stand together, aligned: 16, 4 or 2
  float* partial;                                  // share × columns × channels
};

/// `bytes` from global to shared memory in the background where CUDA can (4 and 16), zeros where they do not exist.
template <int bytes>
__device__ inline void copy(void* to, const void* from, bool exists) {
  if constexpr (bytes == 2) {
    *static_cast<uint16_t*>(to) = exists ? __ldg(static_cast<const uint16_t*>(from)) : uint16_t{0};
  } else {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int size = exists ? bytes : 0;
    if constexpr (bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
  }
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// All copies but those of the last group are there, as far as this thread made them.
__device__ inline void await_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

template <class T, class R, int bytes>
__device__ inline void copy_step(const Product& a, int64_t column0, int64_t row0, R* to) {
  constexpr int kEach = bytes / static_cast<int>(sizeof(R)), kLine = T::kWidth / kEach;
#pragma unroll(bytes == 4 ? 1 : 4)
  for (int k = this_thread(); k < kRows * kLine; k += kBlockThreads) {
    const int r = k / kLine, c = k % kLine * kEach;
    const int64_t row = row0 + r, column = column0 + c;
    const bool exists = row < a.rows && column < a.columns, first = column < a.width;
    const R* from = static_cast<const R*>(first ? a.g0 : a.g1) + (first ? row * a.stride0 + column : row * a.stride1 + column - a.width);
    copy<bytes>(to + r * T::kPitch + c, exists ? from : a.g0, exists);
  }
}

/// Rows row0 … row0 + 31 of a tile of G; zeros where there are none.
template <class T, class R>
__device__ inline void fetch(const Product& a, int64_t column0, int64_t row0, R* to) {
  if (a.chunk == 16) {
    copy_step<T, R, 16>(a, column0, row0, to);
  } else if (a.chunk == 4) {
    copy_step<T, R, 4>(a, column0, row0, to);
  } else if constexpr (sizeof(R) == 2) {
    copy_step<T, R, 2>(a, column0, row0, to);
  }
}

__device__ inline uint32_t rounded_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

/// Which of Z's values a thread decodes: channels t % 16 · 8 … + 7 of row t / 16 of a step, or none.
struct Place {
  int lane, row;
  int64_t group;  // of 8 values; −1: none

  __device__ inline Place(const Product& a, int64_t row0, int64_t channel0) : lane(this_thread()), row(lane / 16), group(-1) {
    lane %= 16;
    const int64_t channel = channel0 + lane * 8;
    if (row0 + row < a.rows && channel < a.code.channels) group = ((row0 + row) * a.code.channels + channel) / 8;
  }
};

/// Those values as they stand in memory: what is made of them waits until they are needed.
struct Coded {
  uint32_t eight = 0;
  uint2 header = {0, 0};

  __device__ inline void load(const Product& a, int64_t row0, int64_t channel0) {
    const Place place(a, row0, channel0);
    if (place.group < 0) return;
    eight = __ldg(reinterpret_cast<const uint16_t*>(a.from.codes) + place.group);  // channels are a multiple of 8: all eight exist
    if (a.code.header == HeaderType::f32)
      header = __ldg(static_cast<const uint2*>(a.from.headers) + place.group / (kBlock / 8));
    else
      header.x = __ldg(static_cast<const uint32_t*>(a.from.headers) + place.group / (kBlock / 8));
  }
};

/// Four values as the product takes them.
template <Math math>
__device__ inline float4 factors(const float (&x)[4]) {
  if constexpr (math == Math::full) return make_float4(x[0], x[1], x[2], x[3]);
  uint32_t w[4];
  if constexpr (math == Math::tf32) {
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = rounded_tf32(x[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const uint32_t pair = half_pair<kHalfType<math>>(x[k], x[k + 1]);
      w[k] = __float_as_uint(low_half<kHalfType<math>>(pair)), w[k + 1] = __float_as_uint(high_half<kHalfType<math>>(pair));
    }
  }
  return make_float4(__uint_as_float(w[0]), __uint_as_float(w[1]), __uint_as_float(w[2]), __uint_as_float(w[3]));
}

/// A thread's values of the step from row0 on, to one buffer of Z; zeros where there are none. input_steps() of epilogue_backward.cu,
/// value for value.
template <Math math>
__device__ inline void decode(const Product& a, const ChannelTables& table, const Dropout& dropout, const WarpChannels& met,
                              uint32_t falling, const Coded& c, int64_t row0, int64_t channel0, float* z) {
  const Place place(a, row0, channel0);
  float4* to = reinterpret_cast<float4*>(z + place.row * kPitch + place.lane * 8);
  if (place.group < 0) {
    to[0] = to[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return;
  }
  const Range r = load_range(&c.header, a.code.header, 0);
  const side::Bounds b(r);
  const bool usual = met.fit(b);
  const Words kept = dropout.draw(place.group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Decoder decoder = table.decoder(place.lane, half, falling);
    const uint32_t four = c.eight >> (8 * half);
    float gamma[4], beta[4], x[4];
    table.gamma.get_half(place.lane, half, gamma);
    table.beta.get_half(place.lane, half, beta);
    if (usual) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = decoder.value<true>(k, four, b, a.code.table);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : decoder.value<false>(k, four, b, a.code.table);
    }
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      x[k] = chain_output(fmaf(gamma[k], x[k], beta[k]), dropout.factor(kept, j, is_on(c.eight, j)));
    }
    to[half] = factors<math>(x);
  }
}

/// A thread's sums by FMA: 2·fragments columns × 8 channels. Lanes stand so that neighbours (i, i ^ 1) share G's values and (i, i ^ 2)
/// Z's: 16-byte reads of both then go out two quarters of a warp at a time.
template <class T, Math math>
struct Sums {
  static constexpr int kPiece = T::kFragments % 2 == 0 ? 4 : 2, kMine = 2 * T::kFragments;
  float sum[T::kSums] = {};
  int column, channel;  // the first of a thread's

  __device__ inline Sums(int lane, int column0, int channel0)
      : column(column0 + ((lane >> 1 & 1) | (lane >> 2 & 6)) * kPiece), channel(channel0 + ((lane & 1) | (lane >> 1 & 2)) * 4) {}

  __device__ inline void add(const float* g, const float* z) {
#pragma unroll 2
    for (int r = 0; r < T::kTeamRows; ++r) {
      float a[kMine], b[8];
#pragma unroll
      for (int i = 0; i < kMine; i += kPiece) {
        const float* from = g + r * T::kPitch + column + i * 8;
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
        const float4 v = *reinterpret_cast<const float4*>(z + r * kPitch + channel + j * 4);
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

/// A thread's sums by tensor cores: fragments of 16 columns × 8 channels, eight rows at a time.
template <class T, Math math>
requires(math != Math::full) struct Sums<T, math> {
  float sum[T::kSums] = {};
  int lane, column, channel;  // the warp's first

  __device__ inline Sums(int lane, int column0, int channel0) : lane(lane), column(column0), channel(channel0) {}

  __device__ static inline uint32_t factor(float x) { return rounded_tf32(x); }
  __device__ static inline uint32_t factor(uint16_t x) { return __float_as_uint(low_half<kHalfType<math>>(x)); }

  __device__ static inline void multiply(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  __device__ inline void add(const Raw<math>* g, const float* z) {
#pragma unroll 1  // two at a time take more than 128 registers
    for (int r = 0; r < T::kTeamRows; r += 8) {
      const Raw<math>* from = g + (r + lane % 4) * T::kPitch + column + lane / 4;
      const float* with = z + (r + lane % 4) * kPitch + channel + lane / 4;
      uint32_t b[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][0] = __float_as_uint(with[j * 8]), b[j][1] = __float_as_uint(with[j * 8 + 4 * kPitch]);
#pragma unroll
      for (int i = 0; i < T::kFragments; ++i) {
        const uint32_t a[4] = {factor(from[i * 16]), factor(from[i * 16 + 8]), factor(from[i * 16 + 4 * T::kPitch]),
                               factor(from[i * 16 + 8 + 4 * T::kPitch])};
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sum + (i * 4 + j) * 4, a, b[j]);
      }
    }
  }

  template <class F>
  __device__ inline void for_pairs(F&& f) const {
#pragma unroll
    for (int k = 0; k < T::kSums; k += 2)
      f(column + k / 16 * 16 + k % 4 / 2 * 8 + lane / 4, channel + k / 4 % 4 * 8 + lane % 4 * 2, sum[k], sum[k + 1]);
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

}  // namespace epilogue::product
}  // namespace satchel::cuda
