// Random projection Z = H·P (theory.md 4). The signs of P are drawn into shared memory from counters; H goes through the tensor
// cores as the sum of up to three bf16 numbers. H is read once, nothing but Z or its codes is written. Sums beyond the range of
// fp32, and values beyond that of bf16 (3.39e38), come out as NaN or infinity and poison their block.
#include <cuda_bf16.h>

#include <cmath>

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kWarps = 4, kTileRows = 16 * kWarps;
constexpr int kDepth = 256;         // columns of H a pass
constexpr int kMostWidth = 32;      // columns of Z a thread block
constexpr int kPitch = kDepth + 8;  // bf16 numbers a column of P in shared memory: no two rows of a fragment share a bank
constexpr int kBits = 2;            // of codes that are made on the spot

/// Steps of 16 columns whose loads are in flight together, twice over. `whole`: see kTerms.
template <bool whole>
constexpr int kBatch = whole ? 4 : 2;

constexpr int64_t kTilesEach = 2;  // a thread block's tiles: fewer draw the same matrix more often, more leave the GPU uneven

struct Args {
  Projection p;
  const void* h;
  DType type;
  const uint64_t* seed;
  float* z;
  float unit;
  BlockCode code;  // these three where Z is coded on the spot
  uint8_t* codes;
  void* headers;
};

__device__ inline uint16_t sign_of(uint32_t word, int bit) {
  return static_cast<uint16_t>((word >> bit & 1u) << 15 | 0x3f80u);
}  // ±1 in bf16

/// The 32 signs of word `word` of a matrix, laid out column by column. `width` 16 or 32: a word is whole rows of P.
template <int width>
__device__ inline void put_rows(uint32_t quarter, int d, uint16_t* signs) {
#pragma unroll
  for (int k = 0; k < 32; ++k) signs[k % width * kPitch + d + k / width] = sign_of(quarter, k);
}

__device__ inline void put_any(const Args& a, uint32_t quarter, uint64_t bit, int d0, int depth, int r0, int width, uint16_t* signs) {
  int d = static_cast<int>(bit / static_cast<uint64_t>(a.p.width)) - d0, r = static_cast<int>(bit % static_cast<uint64_t>(a.p.width)) - r0;
  for (int k = 0; k < 32; ++k) {
    if (d >= 0 && d < depth && r >= 0 && r < width) signs[r * kPitch + d] = sign_of(quarter, k);
    if (++r == a.p.width - r0) r = -r0, ++d;
  }
}

/// Signs of P[d0 … d0 + kDepth)[r0 … r0 + kMostWidth) as ±1 in bf16, column by column; 0 beyond the matrix.
__device__ void draw_signs(const Args& a, uint64_t seed, int64_t matrix, int d0, int r0, uint16_t* signs) {
  const int depth = min(kDepth, a.p.columns - d0), width = min(kMostWidth, a.p.width - r0);
  if (depth < kDepth || width < kMostWidth) {
    for (int k = static_cast<int>(threadIdx.x); k < kPitch * kMostWidth / 8; k += kWarps * 32) reinterpret_cast<uint4*>(signs)[k] = {};
    __syncthreads();
  }
  if (a.p.hadamard) {
    for (int k = static_cast<int>(threadIdx.x); k < depth * width; k += kWarps * 32) {
      const int r = k / depth, d = k % depth;
      signs[r * kPitch + d] = sign_of(is_negative(a.p, seed, matrix, d0 + d, r0 + r) ? 1u : 0u, 0);
    }
    return;
  }
  const uint64_t first = static_cast<uint64_t>(d0) * static_cast<uint64_t>(a.p.width);
  const uint64_t last = static_cast<uint64_t>(d0 + depth) * static_cast<uint64_t>(a.p.width);
  // 32 signs a thread and step: four threads share a Philox call's result by drawing it each.
  for (uint64_t word = first / 32 + threadIdx.x; word * 32 < last; word += kWarps * 32) {
    const Words w = projection_words(seed, matrix, static_cast<uint32_t>(word / 4), 0);
    const uint32_t quarter = word % 4 == 0 ? w.w[0] : word % 4 == 1 ? w.w[1] : word % 4 == 2 ? w.w[2] : w.w[3];
    if (a.p.width == 32)
      put_rows<32>(quarter, static_cast<int>(word) - d0, signs);
    else if (a.p.width == 16 && depth % 2 == 0)
      put_rows<16>(quarter, static_cast<int>(word) * 2 - d0, signs);
    else
      put_any(a, quarter, word * 32, d0, depth, r0, width, signs);
  }
}

