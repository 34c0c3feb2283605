// P·(Zᵀ·g) from the codes of Z: g is read once, a sum stays in registers from a warp's first row to its last, and Z stands in shared
// memory eight rows at a time.
//
//   warp: rows [w·each, (w + 1)·each), 8 at a time    lanes: columns of g, 4 (width 16) or 2 (width 32) each, all of Z's a thread
//
// Warps need not wait for each other before the end. Then a thread block's sums are added in the order of its warps, and the blocks' by
// a second kernel, which also multiplies by P.
#include <bit>
#include <cmath>

#include "satchel/kernels/cuda/project_product.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace project_back {
namespace {

constexpr int kWarps = 8, kRows = 8;
static_assert(kProjectBack.threads == kWarps * 32);

template <int width>
constexpr int kColumns = 64 / width;  // of g a thread: 64 sums

struct Product {
  int64_t rows, columns, each;
  const void* g;
  const uint8_t* codes;
  const void* headers;
  HeaderType header;
  int shift;  // values a block, as a power of two
  float level[4];
  float* partial;
};

/// Neighbouring values of g, two or four.
template <DType type, int count>
__device__ inline void load_columns(const void* g, int64_t i, float (&v)[count]) {
  if constexpr (type == DType::f32 && count == 4) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(g) + i));
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  } else if constexpr (type == DType::f32) {
    const float2 a = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(g) + i));
    v[0] = a.x, v[1] = a.y;
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(g) + i;
    const uint2 w = count == 4 ? __ldg(reinterpret_cast<const uint2*>(p)) : make_uint2(__ldg(reinterpret_cast<const uint32_t*>(p)), 0u);
    v[0] = low_half<type>(w.x), v[1] = high_half<type>(w.x);
    if constexpr (count == 4) v[2] = low_half<type>(w.y), v[3] = high_half<type>(w.y);
  }
}

/// A lane's share of eight rows of Z: a quarter of row lane / 4.
template <int width>
struct Quarter {
  static constexpr int kValues = width / 4;
  uint32_t codes = 0;
  Header header = {0.0f, 0.0f};

  /// Rows from `end` on are 0.
  __device__ inline void load(const Product& a, int64_t first, int64_t end, int lane) {
    const int64_t row = first + lane / 4;
    if (row >= end) return;
    const int64_t at = row * 4 + lane % 4;
    codes = width == 16 ? __ldg(a.codes + at) : __ldg(reinterpret_cast<const uint16_t*>(a.codes) + at);
    header = load_header(a.headers, a.header, row * width >> a.shift);
  }
  __device__ inline void decode(const Product& a, int lane, float* z) const {
    float value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = fmaf(a.level[k], header.step, header.low);  // poisoned: 0·NaN is NaN too
#pragma unroll
    for (int j = 0; j < kValues; j += 4) {
      float v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t code = codes >> (2 * (j + k));
        const float lower = (code & 1) != 0 ? value[1] : value[0], upper = (code & 1) != 0 ? value[3] : value[2];
        v[k] = (code & 2) != 0 ? upper : lower;
      }
      *reinterpret_cast<float4*>(z + lane * kValues + j) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
};

/// `lanes` of a warp share a row of g: 32 / lanes rows side by side.
template <int width, DType type, int lanes>
__global__ void __launch_bounds__(kWarps * 32, kProjectBack.each) multiply_codes(const __grid_constant__ Product a) {
  constexpr int kMine = kColumns<width>, kSlots = 32 / lanes, kEach = kRows / kSlots, kTile = lanes * kMine;
  __shared__ __align__(16) float decoded[kWarps][kRows * width];
  __shared__ float total[width * kTile];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slot = lane / lanes, own = lane % lanes * kMine;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kTile + own;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * a.each, end = min(start + a.each, a.rows);
  float sum[width][kMine] = {};
  float* z = decoded[warp];
  for (int64_t first = start; first < end; first += kRows) {
    float g[kEach][kMine] = {};
    Quarter<width> quarter;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t row = first + e * kSlots + slot;
      if (row < end && column < a.columns) load_columns<type>(a.g, row * a.columns + column, g[e]);
    }
    quarter.load(a, first, end, lane);
    __syncwarp();  // the last rows have been read
    quarter.decode(a, lane, z);
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + e * kSlots >= end) break;
      const float4* row = reinterpret_cast<const float4*>(z + (e * kSlots + slot) * width);
#pragma unroll
      for (int q = 0; q < width / 4; ++q) {
        const float4 four = row[q];
#pragma unroll
        for (int c = 0; c < kMine; ++c) {
          sum[4 * q][c] = fmaf(four.x, g[e][c], sum[4 * q][c]);
          sum[4 * q + 1][c] = fmaf(four.y, g[e][c], sum[4 * q + 1][c]);
          sum[4 * q + 2][c] = fmaf(four.z, g[e][c], sum[4 * q + 2][c]);
          sum[4 * q + 3][c] = fmaf(four.w, g[e][c], sum[4 * q + 3][c]);
        }
      }
    }
  }
#pragma unroll 1
  for (int s = 0; s < kWarps * kSlots; ++s) {
    if (warp * kSlots + slot == s) {
#pragma unroll
      for (int r = 0; r < width; ++r) {
#pragma unroll
        for (int c = 0; c < kMine; ++c) total[r * kTile + own + c] = s == 0 ? sum[r][c] : total[r * kTile + own + c] + sum[r][c];
      }
    }
    __syncthreads();
  }
  for (int k = static_cast<int>(threadIdx.x); k < width * kTile; k += kWarps * 32) {
    const int64_t to = static_cast<int64_t>(blockIdx.y) * kTile + k % kTile;
    if (to < a.columns) a.partial[(static_cast<int64_t>(blockIdx.x) * width + k / kTile) * a.columns + to] = total[k];
  }
}

