// The sparse product: a team of lanes walks the entries of a group of rows as one stream, for a tile of columns, each lane its own 16 bytes
// of them. Rows of more entries than a group has, and stretches of long rows, are walked by teams of twice as many lanes with 8 bytes each:
// more rows of x are on their way at a time, so that one row does not take as long as all others together. Sums are made entry after entry
// as kernels/sparse.h says; no atomics: the bits are those of the CPU.
//
//   warps of a tile   | stretches of long rows | large groups, from the largest on | all other groups, in the order of group_order |
//
// The teams of a warp are in step: loops and shuffles are the whole warp's, only the ends of rows are a team's own. What the end of a row
// needs is read when the row begins.
//
// A tile of 16 lanes is 256 bytes of a row of x: the tile of an arxiv-sized graph stays in an H200's L2, where a whole row's would not
// (docs/results.md). A second kernel adds the stretches of long rows up.
#include <type_traits>

#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

constexpr int kFlight = 4, kLargeFlight = 8;  // rows of x on their way to a lane at a time, in groups and in large pieces

/// Thread blocks a multiprocessor: sums without weights of 16 lanes do with 51 registers a thread, the others take 64.
constexpr int each(int lanes, bool weighted) { return lanes == 16 && !weighted ? 5 : 4; }

constexpr int kAddThreads = 128, kAddFlight = 16;
constexpr int64_t kMostTiles = 65535;  // of a grid's second dimension

/// `wide` neighbouring values, at an address that is a multiple of their size, as they come from memory.
template <DType type, int wide>
struct Raw {
  static constexpr int kBytes = wide * (type == DType::f32 ? 4 : 2);
  using Word =
      std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  Word word;

  __device__ inline void load(const char* x) { word = __ldg(reinterpret_cast<const Word*>(x)); }
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
__device__ inline void put(char* y, const float (&v)[wide]) {
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
  Word* to = reinterpret_cast<Word*>(y);
  if constexpr (kParts == 4)
    __stcs(to, make_uint4(part[0], part[1], part[2], part[3]));
  else if constexpr (kParts == 2)
    __stcs(to, make_uint2(part[0], part[1]));
  else
    *to = static_cast<Word>(part[0]);
}

/// A team of `lanes` neighbouring threads; lanes that no whole team of a warp is left for are in one that has nothing to do.
template <int lanes>
struct Team {
  static constexpr int kOfWarp = 32 / lanes;
  int number = static_cast<int>(threadIdx.x % 32) / lanes, lane = static_cast<int>(threadIdx.x % 32) - number * lanes;

  /// The whole warp takes part.
  template <class T>
  __device__ inline T from(T v, int k) const {
    if constexpr ((lanes & (lanes - 1)) == 0)
      return __shfl_sync(~0u, v, k, lanes);
    else
      return __shfl_sync(~0u, v, number * lanes + k);
  }
};

struct Operands {
  const char* x;
  char* y;
  const char* plus;  // y = plus + A·x; null: A·x
  float* scratch;
  int width;                              // values
  uint32_t x_bytes, y_bytes, plus_bytes;  // from row to row
  int64_t large_warps;                    // that walk stretches and large groups
};

/// The long row that stretch s of the list belongs to: the last one that starts at or before it.
__device__ inline int64_t long_row_of(const Sparse& a, int64_t s) {
  int64_t low = 0, high = a.long_rows;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (__ldg(a.long_start + middle) - a.first_stretch <= s ? low : high) = middle;
  }
  return low;
}

/// The lower half of a place among the entries: places of one piece are equal where it is.
__device__ inline uint32_t low_of(const int64_t* place) { return __ldg(reinterpret_cast<const uint32_t*>(place)); }

/// What a team walks: `total` entries from `begin` on, those of rows [row, last); or one stretch, which stands as row number `row` alone.
struct Piece {
  int64_t begin = 0;
  int row = 0, last = 0, total = 0;
  bool is_stretch = false;

  __device__ inline void of_group(const Sparse& a, int64_t group) {
    row = max(__ldg(a.group_row + group) - static_cast<int>(a.first_row), 0);
    last = min(__ldg(a.group_row + group + 1) - static_cast<int>(a.first_row), static_cast<int>(a.rows));
    begin = __ldg(a.start + row);
    const int64_t entries = __ldg(a.start + last) - begin;
    if (entries <= kStretch)
      total = static_cast<int>(entries);
    else
      last = row;  // a long row's own
  }

