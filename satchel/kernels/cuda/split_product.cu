// Rows of activations times weights in fp32, on tensor cores (split.cuh). The weights are cut into pieces by a kernel before; the rows'
// pieces are made on their way into shared memory.
//
//   thread block: tiles of 128 rows × 128 (or 64) columns, one after the other, 32 of the depth a step
#include <array>
#include <atomic>

#include "satchel/kernels/cuda/split.cuh"
#include "satchel/kernels/cuda/split_product.h"

namespace satchel::cuda {
namespace split {
namespace {

template <int width>
using FactorTile = Tile<width, 128, 512>;  // without gaps: copied as it stands in memory
using RowsTile = Tile<kRows, 160, 640>;    // four rows are written at a time, 32 deep

int64_t padded(int64_t depth) { return ceil_div(depth, kDepth) * kDepth; }
int64_t whole_depth(const SplitFactor& f) { return padded(f.depth[0]) + (f.count == 2 ? padded(f.depth[1]) : 0); }
/// Columns in tiles of 64.
int64_t padded_columns(const SplitFactor& f) { return ceil_div(f.columns, 64) * 64; }

/// A factor's pieces: [high | low], chunks of kDepth, each a tile of all columns; and what undoes the scale of each chunk's columns.
struct Cut {
  const uint16_t* high;
  const uint16_t* low;
  const float* back;
};
Cut parts_of(const SplitFactor& f, const void* pieces) {
  const int64_t each = padded_columns(f) * whole_depth(f);
  const auto* high = static_cast<const uint16_t*>(pieces);
  return {high, high + each, reinterpret_cast<const float*>(high + 2 * each)};
}

/// A warp a column, a lane a value of a chunk.
__global__ void __launch_bounds__(kThreads)
    cut_factor(const __grid_constant__ SplitFactor f, int64_t columns, int64_t chunks, uint16_t* high, uint16_t* low, float* back) {
  const int64_t column = thread_index() / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  static_assert(kDepth == 32);
  if (column >= columns) return;
  const int64_t second = ceil_div(f.depth[0], kDepth);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int i = chunk >= second ? 1 : 0;
    const int64_t k = (chunk - i * second) * kDepth + lane;
    const float value = column < f.columns && k < f.depth[i] ? __ldg(f.b[i] + k * f.by_depth[i] + column * f.by_column[i]) : 0.0f;
    float largest = fabsf(value);
#pragma unroll
    for (int with = 16; with > 0; with /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, with));
    const Scale scale = scale_of(largest);
    const float x = value * scale.to;
    const uint32_t first = f16_pair(x, 0.0f);
    const int64_t at = chunk * columns * kDepth + FactorTile<8>::index(column, lane);
    high[at] = static_cast<uint16_t>(first);
    low[at] = static_cast<uint16_t>(rest(x, 0.0f, first));
    if (lane == 0) back[chunk * columns + column] = scale.back;
  }
}

struct Product {
  SplitRows from;
  int64_t depth[2], columns, padded_columns;
  int chunks[2];  // of kDepth
  Cut factor;
  int column_tiles, row_tiles;
  const float* bias;
  float* out;
  int64_t out_stride;
  bool pairs;  // are results written by twos?
};

template <int width>
struct Stage {
  RowsTile left;
  FactorTile<width> right;
  float back[kRows], back_column[width];
};

/// A step of a thread block: 128 rows, 32 of the depth.
struct Step {
  int tile, chunk;
};

/// Four values of each of four rows: eight lanes a row, 16 rows a warp. Past the last row it stands again; nobody writes its product. Steps
/// past the last tile read it too, perhaps while it is written over; nobody uses what they read.
template <bool quads>
struct Ahead {
  float v[4][4];

