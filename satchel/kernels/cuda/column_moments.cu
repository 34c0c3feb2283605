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
  if constexpr (!vector) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = j < left ? load(h, type, i + j) : 0.0f;
  } else if constexpr (type == DType::f32) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(h) + i));
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  } else {
    const uint2 a = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(h) + i));
    const uint32_t w[2] = {a.x, a.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t bits = j % 2 == 0 ? w[j / 2] & 0xffffu : w[j / 2] >> 16;
      v[j] = type == DType::bf16 ? __uint_as_float(bits << 16) : float_of_f16(static_cast<uint16_t>(bits));
    }
  }
}

/// Count, mean and sum of squared differences from it, of four channels.
struct Welford {
  float count = 0.0f, mean[4] = {}, squares[4] = {};

  /// Takes the first n rows of a batch.
  __device__ inline void add(const float (&v)[kBatch][4], int n) {
    const float some = static_cast<float>(n), fraction = some / (count + some), each = 1.0f / some;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) sum += u < n ? v[u][j] : 0.0f;
      const float m = sum * each;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) square = u < n ? fmaf(v[u][j] - m, v[u][j] - m, square) : square;
      const float apart = m - mean[j];
      mean[j] = count == 0.0f ? m : fmaf(apart, fraction, mean[j]);
      squares[j] = count == 0.0f ? square : squares[j] + fmaf(apart * fraction * count, apart, square);
    }
    count += some;
  }
};

/// Groups with a mean and squares each become one, in double, relative to the first group's mean.
struct Merge {
  double shift, count = 0, sum = 0, squares = 0;

  __device__ inline explicit Merge(double from) : shift(from) {}
  __device__ inline void add(double n, double mean, double square) {
    const double d = mean - shift;
    count += n, sum += n * d, squares += square + n * d * d;
  }
  __device__ inline double mean() const { return shift + sum / count; }
  __device__ inline double square() const {
    const double s = squares - sum * (sum / count);
    return s < 0 ? 0 : s;  // NaN stays
  }
};

template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads, vector ? 4 : 3)
    moments_of_tiles(const __grid_constant__ Tiling t, const void* h, float2* partial) {
  __shared__ float means[kThreads * 4], squares[kThreads * 4], counts[kThreads];
  const int quad = static_cast<int>(threadIdx.x) % t.lanes, slot = static_cast<int>(threadIdx.x) / t.lanes;
  const int64_t part = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * t.lanes * 4, c = first + quad * 4;
  Welford w;
  for (int64_t tile = part + quotient(t.tiles - 1 - part, t.parts) * t.parts; tile >= 0; tile -= t.parts) {
    const int64_t row = tile * t.tile_rows() + slot, left = t.rows - row;
    const int n = left >= t.tile_rows() ? kBatch : left <= 0 ? 0 : static_cast<int>((left + t.slots - 1) / t.slots);
    if (n == 0 || c >= t.channels) continue;
    float v[kBatch][4] = {};
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (u < n) read4<type, vector>(h, (row + static_cast<int64_t>(u) * t.slots) * t.channels + c, t.channels - c, v[u]);
    }
    w.add(v, n);
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

__device__ inline float blend(float old, double now, double momentum) { return static_cast<float>((1 - momentum) * old + momentum * now); }

__global__ void __launch_bounds__(kFinishThreads, kFinishEach)
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
  const double mean = all.mean(), square = all.square(), var = square / all.count;
  to.mean[c] = static_cast<float>(mean);
  to.rstd[c] = static_cast<float>(1 / sqrt(var + to.eps));
  if (to.var != nullptr) to.var[c] = static_cast<float>(var);
  if (to.running_mean != nullptr) to.running_mean[c] = blend(to.running_mean[c], mean, to.momentum);
  if (to.running_var != nullptr) to.running_var[c] = blend(to.running_var[c], square / (all.count - 1), to.momentum);
}

}  // namespace
}  // namespace moments

int64_t column_moments_scratch_bytes(int64_t channels) { return moments::kParts * channels * static_cast<int64_t>(sizeof(float2)); }

void column_moments(const void* h, DType type, int64_t rows, int64_t channels, const Moments& to, void* scratch, StreamHandle stream) {
  if (channels == 0) return;
  if (rows < 1) fail("column_moments", "there must be at least one row", rows);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const moments::Tiling t(rows, channels);
  float2* partial = static_cast<float2*>(scratch);
  const dim3 grid(grid_size(ceil_div(channels, t.lanes * 4)), static_cast<unsigned>(t.parts));
  const bool vector = channels % 4 == 0 && is_aligned(h, static_cast<uintptr_t>(4 * size_of(type)));
  with_values(type, vector,
              [&](auto of, auto whole) { moments::moments_of_tiles<of(), whole()><<<grid, kThreads, 0, s>>>(t, h, partial); });
  check_launch("column_moments");
  moments::finish_moments<<<finish_blocks(channels), kFinishThreads, 0, s>>>(t, partial, to);
  check_launch("column_moments");
}

}  // namespace satchel::cuda