  __device__ inline void of_stretch(const Sparse& a, int64_t stretch) {
    const int64_t which = long_row_of(a, stretch), own = __ldg(a.long_row + which) - a.first_row;
    is_stretch = true;
    row = static_cast<int>(stretch);
    last = row + 1;
    begin = __ldg(a.start + own) + (stretch + a.first_stretch - __ldg(a.long_start + which)) * kStretch;
    total = static_cast<int>(min(kStretch, static_cast<int64_t>(__ldg(a.start + own + 1)) - begin));
  }

  /// Piece number `item` of the large ones, or of the others.
  template <bool large>
  __device__ inline void choose(const Sparse& a, int64_t item) {
    if constexpr (large) {
      if (item < a.long_stretches)
        of_stretch(a, item);
      else if (item - a.long_stretches < a.large_groups)
        of_group(a, __ldg(a.group_order + (item - a.long_stretches)));
    } else if (a.group_order == nullptr) {
      if (item < a.groups) of_group(a, item);
    } else if (item + a.large_groups < a.ordered_groups) {
      of_group(a, __ldg(a.group_order + item + a.large_groups));
    }
  }
};

/// Sums the pieces of warp number `warp`, whose teams have `used` lanes with columns of their own. Columns are read two batches of `lanes`
/// ahead of their use, and so are values; the scales of columns one.
/// ragged: rows of y and of what is added have `width` values and nothing to align to, rows of x as many whole words as hold them.
template <DType type, int lanes, int used, int wide, bool weighted, bool large, bool ragged>
__device__ inline void walk(const Sparse& a, const Operands& o, int64_t warp) {
  using Own = Raw<type, wide>;
  constexpr int kAtOnce = large ? kLargeFlight : lanes % kFlight == 0 ? kFlight : lanes;
  static_assert(lanes % kAtOnce == 0);
  const Team<lanes> team;
  Piece p;
  if (team.number < team.kOfWarp) p.choose<large>(a, warp * team.kOfWarp + team.number);
  const int most = __reduce_max_sync(~0u, p.total);

  int at = static_cast<int>(blockIdx.y) * used + team.lane;
  const bool own = team.lane < used && at < ceil_div(o.width, wide);
  if (!own) at = 0;  // read, not written
  const uint32_t first = static_cast<uint32_t>(p.begin);
  const int at_byte = at * Own::kBytes;
  const char* const x = o.x + at_byte;
  float sum[wide] = {}, scale = 1.0f;
  [[maybe_unused]] Own beside;
  int row = p.row;
  uint32_t end = 0, next_end = 0;  // places of entries, their lower halves
  const auto row_of = [&](auto* rows, uint32_t bytes) { return rows + static_cast<uint64_t>(row) * bytes + at_byte; };
  const auto begin_row = [&] {
    if (a.row_scale != nullptr) scale = __ldg(a.row_scale + row);
    if (!ragged && o.plus != nullptr) beside.load(row_of(o.plus, o.plus_bytes));
    if constexpr (!large) next_end = low_of(a.start + min(row + 2, p.last));
  };
  if (row < p.last && !p.is_stretch) {
    if constexpr (!large) end = low_of(a.start + row + 1);
    begin_row();
  }

  const auto finish = [&] {
    if (!own) return;
    if (large && p.is_stretch) {
      float* const to = o.scratch + static_cast<int64_t>(row) * o.width + at * wide;
#pragma unroll
      for (int j = 0; j < wide; ++j) {
        if (!ragged || at * wide + j < o.width) to[j] = sum[j];
      }
      return;
    }
    if (a.row_scale != nullptr) {
#pragma unroll
      for (int j = 0; j < wide; ++j) sum[j] = scale * sum[j];
    }
    char* const y = row_of(o.y, o.y_bytes);
    if constexpr (ragged) {
#pragma unroll
      for (int j = 0; j < wide; ++j) {
        if (at * wide + j >= o.width) continue;
        if (o.plus != nullptr) sum[j] = read1<type>(row_of(o.plus, o.plus_bytes), j) + sum[j];
        write1<type>(y, j, sum[j]);
      }
    } else {
      if (o.plus != nullptr) {
#pragma unroll
        for (int j = 0; j < wide; ++j) sum[j] = beside.at(j) + sum[j];
      }
      put<type>(y, sum);
    }
  };
  const auto next_row = [&] {
    finish();
#pragma unroll
    for (int j = 0; j < wide; ++j) sum[j] = 0.0f;
    end = next_end;
    if (++row < p.last) begin_row();
  };

  struct Entry {
    int32_t column = 0;
    float weight = 1.0f;
  };
  const int32_t* const columns = a.column + p.begin + team.lane;
  const float* const values = a.value + p.begin + team.lane;  // where there are some
  const auto entry_at = [&](int e) {
    Entry entry;
    if (e + team.lane < p.total) {
      entry.column = __ldg(columns + e);
      if (weighted && a.value != nullptr) entry.weight = __ldg(values + e);
    }
    return entry;
  };
  const auto scaled = [&](const Entry& entry) {
    return weighted && a.column_scale != nullptr ? entry.weight * __ldg(a.column_scale + entry.column) : entry.weight;
  };
  Entry now = entry_at(0), next = entry_at(lanes);
  now.weight = scaled(now);
#pragma unroll 1
  for (int e = 0; e < most; e += lanes) {
    const Entry after = entry_at(e + 2 * lanes);
    const float next_weight = scaled(next);
#pragma unroll 1
    for (int k = 0; k < lanes && e + k < most; k += kAtOnce) {
      Own got[kAtOnce];
      float w[kAtOnce];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {  // row 0 where there is no entry: read, not added
        got[s].load(x + static_cast<uint64_t>(static_cast<uint32_t>(team.from(now.column, k + s))) * o.x_bytes);
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) w[s] = weighted ? team.from(now.weight, k + s) : 1.0f;
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        if (e + k + s >= p.total) continue;
        if constexpr (!large) {
          while (first + static_cast<uint32_t>(e + k + s) == end) next_row();  // never that of the last row
        }
#pragma unroll
        for (int j = 0; j < wide; ++j) sum[j] = weighted ? fmaf(w[s], got[s].at(j), sum[j]) : sum[j] + got[s].at(j);
      }
    }
    now = {next.column, next_weight}, next = after;
  }
  if constexpr (large) {
    if (row < p.last) finish();
  } else {
    while (row < p.last) next_row();
  }
}