  __device__ inline void load(const Product& p, const Step& s) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x - kSide) / 32;
    const bool second = s.chunk >= p.chunks[0];
    const int k = (s.chunk - (second ? p.chunks[0] : 0)) * kDepth + lane % 8 * 4;
    const int depth = static_cast<int>(second ? p.depth[1] : p.depth[0]);
    const float* from = (second ? p.from.a[1] : p.from.a[0]) + k;
    const int64_t stride = second ? p.from.stride[1] : p.from.stride[0];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int64_t row = min(static_cast<int64_t>(s.tile) * kRows + warp * 16 + q * 4 + lane / 8, p.from.rows - 1);
      const float* at = from + row * stride;
      if constexpr (quads) {
        const float4 x = k < depth ? *reinterpret_cast<const float4*>(at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v[q][0] = x.x, v[q][1] = x.y, v[q][2] = x.z, v[q][3] = x.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[q][i] = k + i < depth ? at[i] : 0.0f;
      }
    }
  }

  template <class S>
  __device__ inline void cut_into(S& stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x - kSide) / 32;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float largest = fmaxf(fmaxf(fabsf(v[q][0]), fabsf(v[q][1])), fmaxf(fabsf(v[q][2]), fabsf(v[q][3])));
#pragma unroll
      for (int with = 4; with > 0; with /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, with));
      const Scale scale = scale_of(largest);
      const int row = warp * 16 + q * 4 + lane / 8;
      put(stage.left, row, lane % 8 * 4, v[q], scale.to);
      if (lane % 8 == 0) stage.back[row] = scale.back;
    }
  }
};

__device__ inline void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}

/// Starts the copy of a chunk of the weights, of columns from `column` on.
template <int width>
__device__ inline void copy_factor(const Product& p, int64_t column, int chunk, Stage<width>& stage) {
  const int64_t from = chunk * (p.padded_columns * kDepth) + FactorTile<width>::index(column, 0);
  const int thread = static_cast<int>(threadIdx.x - kSide);
#pragma unroll
  for (int k = 0; k < width * kDepth; k += kSide * 8) {
    const int at = k + thread * 8;
    copy16(stage.right.high + at, p.factor.high + from + at);
    copy16(stage.right.low + at, p.factor.low + from + at);
  }
  if (thread < width / 4) copy16(stage.back_column + thread * 4, p.factor.back + chunk * p.padded_columns + column + thread * 4);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Writes a tile's sums, of rows from `row0` and columns from `column0` on.
template <int width>
__device__ inline void write(const Product& p, const Sums<width>& sums, int64_t row0, int64_t column0, const float* bias) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = row0 + sums.row + 8 * h, column = column0 + sums.column;
    const int columns = static_cast<int>(min(p.columns - column, int64_t{width}));
    float* to = p.out + row * p.out_stride + column;  // the thread's columns are 8 apart from here on
    if (row >= p.from.rows) return;
#pragma unroll
    for (int j = 0; j < width; j += 8) {
      const float x = sums.sum[j / 2 + 2 * h] + bias[sums.column + j], y = sums.sum[j / 2 + 2 * h + 1] + bias[sums.column + j + 1];
      if (p.pairs && j + 1 < columns) {
        *reinterpret_cast<float2*>(to + j) = make_float2(x, y);
      } else {
        if (j < columns) to[j] = x;
        if (j + 1 < columns) to[j + 1] = y;
      }
    }
  }
}

template <int width, bool quads>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_rows(const __grid_constant__ Product p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float bias[width];
  __shared__ Ring ring;
  auto* stages = reinterpret_cast<Stage<width>*>(shared);
  const int thread = static_cast<int>(threadIdx.x), walkers = static_cast<int>(gridDim.x) / p.column_tiles;
  const int first = static_cast<int>(blockIdx.x) / p.column_tiles, chunks = p.chunks[0] + p.chunks[1];
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) % p.column_tiles * width;
  if (thread < width) bias[thread] = p.bias != nullptr && column0 + thread < p.columns ? p.bias[column0 + thread] : 0.0f;
  if (thread == 0) ring.begin();
  __syncthreads();
  Turn turn;
  if (thread >= kSide) {
    give_registers();
    const auto next = [&](const Step& s) { return s.chunk + 1 == chunks ? Step{s.tile + walkers, 0} : Step{s.tile, s.chunk + 1}; };
    Step step = {first, 0}, second = next(step), extra = next(second);
    Ahead<quads> ahead[2];  // of this step and of the second
    ahead[0].load(p, step);
    ahead[1].load(p, second);
    copy_factor<width>(p, column0, 0, stages[0]);
#pragma unroll 1
    while (step.tile < p.row_tiles) {
#pragma unroll
      for (Ahead<quads>& own : ahead) {
        if (step.tile >= p.row_tiles) break;
        const Turn after = turn.next();
        ring.await_empty(after);
        copy_factor<width>(p, column0, second.chunk, stages[after.stage]);
        own.cut_into(stages[turn.stage]);                     // empty since the step before, or from the start
        asm volatile("cp.async.wait_group 1;" ::: "memory");  // all but the second step's
        ring.say_full(turn);                                  // waits for reads under way: the next begin after it
        own.load(p, extra);
        turn = after, step = second, second = extra, extra = next(extra);
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    return;
  }
  take_registers();
  Sums<width> sums;
#pragma unroll 1
  for (int tile = first; tile < p.row_tiles; tile += walkers) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ring.await_full(turn);
      const Stage<width>& s = stages[turn.stage];
      sums.add(s.left, s.right, s.back, s.back_column);
      ring.say_empty(turn);
      turn = turn.next();
    }
    write(p, sums, static_cast<int64_t>(tile) * kRows, column0, bias);
    sums.clear();
  }
}