__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Takes the leading bf16 part of two numbers off them.
__device__ inline uint32_t take_leading(float& x, float& y) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  x -= __low2float(h);
  y -= __high2float(h);
  return *reinterpret_cast<const uint32_t*>(&h);
}

/// bf16 numbers that make up a value. fp32 takes three; two are off by 2^−18 of h, less than the 128 or more additions of a
/// `whole` row, a multiple of 128 aligned values, are in fp32 anyway (128·2^−24). Other rows are read by one kernel for all types.
__host__ __device__ constexpr int terms_of(DType type, bool whole) {
  return type == DType::f32 ? (whole ? 2 : 3) : type == DType::f16 ? 2 : 1;
}

/// Four neighbouring values from column d of a row; 0 beyond the matrix.
template <DType type, bool whole>
__device__ inline void load_row4(const Args& a, int64_t row, int d, float (&v)[4]) {
  const int64_t at = row * a.p.columns + d;
  if constexpr (!whole) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = d + j < a.p.columns ? load_any(a.h, a.type, at + j) : 0.0f;
  } else if constexpr (type == DType::f32) {
    // volatile: the loads of all kBatch steps are to be issued before the first product waits for one.
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(static_cast<const float*>(a.h) + at));
  } else {
    const uint2 u = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(a.h) + at));
    const uint32_t w[2] = {u.x, u.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint16_t s = static_cast<uint16_t>(w[j / 2] >> (j % 2 * 16));
      v[j] = type == DType::f16 ? float_of_f16(s) : from_bf16(s);
    }
  }
}

/// Sixteen columns of sixteen rows times P: the fragments' columns are dealt out so that a thread reads 4 neighbouring values of two
/// rows; P's rows are dealt out alike.
template <DType type, bool whole>
__device__ inline void multiply_step(const Args& a, const float (&upper)[4], const float (&lower)[4], const uint16_t* signs,
                                     float (&z)[kMostWidth / 8][4]) {
  constexpr int kTerms = terms_of(type, whole);
  const int terms = whole ? kTerms : terms_of(a.type, false);
  uint32_t term[kTerms][4];
  float u[4] = {upper[0], upper[1], upper[2], upper[3]}, l[4] = {lower[0], lower[1], lower[2], lower[3]};
#pragma unroll
  for (int k = 0; k < kTerms; ++k) {
    if (k >= terms) break;
    term[k][0] = take_leading(u[0], u[1]);
    term[k][1] = take_leading(l[0], l[1]);
    term[k][2] = take_leading(u[2], u[3]);
    term[k][3] = take_leading(l[2], l[3]);
  }
#pragma unroll
  for (int n = 0; n < kMostWidth / 8; ++n) {
    const uint2 b = *reinterpret_cast<const uint2*>(signs + n * 8 * kPitch);
#pragma unroll
    for (int k = kTerms - 1; k >= 0; --k) {  // the smallest first
      if (k < terms) multiply(z[n], term[k], b.x, b.y);
    }
  }
}

/// The loads of kBatch steps, and their products.
template <DType type, bool whole>
struct Batch {
  float upper[kBatch<whole>][4], lower[kBatch<whole>][4];

  __device__ inline void fetch(const Args& a, int64_t upper_row, int64_t lower_row, int d) {
#pragma unroll
    for (int k = 0; k < kBatch<whole>; ++k) {
      load_row4<type, whole>(a, upper_row, d + 16 * k, upper[k]);
      load_row4<type, whole>(a, lower_row, d + 16 * k, lower[k]);
    }
  }
  __device__ inline void multiply(const Args& a, const uint16_t* signs, float (&z)[kMostWidth / 8][4]) const {
#pragma unroll
    for (int k = 0; k < kBatch<whole>; ++k) multiply_step<type, whole>(a, upper[k], lower[k], signs + 16 * k, z);
  }
};

