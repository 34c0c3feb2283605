// The sparse product: a team of lanes walks the entries of a group of rows (or of one stretch of a long row) as one stream, for a tile
// of columns, each lane its own 16 bytes of them. Sums are made entry after entry as kernels/sparse.h says; no atomics: the bits are
// those of the CPU.
//
//   teams   | stretches of long rows, tile 0 | … tile 1 | … | groups of rows, tile 0 | groups of rows, tile 1 | …
//
// A tile of 16 lanes is 256 bytes of a row of x: the tile of an arxiv-sized graph stays in an H200's L2, where a whole row's would not
// (docs/results.md). Hubs come first, so that they do not run on alone at the end; a second kernel adds their stretches up.
#include <type_traits>

#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFlight = 4;  // rows of x on their way to a lane at a time

/// `wide` neighbouring values, at an address that is a multiple of their size, as they come from memory.
template <DType type, int wide>
struct Raw {
  static constexpr int kBytes = wide * (type == DType::f32 ? 4 : 2);
  using Word =
      std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  Word word;

  __device__ inline void load(const void* x, int64_t i) { word = __ldg(static_cast<const Word*>(x) + i); }
  __device__ inline uint32_t part(int k) const {
    if constexpr (kBytes == 16)
      return k == 0 ? word.x : k == 1 ? word.y : k == 2 ? word.z : word.w;
    else if constexpr (kBytes == 8)
      return k == 0 ? word.x : word.y;
    else
      return word;
  }
  __device__ inline float at(int j) const {
    if constexpr (type == DType::f32)
      return __uint_as_float(part(j));
    else
      return j % 2 == 0 ? low_half<type>(part(j / 2)) : high_half<type>(part(j / 2));
  }
};

/// The same way back. Streamed: what comes next reads x, not y.
template <DType type, int wide>
__device__ inline void put(void* y, int64_t i, const float (&v)[wide]) {
  using Word = typename Raw<type, wide>::Word;
  constexpr int kParts = Raw<type, wide>::kBytes / 4 > 0 ? Raw<type, wide>::kBytes / 4 : 1;
  uint32_t part[kParts] = {};
#pragma unroll
  for (int j = 0; j < wide; j += type == DType::f32 ? 1 : 2) {
    if constexpr (type == DType::f32)
      part[j] = __float_as_uint(v[j]);
    else
      part[j / 2] = half_pair<type>(v[j], j + 1 < wide ? v[j + 1] : 0.0f);
  }
  Word* to = static_cast<Word*>(y) + i;
  if constexpr (kParts == 4)
    __stcs(to, make_uint4(part[0], part[1], part[2], part[3]));
  else if constexpr (kParts == 2)
    __stcs(to, make_uint2(part[0], part[1]));
  else
    *to = static_cast<Word>(part[0]);
}

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

/// x and y in units of `wide` values.
struct Operands {
  const void* x;
  void* y;
  const void* plus;  // y = plus + A·x; null: A·x
  float* scratch;
  int64_t width, x_stride, y_stride, plus_stride, tiles;
};

/// One lane's weight of an entry.
template <bool weighted>
__device__ inline float weight_of(const Sparse& a, int64_t entry, int32_t column) {
  float w = 1.0f;
  if constexpr (weighted) {
    if (a.value != nullptr) w = __ldg(a.value + entry);
    if (a.column_scale != nullptr) w = w * __ldg(a.column_scale + column);
  }
  return w;
}

