// Mean and variance of every channel in one read: batches of 8 rows in registers (mean first, then squares of what differs), merged
// by Chan's formula; parts and slots in double. What is merged with what depends on sizes alone. Tiles of rows are read from the last
// to the first, so that a pass which starts with the first rows finds them in the cache.
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace moments {
namespace {

constexpr int kBatch = 8;                       // rows a thread reads at once
constexpr int64_t kParts = kSumProcessors * 4;  // thread blocks that share the rows

/// `lanes` threads a row, four channels each; `slots` rows side by side; a tile is kBatch rows of every slot.
struct Tiling {
  int64_t rows, channels, tiles, parts;
  int lanes, slots;
  int each, more, last;  // tiles of a part, parts with one tile more, and the part with the last tile, which may be short

  Tiling(int64_t r, int64_t c) : rows(r), channels(c), lanes(1) {
    while (lanes < 32 && lanes * 4 < c) lanes *= 2;
    slots = kThreads / lanes;
    tiles = ceil_div(rows, tile_rows());
    parts = tiles < kParts ? tiles : kParts;
    each = static_cast<int>(tiles / parts), more = static_cast<int>(tiles % parts), last = static_cast<int>((tiles - 1) % parts);
  }
  SATCHEL_HD int64_t tile_rows() const { return static_cast<int64_t>(slots) * kBatch; }
  /// Rows of part p: tiles p, p + parts, ….
  SATCHEL_HD int64_t part_rows(int p) const {
    return (each + (p < more ? 1 : 0)) * tile_rows() - (p == last ? tiles * tile_rows() - rows : 0);
  }
};

/// Four channels of a row, those that exist: 16 bytes of fp32 or 8 of halves at once.
template <DType type, bool vector>
__device__ inline void read4(const void* h, int64_t i, int64_t left, float (&v)[4]) {
  Quad<type> q;
  if constexpr (vector) q = load_quad<type>(h, i);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = vector ? value_of_cell<type>(cell_of<type>(q, j)) : j < left ? load(h, type, i + j) : 0.0f;
}

/// Takes the first n rows of a batch.
__device__ inline void add_batch(const float (&v)[kBatch][4], int n, Gathered& all) {
  const float some = static_cast<float>(n), fraction = some / (all.count + some), each = 1.0f / some;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float own[kBatch], sum = 0.0f;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) own[u] = v[u][j], sum += u < n ? own[u] : 0.0f;
    all.add<false>(j, own, sum, n, each, fraction);
  }
  all.count += some;
}

template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads, vector ? 4 : 3)
    moments_of_tiles(const __grid_constant__ Tiling t, const void* h, float2* partial) {
  __shared__ float means[kThreads * 4], squares[kThreads * 4], counts[kThreads];
  const int quad = static_cast<int>(threadIdx.x) % t.lanes, slot = static_cast<int>(threadIdx.x) / t.lanes;
  const int64_t part = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * t.lanes * 4, c = first + quad * 4;
  Gathered w;
  for (int64_t tile = part + quotient(t.tiles - 1 - part, t.parts) * t.parts; tile >= 0; tile -= t.parts) {
    const int64_t row = tile * t.tile_rows() + slot, left = t.rows - row;
    const int n = left >= t.tile_rows() ? kBatch : left <= 0 ? 0 : static_cast<int>((left + t.slots - 1) / t.slots);
    if (n == 0 || c >= t.channels) continue;
    float v[kBatch][4] = {};
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (u < n) read4<type, vector>(h, (row + static_cast<int64_t>(u) * t.slots) * t.channels + c, t.channels - c, v[u]);
    }
    add_batch(v, n, w);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) means[threadIdx.x * 4 + j] = w.mean[j], squares[threadIdx.x * 4 + j] = w.squares[j];
  counts[threadIdx.x] = w.count;
  __syncthreads();
  for (int k = static_cast<int>(threadIdx.x); k < t.lanes * 4 && first + k < t.channels; k += kThreads) {
    Merge all(means[k]);
    for (int s = 0; s < t.slots; ++s) {
      const float n = counts[s * t.lanes + k / 4];
      if (n > 0.0f) all.add(n, means[s * t.lanes * 4 + k], squares[s * t.lanes * 4 + k]);
    }
    partial[part * t.channels + first + k] = make_float2(static_cast<float>(all.mean()), static_cast<float>(all.square()));
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    finish_moments(const __grid_constant__ Tiling t, const float2* partial, const __grid_constant__ Moments to) {
  const FinishShare share;
  const int64_t c = share.channel;
  Merge all(c < t.channels ? partial[c].x : 0.0f);
  if (c < t.channels) {
    share.each(partial, t.parts, t.channels,
               [&](int64_t p, float2 part) { all.add(static_cast<double>(t.part_rows(static_cast<int>(p))), part.x, part.y); });
  }
  double sums[3] = {all.count, all.sum, all.squares};
  if (!share.add_up(sums) || c >= t.channels) return;
  all.count = sums[0], all.sum = sums[1], all.squares = sums[2];
  write_moments(all, to, c);
}

}  // namespace
}  // namespace moments

int64_t column_moments_scratch_bytes(int64_t channels) { return moments::kParts * channels * static_cast<int64_t>(sizeof(float2)); }

void column_moments(const void* h, DType type, int64_t rows, int64_t channels, const Moments& to, void* scratch, StreamHandle stream) {
  if (channels == 0) return;
  if (rows < 1) fail("column_moments", "there must be at least one row", rows);
  const moments::Tiling t(rows, channels);
  float2* partial = static_cast<float2*>(scratch);
  const dim3 grid(grid_size(ceil_div(channels, t.lanes * 4)), static_cast<unsigned>(t.parts));
  const bool vector = channels % 4 == 0 && is_aligned(h, static_cast<uintptr_t>(4 * size_of(type)));
  with_values(type, vector, [&](auto of, auto whole) {
    launch_kernel("column_moments", stream, {grid}, moments::moments_of_tiles<of(), whole()>, t, h, partial);
  });
  launch_kernel("column_moments", stream, finish_size(channels, t.parts), moments::finish_moments, t, partial, to);
}

}  // namespace satchel::cuda