/// One warp's 16 rows of a tile times the columns d0 … d0 + depth of P in shared memory; zeros stand beyond `depth`.
template <DType type, bool whole>
__device__ inline void multiply_rows(const Args& a, int64_t upper_row, int64_t lower_row, int d0, int depth, int t, const uint16_t* signs,
                                     float (&z)[kMostWidth / 8][4]) {
  constexpr int kStep = 16 * kBatch<whole>;
  Batch<type, whole> even, odd;
  even.fetch(a, upper_row, lower_row, d0 + 4 * t);
  odd.fetch(a, upper_row, lower_row, d0 + kStep + 4 * t);
  for (int d = 0; d < depth; d += 2 * kStep) {
    even.multiply(a, signs + d + 4 * t, z);
    if (d + 2 * kStep < depth) even.fetch(a, upper_row, lower_row, d0 + d + 2 * kStep + 4 * t);
    odd.multiply(a, signs + d + kStep + 4 * t, z);
    if (d + 3 * kStep < depth) odd.fetch(a, upper_row, lower_row, d0 + d + 3 * kStep + 4 * t);
  }
}

__device__ inline uint64_t encode_any(const Args& a, const float (&v)[8], const BlockRuler& b, const Words& noise) {
  const LevelTable& levels = a.code.levels;
  if (!b.plain) return encode8(kBits, levels.even, v, b, levels, noise);
  return levels.even ? encode8<kBits, true>(v, b, levels, noise) : encode8<kBits, false>(v, b, levels, noise);
}

/// Codes of a tile of Z that stands in shared memory: teams as in block_code.cu, `chunks` groups of 8 values a thread.
template <int chunks>
__device__ inline void encode_tile(const Args& a, const float* tile, int64_t first_group, int groups, UniformSeed seed) {
  const int lanes = static_cast<int>(a.code.grid.block) / 8 / chunks, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int own = (static_cast<int>(threadIdx.x) - lane) * chunks + lane;
  float v[chunks][8];
  Extremes e;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const float4* p = reinterpret_cast<const float4*>(tile) + (own + c * lanes) * 2;
    const float4 l = p[0], r = p[1];
    v[c][0] = l.x, v[c][1] = l.y, v[c][2] = l.z, v[c][3] = l.w, v[c][4] = r.x, v[c][5] = r.y, v[c][6] = r.z, v[c][7] = r.w;
    if (own + c * lanes < groups) e.add8(v[c]);
  }
  e.reduce(lanes);
  if (own >= groups) return;
  const BlockRuler b = block_ruler(kBits, e, a.code.header);
  if (lane == 0) store_header(a.headers, a.code.header, first_group * 8 / a.code.grid.block + own / (lanes * chunks), b.header);
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int64_t group = first_group + own + c * lanes;
    if (own + c * lanes >= groups) continue;
    const Words noise = group_noise(seed, a.code.rounding, group);
    store_codes<kBits>(a.codes, group, encode_any(a, v[c], b, noise), 8);
  }
}

/// The same where a tile is one block: every thread of the thread block takes `chunks` groups.
template <int chunks>
__device__ inline void encode_block_tile(const Args& a, const float* tile, int64_t first_group, int groups, UniformSeed seed) {
  __shared__ float2 pairs[32];
  __shared__ BlockRuler ruler;
  float v[chunks][8];
  Extremes e;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int own = static_cast<int>(threadIdx.x) + c * kWarps * 32;
    const float4* p = reinterpret_cast<const float4*>(tile) + own * 2;
    const float4 l = p[0], r = p[1];
    v[c][0] = l.x, v[c][1] = l.y, v[c][2] = l.z, v[c][3] = l.w, v[c][4] = r.x, v[c][5] = r.y, v[c][6] = r.z, v[c][7] = r.w;
    if (own < groups) e.add8(v[c]);
  }
  const BlockRuler b = shared_ruler(kBits, e, a.code.header, a.headers, first_group * 8 / a.code.grid.block, pairs, &ruler);
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int own = static_cast<int>(threadIdx.x) + c * kWarps * 32;
    if (own >= groups) continue;
    const Words noise = group_noise(seed, a.code.rounding, first_group + own);
    store_codes<kBits>(a.codes, first_group + own, encode_any(a, v[c], b, noise), 8);
  }
}