/// Teams of large pieces: words of 16 bytes in two, and twice the lanes for them, a power of two.
template <DType type, int lanes, int wide>
struct LargeShape {
  static constexpr bool kHalves = Raw<type, wide>::kBytes == 16;
  static constexpr int kWide = kHalves ? wide / 2 : wide, kUsed = kHalves ? 2 * lanes : lanes;
  static constexpr int kLanes = kUsed <= 8 ? 8 : kUsed <= 16 ? 16 : 32;
  static_assert(kUsed <= kLanes);
};

template <DType type, int lanes, int wide, bool weighted, bool ragged>
__global__ void __launch_bounds__(kThreads, each(lanes, weighted))
    multiply_rows(const __grid_constant__ Sparse a, const __grid_constant__ Operands o) {
  using Shape = LargeShape<type, lanes, wide>;
  const int64_t warp = thread_index() / 32;
  if (warp < o.large_warps)
    walk<type, Shape::kLanes, Shape::kUsed, Shape::kWide, weighted, true, ragged>(a, o, warp);
  else
    walk<type, lanes, lanes, wide, weighted, false, ragged>(a, o, warp - o.large_warps);
}

/// A column of a long row a thread.
template <DType type>
__global__ void __launch_bounds__(kAddThreads) add_stretches(const __grid_constant__ Sparse a, const __grid_constant__ Operands o) {
  const int64_t i = thread_index(), which = quotient(i, o.width), at = i - which * o.width;
  if (which >= a.long_rows) return;
  const int64_t row = __ldg(a.long_row + which) - a.first_row, from = __ldg(a.long_start + which);
  const int count = static_cast<int>(__ldg(a.long_start + which + 1) - from);
  const float scale = a.row_scale == nullptr ? 1.0f : __ldg(a.row_scale + row);
  const float beside = o.plus == nullptr ? 0.0f : read1<type>(o.plus + row * o.plus_bytes, at);
  const float* const part = o.scratch + (from - a.first_stretch) * o.width + at;
  float sum = part[0];
  for (int s = 1; s < count; s += kAddFlight) {
    float next[kAddFlight];
#pragma unroll
    for (int k = 0; k < kAddFlight; ++k) next[k] = s + k < count ? part[static_cast<int64_t>(s + k) * o.width] : 0.0f;
#pragma unroll
    for (int k = 0; k < kAddFlight; ++k) sum = s + k < count ? sum + next[k] : sum;
  }
  if (a.row_scale != nullptr) sum = scale * sum;
  if (o.plus != nullptr) sum = beside + sum;
  write1<type>(o.y + row * o.y_bytes, at, sum);
}

/// Calls f(lanes) with the size of a team for rows of `wanted` lanes: 16 do best, 8 where 16 would stand idle too often, 5 for 5 (40
/// columns of 16 bits).
template <int bytes, class F>
void with_lanes(int64_t wanted, F&& f) {
  if constexpr (bytes < 16) {
    f(std::integral_constant<int, 32>());
  } else {
    if (wanted <= 4) return f(std::integral_constant<int, 4>());
    if (wanted == 5) return f(std::integral_constant<int, 5>());
    if (4 * ceil_div(wanted, 16) * 16 > 5 * ceil_div(wanted, 8) * 8) return f(std::integral_constant<int, 8>());
    f(std::integral_constant<int, 16>());
  }
}

