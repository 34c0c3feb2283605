// The sparse product: a team of lanes sums one row (or one stretch of a long row) for a tile of columns, each lane its own few
// columns, entry after entry as kernels/sparse.h says. No atomics: the bits are those of the CPU.
//
//   teams   | stretches of long rows, tile 0 | … tile 1 | … | rows, tile 0 | rows, tile 1 | …
//
// Hubs come first, so that they do not run on alone at the end; a second kernel adds their stretches up.
#include <type_traits>

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFlight = 4;  // rows of x on their way to a lane at a time: 64 registers, so that 32 warps of an SM are at it

/// `wide` neighbouring floats, at an address that is a multiple of their size.
template <int wide>
struct Columns {
  float v[wide];

  __device__ static inline Columns load(const float* p) {
    Columns c;
    if constexpr (wide == 4) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(p));
      c.v[0] = a.x, c.v[1] = a.y, c.v[2] = a.z, c.v[3] = a.w;
    } else if constexpr (wide == 2) {
      const float2 a = __ldg(reinterpret_cast<const float2*>(p));
      c.v[0] = a.x, c.v[1] = a.y;
    } else {
      c.v[0] = __ldg(p);
    }
    return c;
  }

  __device__ inline void store(float* p) const {
    if constexpr (wide == 4)
      *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    else if constexpr (wide == 2)
      *reinterpret_cast<float2*>(p) = make_float2(v[0], v[1]);
    else
      *p = v[0];
  }
};

/// A team of `lanes` neighbouring threads. Teams of one warp may be at different entries.
template <int lanes>
struct Team {
  unsigned lane = threadIdx.x % lanes;
  unsigned mask = lanes == 32 ? ~0u : ((1u << (lanes & 31)) - 1) << (threadIdx.x % 32 / lanes * lanes);

  template <class T>
  __device__ inline T from(T v, int k) const {
    return __shfl_sync(mask, v, k, lanes);
  }
};

/// Adds entries k … k + count of the batch that the team's lanes hold, one each; all loads first, then the sums in order.
/// `own`: this lane has columns.
template <int lanes, int wide, bool weighted, bool full>
__device__ inline void add_entries(const Team<lanes>& team, const float* x, int64_t width, int32_t column, float weight, int k, int count,
                                   bool own, Columns<wide>& sum) {
  Columns<wide> got[kFlight];
  float w[kFlight];
#pragma unroll
  for (int s = 0; s < kFlight; ++s) {
    const int64_t row = team.from(column, k + s);
    if constexpr (weighted) w[s] = team.from(weight, k + s);
    if (own && (full || s < count)) got[s] = Columns<wide>::load(x + row * width);
  }
#pragma unroll
  for (int s = 0; s < kFlight; ++s) {
    if (full || s < count) {
#pragma unroll
      for (int j = 0; j < wide; ++j) sum.v[j] = weighted ? fmaf(w[s], got[s].v[j], sum.v[j]) : sum.v[j] + got[s].v[j];
    }
  }
}

/// Sum of entries [from, to), a stretch at most. Every lane of the team calls it; x is at the lane's first column.
template <int lanes, int wide, bool weighted>
__device__ inline Columns<wide> stretch_sum(const Team<lanes>& team, const Sparse& a, const float* x, int64_t width, int64_t from,
                                            int64_t to, bool own) {
  Columns<wide> sum = {};
  for (int64_t e = from; e < to; e += lanes) {
    const int batch = to - e < lanes ? static_cast<int>(to - e) : lanes;
    int32_t column = 0;
    float weight = 1.0f;
    if (team.lane < batch) {
      column = __ldg(a.column + e + team.lane);
      if constexpr (weighted) {
        if (a.value != nullptr) weight = __ldg(a.value + e + team.lane);
        if (a.column_scale != nullptr) weight = weight * __ldg(a.column_scale + column);
      }
    }
    for (int k = 0; k < batch; k += kFlight) {
      if (batch - k >= kFlight)
        add_entries<lanes, wide, weighted, true>(team, x, width, column, weight, k, kFlight, own, sum);
      else
        add_entries<lanes, wide, weighted, false>(team, x, width, column, weight, k, batch - k, own, sum);
    }
  }
  return sum;
}

/// The long row that stretch s of the list belongs to: the last one that starts at or before it.
__device__ inline int64_t long_row_of(const Sparse& a, int64_t s) {
  int64_t low = 0, high = a.long_rows;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (__ldg(a.long_start + middle) - a.first_stretch <= s ? low : high) = middle;
  }
  return low;
}