/// What becomes of a tile of Z: written as it is, or coded on the spot.
struct KeepZ {
  static constexpr int kTileFloats = 4;

  __device__ static void begin(const Args&) {}

  template <DType type>
  __device__ static void put(const Args& a, const float (&z)[kMostWidth / 8][4], int64_t row, int64_t, int64_t end, int r0, int t, float*,
                             UniformSeed) {
#pragma unroll
    for (int n = 0; n < kMostWidth / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = r0 + n * 8 + 2 * t + e % 2;
        if (row + e / 2 * 8 < end && r < a.p.width) a.z[(row + e / 2 * 8) * a.p.width + r] = z[n][e] * a.unit;
      }
    }
  }
};

/// Widths of 16 and 32: a tile of 64 rows is one or two groups of 8 values a thread.
template <int chunks>
struct CodeZ {
  static constexpr int kWidth = 16 * chunks, kTileFloats = kTileRows * kWidth;

  /// Zeros between codes and headers: fewer than 16 bytes.
  __device__ static void begin(const Args& a) {
    uint8_t* gap = a.codes + code_bytes(a.code.grid.values, kBits) + threadIdx.x;
    if (blockIdx.x == 0 && blockIdx.y == 0 && gap < static_cast<uint8_t*>(a.headers)) *gap = 0;
  }

  template <DType type>
  __device__ static void put(const Args& a, const float (&z)[kMostWidth / 8][4], int64_t row, int64_t tile, int64_t end, int, int t,
                             float* shared, UniformSeed seed) {
    __syncthreads();  // the last tile has been coded
    const int at = static_cast<int>(row - tile) * kWidth + 2 * t;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      *reinterpret_cast<float2*>(shared + at + n * 8) = make_float2(z[n][0] * a.unit, z[n][1] * a.unit);
      *reinterpret_cast<float2*>(shared + at + 8 * kWidth + n * 8) = make_float2(z[n][2] * a.unit, z[n][3] * a.unit);
    }
    __syncthreads();
    const int rows = end - tile < kTileRows ? static_cast<int>(end - tile) : kTileRows;
    if (a.code.grid.block == kTileFloats)
      encode_block_tile<chunks>(a, shared, tile * (kWidth / 8), rows * (kWidth / 8), seed);
    else
      encode_tile<chunks>(a, shared, tile * (kWidth / 8), rows * (kWidth / 8), seed);
  }
};

/// A thread block: kMostWidth columns of Z for tiles of 64 rows of one matrix. P is drawn once where it fits into shared memory.
template <DType type, bool whole, class Sink>
__global__ void __launch_bounds__(kWarps * 32, 4) project_tiles(const __grid_constant__ Args a, int64_t workers) {
  __shared__ __align__(16) uint16_t signs[kPitch * kMostWidth];
  __shared__ __align__(16) float shared[Sink::kTileFloats];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = lane / 4, t = lane % 4;
  const int64_t matrix = quotient(blockIdx.x, workers), start = matrix * a.p.per_matrix;
  const int64_t end = min(start + a.p.per_matrix, a.p.rows);
  const int r0 = static_cast<int>(blockIdx.y) * kMostWidth;
  const UniformSeed seed(a.seed);
  Sink::begin(a);
  bool drawn = false;
  for (int64_t tile = start + (blockIdx.x - matrix * workers) * kTileRows; tile < end; tile += workers * kTileRows) {
    const int64_t row = tile + warp * 16 + g;
    const int64_t upper_row = min(row, end - 1), lower_row = min(row + 8, end - 1);  // rows past the end are read again, not written
    float z[kMostWidth / 8][4] = {};
    for (int d0 = 0; d0 < a.p.columns; d0 += kDepth) {
      if (!drawn) {
        __syncthreads();
        draw_signs(a, static_cast<uint64_t>(seed.k1) << 32 | seed.k0, matrix, d0, r0, signs);
        __syncthreads();
        drawn = a.p.columns <= kDepth;
      }
      multiply_rows<type, whole>(a, upper_row, lower_row, d0, min(kDepth, a.p.columns - d0), t, signs + g * kPitch, z);
    }
    Sink::template put<type>(a, z, row, tile, end, r0, t, shared, seed);
  }
}