/// `total` entries from `begin` on, those of rows [row, last); the first of these ends after `end` of them. Calls finish(row, sum) for
/// each in turn. Columns are read two batches of `lanes` ahead of their use, weights one.
template <DType type, int lanes, int wide, bool weighted, class Finish>
__device__ inline void walk(const Team<lanes>& team, const Sparse& a, const Operands& o, int64_t at, int64_t begin, int total, int64_t row,
                            int64_t last, int end, Finish&& finish) {
  [[maybe_unused]] constexpr int kUnrolled = Raw<type, wide>::kBytes == 16 ? lanes / kFlight : 1;  // odd rows are rare, and as code twice as long as others
  const int lane = static_cast<int>(team.lane);
  float sum[wide] = {};
  const auto next_row = [&] {
    finish(row, sum);
#pragma unroll
    for (int j = 0; j < wide; ++j) sum[j] = 0.0f;
    end = ++row < last ? static_cast<int>(__ldg(a.start + row + 1) - begin) : INT32_MAX;
  };
  const auto column_at = [&](int e) { return e < total ? __ldg(a.column + begin + e) : 0; };
  const auto weight_at = [&](int e, int32_t column) { return e < total ? weight_of<weighted>(a, begin + e, column) : 0.0f; };
  int32_t now = column_at(lane), next = column_at(lanes + lane);
  float weight = weight_at(lane, now);
  for (int e = 0; e < total; e += lanes) {
    const int32_t after = column_at(e + 2 * lanes + lane);
    const float next_weight = weight_at(e + lanes + lane, next);
#pragma unroll(kUnrolled)
    for (int k = 0; k < lanes; k += kFlight) {
      if (e + k >= total) break;
      Raw<type, wide> got[kFlight];
      float w[kFlight];
#pragma unroll
      for (int s = 0; s < kFlight; ++s) {  // row 0 where there is no entry: read, not added
        got[s].load(o.x, team.from(now, k + s) * o.x_stride + at);
        if constexpr (weighted) w[s] = team.from(weight, k + s);
      }
#pragma unroll
      for (int s = 0; s < kFlight; ++s) {
        if (e + k + s >= total) break;
        while (e + k + s == end) next_row();
#pragma unroll
        for (int j = 0; j < wide; ++j) sum[j] = weighted ? fmaf(w[s], got[s].at(j), sum[j]) : sum[j] + got[s].at(j);
      }
    }
    now = next, next = after, weight = next_weight;
  }
  while (row < last) next_row();
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

/// A finished sum as y's row: scaled, and added to what is there to add to.
template <DType type, int wide>
__device__ inline void write_row(const Sparse& a, const Operands& o, int64_t at, int64_t row, float (&sum)[wide]) {
  const float scale = a.row_scale == nullptr ? 1.0f : __ldg(a.row_scale + row);
  if (a.row_scale != nullptr) {
#pragma unroll
    for (int j = 0; j < wide; ++j) sum[j] = scale * sum[j];
  }
  if (o.plus != nullptr) {
    Raw<type, wide> own;
    own.load(o.plus, row * o.plus_stride + at);
#pragma unroll
    for (int j = 0; j < wide; ++j) sum[j] = own.at(j) + sum[j];
  }
  put<type>(o.y, row * o.y_stride + at, sum);
}

/// What a team walks: the rows of a group, or one stretch, which stands as row number `row` alone.
struct Piece {
  int64_t begin, row, last;
  int total, end;

  __device__ inline static Piece of_group(const Sparse& a, int64_t item) {
    Piece p;
    p.row = max(__ldg(a.group_row + item) - a.first_row, int64_t{0});
    p.last = min(__ldg(a.group_row + item + 1) - a.first_row, a.rows);
    p.begin = __ldg(a.start + p.row);
    p.total = static_cast<int>(__ldg(a.start + p.last) - p.begin);
    p.end = static_cast<int>(__ldg(a.start + p.row + 1) - p.begin);
    return p;
  }

  __device__ inline static Piece of_stretch(const Sparse& a, int64_t item) {
    const int64_t which = long_row_of(a, item), row = __ldg(a.long_row + which) - a.first_row;
    Piece p;
    p.row = item;
    p.last = item + 1;
    p.begin = __ldg(a.start + row) + (item + a.first_stretch - __ldg(a.long_start + which)) * kStretch;
    p.total = static_cast<int>(min(kStretch, static_cast<int64_t>(__ldg(a.start + row + 1)) - p.begin));
    p.end = INT32_MAX;
    return p;
  }
};

template <DType type, int lanes, int wide, bool weighted>
__global__ void __launch_bounds__(kThreads) multiply_rows(const __grid_constant__ Sparse a, const __grid_constant__ Operands o) {
  const Team<lanes> team;
  int64_t task = thread_index() / lanes;
  const bool is_stretch = task < a.long_stretches * o.tiles;
  if (!is_stretch) task -= a.long_stretches * o.tiles;
  const int64_t of_tile = is_stretch ? a.long_stretches : a.groups;
  const int64_t tile = quotient(task, of_tile), item = task - tile * of_tile;
  if (tile >= o.tiles) return;  // the whole team
  const Piece p = is_stretch ? Piece::of_stretch(a, item) : Piece::of_group(a, item);
  if (p.total > kStretch) return;  // a long row's own group
  const int64_t at = tile * lanes + team.lane;
  const bool own = at < o.width;
  walk<type, lanes, wide, weighted>(team, a, o, own ? at : 0, p.begin, p.total, p.row, p.last, p.end, [&](int64_t row, float(&sum)[wide]) {
    if (!own) return;
    if (!is_stretch) return write_row<type>(a, o, at, row, sum);
#pragma unroll
    for (int j = 0; j < wide; ++j) o.scratch[(row * o.width + at) * wide + j] = sum[j];
  });
}

/// `wide` columns of a long row a thread.
template <DType type, int wide>
__global__ void __launch_bounds__(kThreads) add_stretches(const __grid_constant__ Sparse a, const __grid_constant__ Operands o) {
  const int64_t i = thread_index(), which = quotient(i, o.width), at = i - which * o.width;
  if (which >= a.long_rows) return;
  const int64_t row = __ldg(a.long_row + which) - a.first_row;
  const int64_t from = __ldg(a.long_start + which), count = __ldg(a.long_start + which + 1) - from;
  const float* part = o.scratch + ((from - a.first_stretch) * o.width + at) * wide;
  float sum[wide];
#pragma unroll
  for (int j = 0; j < wide; ++j) sum[j] = part[j];
#pragma unroll 4
  for (int64_t s = 1; s < count; ++s) {
#pragma unroll
    for (int j = 0; j < wide; ++j) sum[j] = sum[j] + part[s * o.width * wide + j];
  }
  write_row<type>(a, o, at, row, sum);
}

/// Calls f(lanes) with the size of a team for rows of `wanted` lanes: 16 do best, 8 where 16 would stand idle too often.
template <int bytes, class F>
void with_lanes(int64_t wanted, F&& f) {
  if constexpr (bytes < 16) {
    f(std::integral_constant<int, 32>());
  } else {
    if (wanted <= 4) return f(std::integral_constant<int, 4>());
    if (4 * ceil_div(wanted, 16) * 16 > 5 * ceil_div(wanted, 8) * 8) return f(std::integral_constant<int, 8>());
    f(std::integral_constant<int, 16>());
  }
}

template <DType type, int wide>
void launch(const Sparse& a, Operands o, StreamHandle stream) {
  const bool weighted = a.value != nullptr || a.column_scale != nullptr;
  for (int64_t* n : {&o.width, &o.x_stride, &o.y_stride, &o.plus_stride}) *n /= wide;
  with_lanes<Raw<type, wide>::kBytes>(o.width, [&](auto lanes) {
    o.tiles = ceil_div(o.width, lanes());
    const unsigned blocks = grid_size(ceil_div((a.groups + a.long_stretches) * o.tiles, kThreads / lanes()));
    const auto kernel = weighted ? multiply_rows<type, lanes(), wide, true> : multiply_rows<type, lanes(), wide, false>;
    launch_kernel("multiply", stream, {blocks}, kernel, a, o);
  });
  if (a.long_rows > 0) launch_kernel("multiply", stream, {blocks_for(a.long_rows * o.width)}, add_stretches<type, wide>, a, o);
}

template <DType type>
void launch(const Sparse& a, const Operands& o, StreamHandle stream) {
  constexpr int kMost = type == DType::f32 ? 4 : 8;
  const auto fits = [&](int wide) {
    const auto bytes = static_cast<uintptr_t>(wide) * size_of(type);
    const auto divides = [&](int64_t n) { return n % wide == 0; };
    return divides(o.width) && divides(o.x_stride) && divides(o.y_stride) && divides(o.plus_stride) && is_aligned(o.x, bytes) &&
           is_aligned(o.y, bytes) && (o.plus == nullptr || is_aligned(o.plus, bytes));
  };
  if (fits(kMost))
    launch<type, kMost>(a, o, stream);
  else if (fits(4))
    launch<type, 4>(a, o, stream);
  else if (fits(2))
    launch<type, 2>(a, o, stream);
  else
    launch<type, 1>(a, o, stream);
}

}  // namespace

int64_t multiply_scratch_values(const Sparse& a, int64_t width) { return a.long_stretches * width; }

void multiply(const Sparse& a, const ProductSides& sides, float* scratch, StreamHandle stream) {
  if (a.rows == 0 || sides.width == 0) return;
  const Operands o{sides.x, sides.y, sides.plus, scratch, sides.width, sides.x_stride, sides.y_stride, sides.plus_stride, 0};
  switch (sides.type) {
    case DType::f32: return launch<DType::f32>(a, o, stream);
    case DType::f16: return launch<DType::f16>(a, o, stream);
    case DType::bf16: return launch<DType::bf16>(a, o, stream);
    default: fail("multiply", "x must be float32, float16 or bfloat16");
  }
}

}  // namespace satchel::cuda
