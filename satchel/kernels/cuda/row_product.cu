// Rows by weights: to = a[0]·b[0] + a[1]·b[1] + bias, 16 bits.
//
//   thread block: the weights of 128 columns stay in shared memory; tiles of 128 rows come and go, 64 of their depth at a time
//   warp: 32 rows × 64 columns
//
//   step s     rows of s + 2 are being copied     rows of s are multiplied     one barrier
//
// Steps go on from tile to tile, so that the next tile's rows come while this one's result is written.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/row_product.h"
#include "satchel/kernels/cuda/tensor_core.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace row_products {
namespace {

constexpr int kBlockThreads = 256, kTileRows = 128, kTileColumns = 128, kStep = 64, kStages = 3;
constexpr int kPitch = kStep + 8;                // values a row of a step, and of a warp's result: ldmatrix's eight lines meet all banks
constexpr int kStepValues = kTileRows * kPitch;  // of one stage
constexpr int kResultValues = 8 * 32 * kPitch;   // of eight warps
constexpr int kByColumn = kTileColumns + 8;      // values a line of weights, where these stand by depth
constexpr int64_t kEight = 8;                    // values of 16 bytes

/// Depth in steps: each factor's last step is filled up with zeros.
__host__ __device__ inline int steps_of(int64_t depth) { return static_cast<int>((depth + kStep - 1) / kStep); }

struct Product {
  RowProductSides s;
  int steps[2];  // of each factor
  int tiles, column_tiles;
  __host__ __device__ inline int all_steps() const { return steps[0] + steps[1]; }
};

/// Weights of a thread block: value (k, n) stands at line(k, n). `by_depth`: lines of columns, one for each k; else lines of depth, one for
/// each n, as they lie in memory.
template <bool by_depth>
struct Weights {
  uint16_t* at;
  int pitch;

  __device__ inline Weights(uint16_t* at, int all_steps) : at(at), pitch(by_depth ? kByColumn : all_steps * kStep + 8) {}
  __device__ inline uint16_t* line(int k, int n) const { return by_depth ? at + k * pitch + n : at + n * pitch + k; }

  /// Eight values at a time; zeros where there are none.
  __device__ inline void fetch(const Product& p, int column0) const {
    int k0 = 0;
    for (int i = 0; i < p.s.count; ++i) {
      const auto* from = static_cast<const uint16_t*>(p.s.b[i]);
      const int deep = p.steps[i] * kStep, across = by_depth ? kTileColumns / 8 : deep / 8, lines = by_depth ? deep : kTileColumns;
      for (int j = static_cast<int>(threadIdx.x); j < lines * across; j += kBlockThreads) {
        const int k = by_depth ? j / across : j % across * 8, n = by_depth ? j % across * 8 : j / across;
        const bool exists = k < p.s.depth[i] && column0 + n < p.s.columns;
        const int64_t place = k * p.s.by_depth[i] + (column0 + n) * p.s.by_column[i];
        copy_async<16>(line(k0 + k, n), exists ? from + place : from, exists);
      }
      k0 += deep;
    }
  }
};

/// Step `step` of a thread block's: 64 of the depth of a tile's rows.
__device__ inline void fetch_rows(const Product& p, int tile, int step, uint16_t* to) {
  const int i = step < p.steps[0] ? 0 : 1, k0 = (step - (i == 0 ? 0 : p.steps[0])) * kStep;
  const auto* from = static_cast<const uint16_t*>(p.s.a[i]);
#pragma unroll
  for (int j = static_cast<int>(threadIdx.x); j < kTileRows * kStep / 8; j += kBlockThreads) {
    const int r = j / (kStep / 8), k = j % (kStep / 8) * 8;
    const int64_t row = static_cast<int64_t>(tile) * kTileRows + r;
    const bool exists = row < p.s.rows && k0 + k < p.s.depth[i];
    copy_async<16>(to + r * kPitch + k, exists ? from + row * p.s.a_stride[i] + k0 + k : from, exists);
  }
}

/// A warp's 32 rows × 64 columns.
template <DType type, bool by_depth>
struct Sums {
  float sum[2][8][4] = {};  // two times 16 rows, eight times 8 columns
  int lane, row, column;    // row, column: the warp's first in a tile

  /// sum += 64 of the depth. `a`: the step's rows; `k0`: where its weights begin.
  __device__ inline void add(const uint16_t* a, const Weights<by_depth>& weights, int k0) {
    const int line = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;  // the lane's line, and its 8 × 8 values among the four
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t left[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_halves<false>(left[i], a + (row + i * 16 + line + second) * kPitch + k + third);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t right[4];
        const int depth = k0 + k + second + (by_depth ? line : 0), n = column + j * 16 + third + (by_depth ? 0 : line);
        load_halves<by_depth>(right, weights.line(depth, n));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_halves<type>(sum[i][2 * j], left[i], right[0], right[1]);
          multiply_halves<type>(sum[i][2 * j + 1], left[i], right[2], right[3]);
        }
      }
    }
  }

  /// Writes the result through `own`, the warp's shared memory, so that lines of 128 bytes go out whole; then all sums are 0.
  __device__ inline void write(const Product& p, int64_t row0, int column0, uint16_t* own) {
    __syncwarp();  // what stood there is written
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = j * 8 + lane % 4 * 2, n = column0 + column + c;
      float add[2] = {};
      if (p.s.bias != nullptr && n < p.s.columns) {  // columns are a multiple of 8
        const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.s.bias) + n));
        add[0] = low_half<type>(pair), add[1] = high_half<type>(pair);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* pair = sum[i][j] + 2 * h;
          *reinterpret_cast<uint32_t*>(own + (i * 16 + h * 8 + lane / 4) * kPitch + c) =
              half_pair<type>(pair[0] + add[0], pair[1] + add[1]);
          pair[0] = pair[1] = 0.0f;
        }
      }
    }
    __syncwarp();
    const int c = lane % 8 * 8, n = column0 + column + c;
    auto* to = static_cast<uint16_t*>(p.s.to);