constexpr int kFinishThreads = 1024, kFinishColumns = 8;

/// Eight columns of P·(Σ partial) a thread block: `kShares` threads a sum, always in the same order, then a row of P a thread.
template <int width>
__global__ void __launch_bounds__(kFinishThreads)
    multiply_signs(const uint64_t* seed, const float* partial, int parts, int64_t columns, int depth, float unit, float* out) {
  constexpr int kShares = kFinishThreads / kFinishColumns / width;
  __shared__ double shares[kFinishThreads];
  __shared__ float inner[width][kFinishColumns];
  const int t = static_cast<int>(threadIdx.x), own = t % kFinishColumns, rest = t / kFinishColumns, r = rest % width;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFinishColumns + own;
  double sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int p = rest / width; p < parts; p += kShares) sum += partial[(static_cast<int64_t>(p) * width + r) * columns + column];
  }
  shares[t] = sum;
  __syncthreads();
  if (rest < width) {
    for (int s = 1; s < kShares; ++s) sum += shares[t + s * width * kFinishColumns];
    inner[r][own] = static_cast<float>(sum);
  }
  __syncthreads();
  if (column >= columns) return;
  const uint64_t key = __ldg(reinterpret_cast<const unsigned long long*>(seed));
  for (int d = rest; d < depth; d += kFinishThreads / kFinishColumns) {
    const Words w = projection_words(key, 0, static_cast<uint32_t>(d * width / 128), 0);
    const int word = d * width % 128 / 32;
    const uint32_t signs = (word == 0 ? w.w[0] : word == 1 ? w.w[1] : word == 2 ? w.w[2] : w.w[3]) >> (d * width % 32);
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < width; ++k) dot += (signs >> k & 1) != 0 ? -inner[k][own] : inner[k][own];
    out[static_cast<int64_t>(d) * columns + column] = dot * unit;
  }
}

/// How the columns of g lie over lanes and thread blocks.
struct Tiling {
  int lanes = 8;
  int64_t tiles, parts;

  Tiling(int64_t rows, int64_t columns, int width) {
    const int64_t mine = 64 / width;
    while (lanes < 32 && lanes * mine < columns) lanes *= 2;
    tiles = ceil_div(columns, lanes * mine);
    parts = parts_of_tiles(tiles, ceil_div(rows, kWarps * kRows), resident(this_gpu(), kProjectBack));
  }
};

template <int width>
void launch_both(const Product& a, const Tiling& t, const Projection& p, const uint64_t* seed, DType type, float* out,
                 StreamHandle stream) {
  constexpr const char* op = "project_product";
  with_type(type, [&](auto known) {
    const auto kernel = t.lanes == 8    ? multiply_codes<width, known(), 8>
                        : t.lanes == 16 ? multiply_codes<width, known(), 16>
                                        : multiply_codes<width, known(), 32>;
    launch_kernel(op, stream, {dim3(grid_size(t.parts), grid_size(t.tiles)), kWarps * 32}, kernel, a);
  });
  launch_kernel(op, stream, {grid_size(ceil_div(a.columns, kFinishColumns)), kFinishThreads}, multiply_signs<width>, seed, a.partial,
                static_cast<int>(t.parts), a.columns, p.columns, 1.0f / std::sqrt(static_cast<float>(width)), out);
}

}  // namespace
}  // namespace project_back

bool project_product_fits(const Projection& p, const BlockCode& code, int64_t columns) {
  const int64_t block = code.grid.block;
  if (p.hadamard || p.per_matrix < p.rows || (p.width != 16 && p.width != 32) || p.rows < 1 || columns < 1) return false;
  return code.levels.bits == 2 && block >= p.width && (block & (block - 1)) == 0 && code.grid.is_straight() &&
         columns % (64 / p.width) == 0 && columns < int64_t{1} << 20;  // CUDA takes fewer than 2^16 thread blocks upwards
}

int64_t project_product_scratch_bytes(const Projection& p, int64_t columns) {
  return project_back::Tiling(p.rows, columns, p.width).parts * p.width * columns * static_cast<int64_t>(sizeof(float));
}

void project_product(const Projection& p, const BlockCode& code, const uint8_t* codes, const void* headers, const uint64_t* seed,
                     const void* g, DType type, int64_t columns, float* out, void* scratch, StreamHandle stream) {
  constexpr const char* op = "project_product";
  using namespace project_back;
  if (!project_product_fits(p, code, columns)) fail(op, "project_product_fits must be true of projection, code and columns");
  if (!is_aligned(codes) || !is_aligned(headers) || !is_aligned(g)) fail(op, "codes, headers and g must start at a multiple of 16");
  const Tiling t(p.rows, columns, p.width);
  Product a = {p.rows,
               columns,
               ceil_div(p.rows, t.parts * kWarps),
               g,
               codes,
               headers,
               code.header,
               std::countr_zero(static_cast<uint64_t>(code.grid.block)),
               {0.0f, 1.0f, 2.0f, 3.0f},
               static_cast<float*>(scratch)};
  for (int k = 0; k < 4 && !code.levels.even; ++k) a.level[k] = code.levels.at[k];
  p.width == 16 ? launch_both<16>(a, t, p, seed, type, out, stream) : launch_both<32>(a, t, p, seed, type, out, stream);
}

}  // namespace satchel::cuda