/// Is there code for this device, Hopper's?
bool has_code(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess || major != 9) return false;
  if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess || minor != 0) return false;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, multiply_rows<128, true>) == cudaSuccess) return true;
  cudaGetLastError();  // PTX that this driver cannot finish
  return false;
}

template <int width>
void launch(Product p, bool quads, cudaStream_t s) {
  constexpr int kShared = kStages * sizeof(Stage<width>);
  p.column_tiles = static_cast<int>(ceil_div(p.columns, width));
  p.row_tiles = static_cast<int>(ceil_div(p.from.rows, kRows));
  const int walkers = static_cast<int>(parts_of_tiles(p.column_tiles, p.row_tiles, this_gpu().processors));
  const auto kernel = quads ? multiply_rows<width, true> : multiply_rows<width, false>;
  allow_shared(reinterpret_cast<const void*>(kernel), kShared, "split_product");
  kernel<<<static_cast<unsigned>(walkers * p.column_tiles), kBlockThreads, kShared, s>>>(p);
  check_launch("split_product");
}

}  // namespace
}  // namespace split

bool split_fits() {
  constexpr int kMost = 64;
  static std::array<std::atomic<signed char>, kMost> known{};  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMost) return false;
  if (known[device] == 0) known[device] = split::has_code(device) ? 1 : -1;
  return known[device] > 0;
}

int64_t split_factor_bytes(const SplitFactor& f) {
  const int64_t chunks = split::whole_depth(f) / split::kDepth;
  return split::padded_columns(f) * chunks * (split::kDepth * 4 + 4);
}

void split_factor(const SplitFactor& f, void* pieces, StreamHandle stream) {
  using namespace split;
  constexpr const char* op = "split_factor";
  if (!is_aligned(pieces)) fail(op, "pieces must start at a multiple of 16");
  const int64_t columns = padded_columns(f);
  if (columns == 0) return;
  const Cut to = parts_of(f, pieces);
  cut_factor<<<blocks_for(columns * 32), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      f, columns, whole_depth(f) / kDepth, const_cast<uint16_t*>(to.high), const_cast<uint16_t*>(to.low), const_cast<float*>(to.back));
  check_launch(op);
}

void split_product(const SplitRows& from, const SplitFactor& f, const void* pieces, const float* bias, float* out, int64_t out_stride,
                   StreamHandle stream) {
  using namespace split;
  if (from.rows == 0 || f.columns == 0) return;
  Product p = {};
  p.from = from;
  p.columns = f.columns, p.padded_columns = padded_columns(f);
  p.factor = parts_of(f, pieces);
  p.bias = bias, p.out = out, p.out_stride = out_stride;
  bool quads = true;
  for (int i = 0; i < f.count; ++i) {
    p.depth[i] = f.depth[i], p.chunks[i] = static_cast<int>(ceil_div(f.depth[i], kDepth));
    quads = quads && f.depth[i] % 4 == 0 && from.stride[i] % 4 == 0 && is_aligned(from.a[i]);
  }
  p.pairs = out_stride % 2 == 0 && is_aligned(out, 8);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  padded_columns(f) % kSplitColumns == 0 ? launch<kSplitColumns>(p, quads, s) : launch<64>(p, quads, s);
}

}  // namespace satchel::cuda