#pragma unroll
    for (int r = lane / 8; r < 32; r += 4) {
      const int64_t m = row0 + row + r;
      if (m < p.s.rows && n < p.s.columns)
        *reinterpret_cast<uint4*>(to + m * p.s.to_stride + n) = *reinterpret_cast<const uint4*>(own + r * kPitch + c);
    }
  }
};

template <DType type, bool by_depth>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_rows(const __grid_constant__ Product p) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto* steps = reinterpret_cast<uint16_t*>(shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, each = p.all_steps();
  uint16_t* own = steps + kStages * kStepValues + warp * 32 * kPitch;
  const Weights<by_depth> weights(steps + kStages * kStepValues + kResultValues, each);
  // Thread blocks of the same rows stand side by side: what one reads, the others find in the cache.
  const int column0 = static_cast<int>(blockIdx.x) % p.column_tiles * kTileColumns;
  const int first = static_cast<int>(blockIdx.x) / p.column_tiles, apart = static_cast<int>(gridDim.x) / p.column_tiles;
  const int count = (p.tiles - first + apart - 1) / apart * each;  // steps of this thread block
  const auto fetch = [&](int s) {
    if (s < count) fetch_rows(p, first + s / each * apart, s % each, steps + s % kStages * kStepValues);
    end_copies();
  };
  weights.fetch(p, column0);  // with the first step's group
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  Sums<type, by_depth> sums{.lane = thread % 32, .row = warp / 2 * 32, .column = warp % 2 * 64};
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    await_copies<kStages - 2>();
    __syncthreads();  // this step's rows are there for all, and all are through with the last step
    fetch(s + kStages - 1);
    sums.add(steps + s % kStages * kStepValues, weights, s % each * kStep);
    if (s % each == each - 1) sums.write(p, static_cast<int64_t>(first + s / each * apart) * kTileRows, column0, own);
  }
}

int64_t shared_bytes(const RowProductSides& s, bool by_depth) {
  const int64_t deep = (steps_of(s.depth[0]) + (s.count == 2 ? steps_of(s.depth[1]) : 0)) * int64_t{kStep};
  const int64_t weights = by_depth ? deep * kByColumn : kTileColumns * (deep + 8);
  return (kStages * kStepValues + kResultValues + weights) * 2;
}

/// Do weights of all factors stand by depth, each line of columns in one piece? Else their lines are of depth.
bool stands_by_depth(const RowProductSides& s) { return s.by_column[0] == 1; }

BlockNeeds needs_of(const RowProductSides& s) { return {kBlockThreads, 1, shared_bytes(s, stands_by_depth(s))}; }

bool in_eights(const void* p, int64_t stride) { return is_aligned(p) && stride % kEight == 0; }

}  // namespace
}  // namespace row_products

bool row_product_fits(const RowProductSides& s) {
  using namespace row_products;
  if (s.type == DType::f32 || s.count < 1 || s.count > 2 || s.rows < 1 || s.columns < 1 || s.columns % kEight != 0) return false;
  if (!in_eights(s.to, s.to_stride) || !is_aligned(s.bias, 4)) return false;
  const bool by_depth = stands_by_depth(s);
  for (int i = 0; i < s.count; ++i) {
    if (s.depth[i] < 1 || s.depth[i] % kEight != 0 || s.depth[i] > 1024 || !in_eights(s.a[i], s.a_stride[i])) return false;
    if ((by_depth ? s.by_column[i] : s.by_depth[i]) != 1 || !in_eights(s.b[i], by_depth ? s.by_depth[i] : s.by_column[i])) return false;
  }
  return ceil_div(s.rows, int64_t{kTileRows}) < 1 << 24 && resident_each(this_gpu(), needs_of(s)) > 0;
}

void row_product(const RowProductSides& s, StreamHandle stream) {
  constexpr const char* op = "row_product";
  using namespace row_products;
  if (!row_product_fits(s)) fail(op, "row_product_fits must be true of rows and weights");
  Product p = {s, {steps_of(s.depth[0]), s.count == 2 ? steps_of(s.depth[1]) : 0}, 0, 0};
  p.tiles = static_cast<int>(ceil_div(s.rows, int64_t{kTileRows}));
  p.column_tiles = static_cast<int>(ceil_div(s.columns, int64_t{kTileColumns}));
  const bool by_depth = stands_by_depth(s);
  const int64_t shared = shared_bytes(s, by_depth);
  const int64_t blocks = parts_of_tiles(p.column_tiles, p.tiles, resident(this_gpu(), needs_of(s))) * p.column_tiles;
  const auto launch = [&](auto kernel) {
    allow_shared(reinterpret_cast<const void*>(kernel), shared, op);
    launch_kernel(op, stream, {grid_size(blocks), kBlockThreads, static_cast<size_t>(shared)}, kernel, p);
  };
  if (s.type == DType::f16)
    by_depth ? launch(multiply_rows<DType::f16, true>) : launch(multiply_rows<DType::f16, false>);
  else
    by_depth ? launch(multiply_rows<DType::bf16, true>) : launch(multiply_rows<DType::bf16, false>);
}

}  // namespace satchel::cuda