template <DType type, int lanes, int wide, bool ragged>
void launch_rows(const Sparse& a, Operands o, bool weighted, StreamHandle stream) {
  constexpr int kTeams = 32 / lanes, kLargeTeams = 32 / LargeShape<type, lanes, wide>::kLanes;
  const int64_t tiles = ceil_div(ceil_div(o.width, wide), lanes),
                others = a.group_order == nullptr ? a.groups : a.ordered_groups - a.large_groups;
  if (tiles > kMostTiles) fail("multiply", "x must have fewer columns", o.width);
  o.large_warps = ceil_div(a.long_stretches + a.large_groups, kLargeTeams);
  const dim3 blocks(grid_size(ceil_div(o.large_warps + ceil_div(others, kTeams), kThreads / 32)), static_cast<unsigned>(tiles));
  const auto kernel = weighted ? multiply_rows<type, lanes, wide, true, ragged> : multiply_rows<type, lanes, wide, false, ragged>;
  launch_kernel("multiply", stream, {blocks}, kernel, a, o);
}

template <DType type>
void launch(const Sparse& a, const ProductSides& sides, float* scratch, StreamHandle stream) {
  constexpr int kMost = type == DType::f32 ? 4 : 8;
  const auto bytes_of = [&](int64_t values) {
    const int64_t bytes = values * size_of(type);
    if (bytes < 0 || bytes > UINT32_MAX) fail("multiply", "rows must begin less than 4 GiB apart", values);
    return static_cast<uint32_t>(bytes);
  };
  if (sides.width > INT32_MAX / 2) fail("multiply", "x must have fewer columns", sides.width);
  Operands o{};
  o.x = static_cast<const char*>(sides.x), o.y = static_cast<char*>(sides.y), o.plus = static_cast<const char*>(sides.plus);
  o.scratch = scratch;
  o.width = static_cast<int>(sides.width);
  o.x_bytes = bytes_of(sides.x_stride), o.y_bytes = bytes_of(sides.y_stride), o.plus_bytes = bytes_of(sides.plus_stride);
  const bool weighted = a.value != nullptr || a.column_scale != nullptr;
  const auto serves = [](const void* rows, uint32_t stride, uintptr_t bytes) { return is_aligned(rows, bytes) && stride % bytes == 0; };
  const auto fits = [&](int wide) {
    const auto bytes = static_cast<uintptr_t>(wide) * size_of(type);
    return o.width % wide == 0 && serves(o.x, o.x_bytes, bytes) && serves(o.y, o.y_bytes, bytes) && serves(o.plus, o.plus_bytes, bytes);
  };
  const auto run = [&](auto wide) {
    with_lanes<Raw<type, wide()>::kBytes>(o.width / wide(),
                                          [&](auto lanes) { launch_rows<type, lanes(), wide(), false>(a, o, weighted, stream); });
  };
  if (fits(kMost))
    run(std::integral_constant<int, kMost>());
  else if (serves(o.x, o.x_bytes, 16) && sides.x_stride >= ceil_div(sides.width, kMost) * kMost)  // its gaps are read
    launch_rows<type, 8, kMost, true>(a, o, weighted, stream);
  else if (kMost > 4 && fits(4))
    run(std::integral_constant<int, 4>());
  else if (fits(2))
    run(std::integral_constant<int, 2>());
  else
    run(std::integral_constant<int, 1>());
  if (a.long_rows > 0) {
    const LaunchSize size{grid_size(ceil_div(a.long_rows * o.width, kAddThreads)), kAddThreads};
    launch_kernel("multiply", stream, size, add_stretches<type>, a, o);
  }
}

}  // namespace

int64_t multiply_scratch_values(const Sparse& a, int64_t width) { return a.long_stretches * width; }

void multiply(const Sparse& a, const ProductSides& sides, float* scratch, StreamHandle stream) {
  if (a.rows == 0 || sides.width == 0) return;
  switch (sides.type) {
    case DType::f32: return launch<DType::f32>(a, sides, scratch, stream);
    case DType::f16: return launch<DType::f16>(a, sides, scratch, stream);
    case DType::bf16: return launch<DType::bf16>(a, sides, scratch, stream);
    default: fail("multiply", "x must be float32, float16 or bfloat16");
  }
}

}  // namespace satchel::cuda
