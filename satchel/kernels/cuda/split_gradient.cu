// gᵀ·x of two tall float32 matrices in fp32, on tensor cores (split.cuh): the gradient of weights.
//
//   thread block: 128 columns of g × 128 of x, a share of the rows, 32 a step     writer: 8 rows × 4 of these columns
//
// A second kernel adds the shares, in order.
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/split.cuh"
#include "satchel/kernels/cuda/split_product.h"

namespace satchel::cuda {
namespace split {
namespace {

struct Product {
  TallPair from;
  int parts;  // thread blocks a tile, side by side in the grid: it has one dimension, since others end at 65,535
  int64_t x_tiles;
  float* partial;
};

constexpr int kWidth = 128;
using ColumnsTile = Tile<kRows, 128, 528>;  // every fourth of 32 columns is written at a time, 8 deep
static_assert(kWidth == kRows && kRows == kWarpgroup);

struct Stage {
  ColumnsTile left, right;
  float back[kRows], back_column[kWidth];
};

/// Eight rows of four columns; four lanes have those of all 32 rows.
template <bool quads>
struct Ahead {
  float v[4][8];  // by column

  /// From `at` on, where `rows` rows and `columns` columns are left; `whole`: for all lanes of the warp at least 8 and 4.
  __device__ inline void load(const float* at, int stride, int64_t rows, int columns, bool whole) {
    if (quads && whole) {
#pragma unroll
      for (int r = 0; r < 8; ++r) put(r, __ldg(reinterpret_cast<const float4*>(at + r * stride)));
      return;
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const auto value = [&](int c) { return r < rows && c < columns ? __ldg(at + r * stride + c) : 0.0f; };
      put(r, make_float4(value(0), value(1), value(2), value(3)));
    }
  }

  __device__ inline void put(int r, float4 x) { v[0][r] = x.x, v[1][r] = x.y, v[2][r] = x.z, v[3][r] = x.w; }

  __device__ inline void cut_into(ColumnsTile& tile, float* back, int column, int row) const {
    float undo[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float largest = 0.0f;
#pragma unroll
      for (const float x : v[c]) largest = fmaxf(largest, fabsf(x));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
      const Scale scale = scale_of(largest);
      split::put(tile, column + c, row, v[c], scale.to);
      undo[c] = scale.back;
    }
    if (row == 0) *reinterpret_cast<float4*>(back + column) = make_float4(undo[0], undo[1], undo[2], undo[3]);
  }
};

template <bool quads>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_tall(const __grid_constant__ Product p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Ring ring;
  auto* stages = reinterpret_cast<Stage*>(shared);
  const TallPair& from = p.from;
  const int64_t tile = static_cast<int>(blockIdx.x) / p.parts, part = static_cast<int>(blockIdx.x) % p.parts;
  const int64_t g0 = tile / p.x_tiles * kRows, x0 = tile % p.x_tiles * kWidth;
  const int64_t steps = ceil_div(from.rows, kDepth);
  const int64_t first = steps * part / p.parts, last = steps * (part + 1) / p.parts;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) ring.begin();
  __syncthreads();
  Turn turn;
  if (thread >= kSide) {
    give_registers();
    const int own = thread % kRows / 32 * 32 + thread % 8 * 4, row = thread % 32 / 8 * 8;
    const bool is_g = thread < kSide + kWarpgroup;
    const int64_t stride = is_g ? from.g_stride : from.x_stride, column = (is_g ? g0 : x0) + own;
    const int columns = static_cast<int>((is_g ? from.g_columns : from.x_columns) - column);
    const float* at = (is_g ? from.g : from.x) + (first * kDepth + row) * stride + column;
    int64_t left = from.rows - first * kDepth - row;
    const bool all_columns = __all_sync(0xffffffffu, columns >= 4);
    Ahead<quads> ahead[2];  // of this step and of the next
    int64_t to_read = first;
    const auto load = [&](Ahead<quads>& to) {
      to.load(at, static_cast<int>(stride), left, columns, all_columns && (to_read + 1) * kDepth <= from.rows);
      at += kDepth * stride, left -= kDepth, ++to_read;
    };
    load(ahead[0]);
    load(ahead[1]);
#pragma unroll 1
    for (int64_t step = first; step < last;) {
#pragma unroll
      for (Ahead<quads>& read : ahead) {
        if (step == last) break;
        Stage& to = stages[turn.stage];
        ring.await_empty(turn);
        read.cut_into(is_g ? to.left : to.right, is_g ? to.back : to.back_column, own, row);
        ring.say_full(turn);  // waits for reads under way: the next begin after it
        load(read);
        turn = turn.next();
        ++step;
      }
    }
    return;
  }
  take_registers();
  Sums<kWidth> sums;
#pragma unroll 1
  for (int64_t step = first; step < last; ++step) {
    ring.await_full(turn);
    const Stage& s = stages[turn.stage];
    sums.add(s.left, s.right, s.back, s.back_column);
    ring.say_empty(turn);
    turn = turn.next();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = g0 + sums.row + 8 * h, at = x0 + sums.column;
    const int columns = static_cast<int>(min(from.x_columns - at, int64_t{kWidth}));
    float* out = p.partial + (part * from.g_columns + row) * from.x_columns + at;
    if (row >= from.g_columns) return;
#pragma unroll
    for (int j = 0; j < kWidth; j += 8) {
      if (j < columns) out[j] = sums.sum[j / 2 + 2 * h];
      if (j + 1 < columns) out[j + 1] = sums.sum[j / 2 + 2 * h + 1];
    }
  }
}

int64_t tiles_of(const TallPair& p) { return ceil_div(p.g_columns, kRows) * ceil_div(p.x_columns, kWidth); }
/// Thread blocks a tile: all multiprocessors, eight steps each at least.
int64_t parts_of(const TallPair& p) { return parts_of_tiles(tiles_of(p), ceil_div(p.rows, 8 * kDepth), this_gpu().processors); }

}  // namespace
}  // namespace split

int64_t split_gradient_scratch_bytes(const TallPair& p) {
  if (p.g_columns == 0 || p.x_columns == 0) return 0;
  return split::parts_of(p) * p.g_columns * p.x_columns * static_cast<int64_t>(sizeof(float));
}

void split_gradient(const TallPair& from, bool add, float* out, void* scratch, StreamHandle stream) {
  using namespace split;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t values = from.g_columns * from.x_columns;
  if (values == 0) return;
  constexpr int kShared = kStages * sizeof(Stage);
  const int64_t parts = parts_of(from);
  const split::Product p = {from, static_cast<int>(parts), ceil_div(from.x_columns, kWidth), static_cast<float*>(scratch)};
  const bool quads = from.g_columns % 4 == 0 && from.g_stride % 4 == 0 && is_aligned(from.g) && from.x_columns % 4 == 0 &&
                     from.x_stride % 4 == 0 && is_aligned(from.x);
  const auto kernel = quads ? multiply_tall<true> : multiply_tall<false>;
  allow_shared(reinterpret_cast<const void*>(kernel), kShared, "split_gradient");
  kernel<<<grid_size(parts * tiles_of(from)), kBlockThreads, kShared, s>>>(p);
  check_launch("split_gradient");
  add_up(p.partial, parts, values, add, values, out, nullptr, s, "split_gradient");
}

}  // namespace satchel::cuda