template <class Sink>
void launch_tiles(const Args& a, StreamHandle stream) {
  const Projection& p = a.p;
  const int64_t tiles = ceil_div(less_of(p.per_matrix, p.rows), kTileRows), workers = ceil_div(tiles, kTilesEach);
  const dim3 grid(grid_size(p.matrices() * workers), static_cast<unsigned>(ceil_div(p.width, kMostWidth)));
  const auto launch = [&](auto kernel) { launch_kernel("project", stream, {grid, kWarps * 32}, kernel, a, workers); };
  if (!is_aligned(a.h) || p.columns % (32 * kBatch<true>) != 0) return launch(project_tiles<DType::f32, false, Sink>);
  with_type(a.type, [&](auto t) { launch(project_tiles<t(), true, Sink>); });
}

/// Can a tile be coded where it was made? Then Z never stands in device memory.
bool is_fused(const Projection& p, const BlockCode& code) {
  const int64_t chunks = p.width / 16, lanes = chunks == 0 ? 0 : code.grid.block / (8 * chunks);
  const bool team = lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0 && code.grid.block == lanes * 8 * chunks;
  return code.levels.bits == kBits && (p.width == 16 || p.width == 32) && code.grid.span == code.grid.values &&
         (team || code.grid.block == kTileRows * p.width) && (p.per_matrix >= p.rows || p.per_matrix % kTileRows == 0);
}

/// The matrices themselves, for the way back: one entry a thread.
__global__ void __launch_bounds__(kThreads)
    draw(const __grid_constant__ Projection p, const uint64_t* seed, float* out, int64_t first, int64_t entries, float unit) {
  const int64_t i = thread_index();
  if (i >= entries) return;
  const int64_t size = static_cast<int64_t>(p.columns) * p.width, at = i % size;
  const int d = static_cast<int>(at / p.width), r = static_cast<int>(at % p.width);
  out[i] = is_negative(p, *seed, first + i / size, d, r) ? -unit : unit;
}

float unit_of(const Projection& p) { return 1.0f / std::sqrt(static_cast<float>(p.width)); }

}  // namespace

void project(const Projection& p, const void* h, DType type, const uint64_t* seed, float* z, StreamHandle stream) {
  if (p.rows == 0 || p.width == 0) return;
  launch_tiles<KeepZ>({p, h, type, seed, z, unit_of(p), {}, nullptr, nullptr}, stream);
}

int64_t project_scratch_bytes(const Projection& p, const BlockCode& code) { return is_fused(p, code) ? 0 : p.rows * p.width * 4; }

void project_encode(const Projection& p, const BlockCode& code, const void* h, DType type, const uint64_t* seed, uint8_t* codes,
                    void* headers, void* scratch, StreamHandle stream) {
  if (p.rows == 0 || p.width == 0) return;
  if (!is_fused(p, code)) {
    project(p, h, type, seed, static_cast<float*>(scratch), stream);
    return encode(code, scratch, DType::f32, seed, codes, headers, stream);
  }
  const Args a = {p, h, type, seed, nullptr, unit_of(p), code, codes, headers};
  if (p.width == 16)
    launch_tiles<CodeZ<1>>(a, stream);
  else
    launch_tiles<CodeZ<2>>(a, stream);
}

void draw_projection(const Projection& p, const uint64_t* seed, float* matrices, int64_t first, int64_t last, StreamHandle stream) {
  const int64_t entries = (last - first) * p.columns * p.width;
  if (entries == 0) return;
  launch_kernel("project", stream, {blocks_for(entries)}, draw, p, seed, matrices, first, entries, unit_of(p));
}

}  // namespace satchel::cuda