template <int lanes, int wide, bool weighted>
__global__ void __launch_bounds__(kThreads)
    multiply_rows(const __grid_constant__ Sparse a, const float* x, int64_t width, float* y, float* scratch, int64_t tiles) {
  const Team<lanes> team;
  int64_t task = thread_index() / lanes;
  const bool is_stretch = task < a.long_stretches * tiles;
  if (!is_stretch) task -= a.long_stretches * tiles;
  const int64_t of_tile = is_stretch ? a.long_stretches : a.rows;
  const int64_t tile = quotient(task, of_tile), item = task - tile * of_tile;
  if (tile >= tiles) return;  // the whole team
  int64_t begin, end;
  if (is_stretch) {
    const int64_t which = long_row_of(a, item), row = __ldg(a.long_row + which) - a.first_row;
    begin = __ldg(a.start + row) + (item + a.first_stretch - __ldg(a.long_start + which)) * kStretch;
    end = min(begin + kStretch, static_cast<int64_t>(__ldg(a.start + row + 1)));
  } else {
    begin = __ldg(a.start + item);
    end = __ldg(a.start + item + 1);
    if (a.long_rows > 0 && end - begin > kStretch) return;
  }

  const int64_t at = (tile * lanes + team.lane) * wide;
  const bool own = at < width;
  Columns<wide> sum;
  for (int64_t from = begin; from == begin || from < end; from += kStretch) {  // more than once only without a list of long rows
    const auto part = stretch_sum<lanes, wide, weighted>(team, a, x + at, width, from, min(from + kStretch, end), own);
#pragma unroll
    for (int j = 0; j < wide; ++j) sum.v[j] = from == begin ? part.v[j] : sum.v[j] + part.v[j];
  }
  if (!own) return;
  if (is_stretch) return sum.store(scratch + item * width + at);
  if (a.row_scale != nullptr) {
    const float scale = __ldg(a.row_scale + item);
#pragma unroll
    for (int j = 0; j < wide; ++j) sum.v[j] = scale * sum.v[j];
  }
  sum.store(y + item * width + at);
}

/// One column of a long row a thread.
__global__ void __launch_bounds__(kThreads) add_stretches(const __grid_constant__ Sparse a, int64_t width, const float* scratch, float* y) {
  const int64_t i = thread_index(), which = quotient(i, width), column = i - which * width;
  if (which >= a.long_rows) return;
  const int64_t row = __ldg(a.long_row + which) - a.first_row;
  const int64_t from = __ldg(a.long_start + which), to = __ldg(a.long_start + which + 1);
  const float* part = scratch + (from - a.first_stretch) * width + column;
  float sum = *part;
#pragma unroll 8
  for (int64_t s = 1; s < to - from; ++s) sum = sum + part[s * width];
  y[row * width + column] = a.row_scale == nullptr ? sum : __ldg(a.row_scale + row) * sum;
}

/// Calls f(lanes) with the size of a team for rows of `wanted` lanes: the smallest that covers one, up to a warp; half a warp where
/// the last warp of a row would stand half idle.
template <class F>
void with_lanes(int64_t wanted, F&& f) {
  if (wanted <= 4) return f(std::integral_constant<int, 4>());
  if (wanted <= 8) return f(std::integral_constant<int, 8>());
  if (wanted <= 16 || (wanted > 32 && (wanted - 1) % 32 < 16)) return f(std::integral_constant<int, 16>());
  f(std::integral_constant<int, 32>());
}

template <int wide>
void launch(const Sparse& a, const float* x, int64_t width, float* y, float* scratch, cudaStream_t s) {
  const bool weighted = a.value != nullptr || a.column_scale != nullptr;
  with_lanes(width / wide, [&](auto lanes) {
    const int64_t tiles = ceil_div(width, lanes() * wide);
    const unsigned blocks = grid_size(ceil_div((a.rows + a.long_stretches) * tiles, kThreads / lanes()));
    if (weighted)
      multiply_rows<lanes(), wide, true><<<blocks, kThreads, 0, s>>>(a, x, width, y, scratch, tiles);
    else
      multiply_rows<lanes(), wide, false><<<blocks, kThreads, 0, s>>>(a, x, width, y, scratch, tiles);
  });
  check_launch("multiply");
}

}  // namespace

int64_t multiply_scratch_values(const Sparse& a, int64_t width) { return a.long_stretches * width; }

void multiply(const Sparse& a, const float* x, int64_t width, float* y, float* scratch, StreamHandle stream) {
  if (a.rows == 0 || width == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const auto fits = [&](int wide) {
    const auto bytes = static_cast<uintptr_t>(wide) * sizeof(float);
    return width % wide == 0 && is_aligned(x, bytes) && is_aligned(y, bytes) && is_aligned(scratch, bytes);
  };
  if (fits(4))
    launch<4>(a, x, width, y, scratch, s);
  else if (fits(2))
    launch<2>(a, x, width, y, scratch, s);
  else
    launch<1>(a, x, width, y, scratch, s);
  if (a.long_rows == 0) return;
  add_stretches<<<blocks_for(a.long_rows * width), kThreads, 0, s>>>(a, width, scratch, y);
  check_launch("multiply");
}

}  // namespace satchel::cuda
