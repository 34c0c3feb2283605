// Sums of columns in one read, for a bias: a thread keeps its eight columns (or its one, where columns are no multiple of eight) over all
// rows of its own, a thread block halves its rows until one is left, and the parts of the thread blocks are added up in order.
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace columns {
namespace {

constexpr int kBlockThreads = kColumnSums.threads;
constexpr int64_t kParts = kSumProcessors * kColumnSums.each;  // thread blocks that share the rows
constexpr int kWarpsEnd = 32;                                  // that share the parts of 32 results

/// `lanes` threads a row, `each` columns a thread; `slots` rows side by side; `blocks` thread blocks side by side, `parts` one below
/// another.
struct Tiling {
  int64_t rows, columns, parts, part_rows;
  int each, lanes, slots, blocks;

  Tiling(int64_t r, int64_t c) : rows(r), columns(c), each(c % 8 == 0 ? 8 : 1) {
    const int64_t across = columns / each;
    blocks = static_cast<int>(ceil_div(across, kBlockThreads));
    lanes = static_cast<int>(ceil_div(across, blocks));
    slots = kBlockThreads / lanes;
    parts = less_of(more_of(kParts / blocks, 1), ceil_div(rows, slots));
    part_rows = ceil_div(ceil_div(rows, slots), parts) * slots;
    parts = ceil_div(rows, part_rows);
  }
};

/// A thread's columns of a row.
template <DType type, bool eight, bool vector>
struct Columns {
  static constexpr int kEach = eight ? 8 : 1, kBatch = eight && type == DType::f32 ? 4 : 8;  // rows on their way together
  float sum[kEach] = {};

  /// Rows row, row + step, … below `end`.
  __device__ inline void add_rows(const void* g, int64_t row, int64_t end, int step, int64_t columns, int64_t column) {
    for (; row < end; row += static_cast<int64_t>(kBatch) * step) {
      Eight<type> some[eight ? kBatch : 1];
      float one[eight ? 1 : kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int64_t own = row + static_cast<int64_t>(u) * step;
        const int64_t i = (own < end ? own : row) * columns + column;
        if constexpr (eight)
          some[u] = read8<type, vector>(g, i);
        else
          one[u] = read1<type>(g, i);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (row + static_cast<int64_t>(u) * step >= end) break;
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[j] += eight ? some[u][j] : one[u];
      }
    }
  }
};

template <DType type, bool eight, bool vector>
__global__ void __launch_bounds__(kBlockThreads, kColumnSums.each)
    sum_columns(const __grid_constant__ Tiling t, const void* g, float* partial) {
  constexpr int kEach = eight ? 8 : 1;
  __shared__ float shared[kBlockThreads * kEach];
  const int lane = static_cast<int>(threadIdx.x) % t.lanes, slot = static_cast<int>(threadIdx.x) / t.lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * t.lanes * kEach, column = first + lane * kEach;
  const bool is_own = slot < t.slots && column < t.columns;
  const int64_t begin = blockIdx.y * t.part_rows, end = min(begin + t.part_rows, t.rows);
  Columns<type, eight, vector> own;
  if (is_own) own.add_rows(g, begin + slot, end, t.slots, t.columns, column);
  const int width = t.lanes * kEach;  // shared memory: slot by slot, number j of all lanes after number j − 1
  if (slot < t.slots) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) shared[slot * width + j * t.lanes + lane] = own.sum[j];
  }
  for (int left = t.slots; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    for (int k = static_cast<int>(threadIdx.x); k < (left - half) * width; k += kBlockThreads) shared[k] += shared[k + half * width];
    left = half;
  }
  __syncthreads();
  for (int k = static_cast<int>(threadIdx.x); k < width && first + k < t.columns; k += kBlockThreads) {
    partial[blockIdx.y * t.columns + first + k] = shared[k % kEach * t.lanes + k / kEach];
  }
}

}  // namespace
}  // namespace columns

using namespace columns;

int64_t column_sums_scratch_bytes(int64_t rows, int64_t columns) {
  return rows > 0 && columns > 0 ? Tiling(rows, columns).parts * columns * static_cast<int64_t>(sizeof(float)) : 0;
}

void column_sums(const void* g, DType type, int64_t rows, int64_t columns, float* sums, void* scratch, StreamHandle stream) {
  constexpr const char* op = "column_sums";
  if (columns == 0) return;
  if (rows < 1) fail(op, "there must be at least one row", rows);
  const Tiling t(rows, columns);
  float* partial = t.parts == 1 ? sums : static_cast<float*>(scratch);
  const dim3 grid(grid_size(t.blocks), grid_size(t.parts));
  const bool vector = is_aligned(g);
  with_type(type, [&](auto of) {
    const auto kernel = t.each == 1 ? sum_columns<of(), false, false>
                        : vector    ? sum_columns<of(), true, true>
                                    : sum_columns<of(), true, false>;
    launch_kernel(op, stream, {grid, kBlockThreads}, kernel, t, g, partial);
  });
  if (t.parts > 1) add_up<kWarpsEnd>(partial, t.parts, columns, /*add=*/false, columns, sums, nullptr, stream, op);
}

}  // namespace satchel::cuda
