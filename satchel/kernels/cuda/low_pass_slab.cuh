// How warps go through channels_last planes, window by window. A warp has a slab of 32 neighbouring channels, four a lane; the lane's
// eight values a channel are a line of a window (or eight pixels in a row):
//
//   lane    0 … 7                8 … 15        16 … 23       24 … 31
//   quads   channels 0 … 31      the same      the same      the same
//   rows    0 and 1              2 and 3       4 and 5       6 and 7      of the window
//
// Warps of a thread block have neighbouring slabs of the same window, and windows side by side where there are few slabs. A warp keeps
// its slab. It takes windows a grid's step apart, or two neighbours each time: these share the lines of memory that their codes stand in.
#pragma once

#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/low_pass_last.cuh"
#include "satchel/kernels/cuda/low_pass_stream.h"

namespace satchel::cuda::slab {

constexpr int kSlab = 32;  // channels
constexpr int kWarps = 4;  // of a thread block
static_assert(kSlabMeasure.threads == kWarps * 32 && kSlabBack.threads == kWarps * 32);

struct Planes {
  FastDivisor windows, across;  // of a map, of a row of windows
  int channels, height, width;
  uint32_t units;  // windows of all samples
  int log;         // of the slabs side by side in a thread block

  Planes(const LowPassShape& s, int64_t count)
      : windows(static_cast<uint32_t>(s.windows())),
        across(static_cast<uint32_t>(ceil_div(s.width, kWindow))),
        channels(static_cast<int>(count)),
        height(static_cast<int>(s.height)),
        width(static_cast<int>(s.width)),
        units(static_cast<uint32_t>(s.maps / count * s.windows())),
        log(0) {
    while ((2 << log) <= kWarps && (2 << log) <= slabs()) ++log;
  }
  SATCHEL_HD int slabs() const { return (channels + kSlab - 1) / kSlab; }
  SATCHEL_HD int pixels() const { return height * width; }
  SATCHEL_HD int sides() const { return kWarps >> log; }  // windows side by side
  int64_t groups() const { return ceil_div(slabs(), 1 << log); }
  /// Thread blocks that share a group of slabs, of a kernel that sums up.
  int64_t parts(const BlockNeeds& needs) const { return parts_of(kSumProcessors * needs.each); }
  dim3 grid(const BlockNeeds& needs) const { return grid_of(parts(needs)); }
  /// … of any other: as many as the device holds.
  dim3 free_grid(const BlockNeeds& needs) const { return grid_of(parts_of(resident(this_gpu(), needs))); }

 private:
  int64_t parts_of(int64_t at_once) const { return parts_of_tiles(groups(), ceil_div(units, sides()), at_once); }
  dim3 grid_of(int64_t parts) const { return {grid_size(groups()), static_cast<unsigned>(parts)}; }
};

/// Lane and warp as the picture has them.
struct Seat {
  int quad, pair, channel;  // channel: the first of four
  bool exists;              // does it?

  __device__ inline Seat(const Planes& p, int slab)
      : quad(static_cast<int>(threadIdx.x) % 8),
        pair(static_cast<int>(threadIdx.x) % 32 / 8),
        channel(slab * kSlab + 4 * quad),
        exists(channel < p.channels) {}
  /// Of a kernel that walks.
  __device__ inline explicit Seat(const Planes& p)
      : Seat(p, static_cast<int>(blockIdx.x << p.log) + (static_cast<int>(threadIdx.x) / 32 & ((1 << p.log) - 1))) {}
};

/// Calls f(unit) for the windows of a warp, the same for all its lanes.
template <class F>
__device__ inline void for_units(const Planes& p, F&& f) {
  const uint32_t sides = static_cast<uint32_t>(p.sides()), side = threadIdx.x / 32 >> p.log;
  for (uint64_t unit = blockIdx.y * sides + side; unit < p.units; unit += static_cast<uint64_t>(gridDim.y) * sides) {
    f(static_cast<uint32_t>(unit));
  }
}

/// The same, two neighbours one after the other: more of them, and thread blocks would no longer go through memory together.
template <class F>
__device__ inline void for_neighbours(const Planes& p, F&& f) {
  const uint32_t sides = static_cast<uint32_t>(p.sides()), side = threadIdx.x / 32 >> p.log;
  uint64_t unit = static_cast<uint64_t>(blockIdx.y) * 2 * sides + side;
#pragma unroll 1
  for (uint32_t turn = 0; unit < p.units; ++turn) {
    f(static_cast<uint32_t>(unit));
    unit += turn % 2 == 0 ? sides : (uint64_t{gridDim.y} * 2 - 1) * sides;
  }
}

struct Window {
  int64_t sample;
  int index, row, column, rows, columns;  // columns and rows: that exist

  __device__ inline Window(const Planes& p, uint32_t unit) {
    const uint32_t n = p.windows.divide(unit);
    sample = n;
    index = static_cast<int>(unit - n * p.windows.divisor);
    const int down = static_cast<int>(p.across.divide(static_cast<uint32_t>(index)));
    row = down * kWindow;
    column = (index - down * static_cast<int>(p.across.divisor)) * kWindow;
    rows = min(kWindow, p.height - row);
    columns = min(kWindow, p.width - column);
  }
  /// Its value of a channel on a line, in memory.
  __device__ inline int64_t at(const Planes& p, int line, int channel) const {
    return (sample * p.pixels() + (row + line) * p.width + column) * p.channels + channel;
  }
};

/// Pixels in a row of a buffer that the same launch may write, four channels each. One multiplication gives a pixel's address.
template <DType type>
struct Pixels {
  char* first;
  int step;  // bytes

  __device__ inline Pixels(const void* x, int64_t i, int channels)
      : first(static_cast<char*>(const_cast<void*>(x)) + i * static_cast<int64_t>(sizeof(Cell<type>))),
        step(channels * static_cast<int>(sizeof(Cell<type>))) {}
  __device__ inline Quad<type>& operator[](int j) const { return *reinterpret_cast<Quad<type>*>(first + static_cast<int64_t>(step) * j); }
  __device__ inline void write(int j, const float (&v)[4]) const {
    Quad<type> q;
    if constexpr (type == DType::f32) q = make_float4(v[0], v[1], v[2], v[3]);
    if constexpr (type == DType::bf16) q = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
    if constexpr (type == DType::f16) q = make_uint2(f16_pair(v[0], v[1]), f16_pair(v[2], v[3]));
    (*this)[j] = q;
  }
};

/// The first `count` of eight pixels; the rest as 0.
template <DType type>
__device__ inline void read_line(const Pixels<type>& x, int count, Quad<type> (&q)[8]) {
  if (count == 8) {
#pragma unroll
    for (int j = 0; j < 8; ++j) q[j] = x[j];
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    q[j] = Quad<type>{};
    if (j < count) q[j] = x[j];
  }
}

/// A bit of each of four channels and eight pixels, bit 4·j + k of lane q's word being pixel j and channel 4·q + k, turned over between
/// eight lanes: lane q has pixel q, bit c being channel c. The way back is the same. Every lane of the warp must take part.
__device__ inline uint32_t turn_bits(uint32_t word) {
  const unsigned lane = threadIdx.x;
  uint32_t other = __shfl_xor_sync(~0u, word, 4);
  word = (lane & 4) == 0 ? (word & 0xffffu) | other << 16 : (word & 0xffff0000u) | other >> 16;
  other = __shfl_xor_sync(~0u, word, 2);
  word = (lane & 2) == 0 ? (word & 0x00ff00ffu) | (other & 0x00ff00ffu) << 8 : (word & 0xff00ff00u) | (other >> 8 & 0x00ff00ffu);
  other = __shfl_xor_sync(~0u, word, 1);
  return (lane & 1) == 0 ? (word & 0x0f0f0f0fu) | (other & 0x0f0f0f0fu) << 4 : (word & 0xf0f0f0f0u) | (other >> 4 & 0x0f0f0f0fu);
}

/// The bits of a pixel's `count` (8 to 32) channels from value `first` on, a multiple of 8, out of `channels` a pixel.
__device__ inline uint32_t read_bits(const uint8_t* mask, int64_t first, int channels, int count) {
  if (channels % kSlab == 0) return *reinterpret_cast<const uint32_t*>(mask + first / 8);
  uint32_t word = 0;
  for (int k = 0; 8 * k < count; ++k) word |= static_cast<uint32_t>(mask[first / 8 + k]) << (8 * k);
  return word;
}
__device__ inline void write_bits(uint8_t* mask, int64_t first, int channels, int count, uint32_t word) {
  if (channels % kSlab == 0) {
    *reinterpret_cast<uint32_t*>(mask + first / 8) = word;
    return;
  }
  for (int k = 0; 8 * k < count; ++k) mask[first / 8 + k] = static_cast<uint8_t>(word >> (8 * k));
}

// ---- the norm's output -----------------------------------------------------------------------------------------------

/// What is written besides codes: nothing, γ'·x + β', its ReLU with a mask, or that of its sum with a skip.
enum class Then : uint8_t { nothing, norm, relu, add };

/// Calls f with what is asked for as an integral constant.
template <class F>
void with_then(const StreamNorm& norm, F&& f) {
  if (norm.z == nullptr) return f(std::integral_constant<Then, Then::nothing>());
  if (norm.mask == nullptr) return f(std::integral_constant<Then, Then::norm>());
  if (norm.skip == nullptr) return f(std::integral_constant<Then, Then::relu>());
  f(std::integral_constant<Then, Then::add>());
}

/// Four channels of the folded norm, as folded() of the autograd room folds it.
struct Folded {
  float scale[4], offset[4];

  __device__ inline Folded(const NormParameters& p, int channel, bool exists) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      scale[k] = exists ? p.gamma[channel + k] * p.rstd[channel + k] : 0.0f;
      offset[k] = exists ? -(p.mean[channel + k] * scale[k]) + p.beta[channel + k] : 0.0f;
    }
  }
};

/// Pixel j: z goes to memory, its on bits come back, bit k being channel k.
template <DType type, Then then>
__device__ inline uint32_t write_norm(const Folded& norm, const Quad<type>& x, const Quad<type>& skip, const Pixels<type>& z, int j) {
  uint32_t on = 0;
  float out[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float y = fmaf(norm.scale[k], value_of_cell<type>(cell_of<type>(x, k)), norm.offset[k]);
    if constexpr (then == Then::add) y = y + value_of_cell<type>(cell_of<type>(skip, k));
    const bool passes = then == Then::norm || y > 0.0f;
    if (passes) on |= 1u << k;
    out[k] = fmaf(y, passes ? 1.0f : 0.0f, 0.0f);  // chain_output(): a product with 1 or 0 is exact
  }
  z.write(j, out);
  return on;
}

// ---- measuring -------------------------------------------------------------------------------------------------------

/// What the window's tree of sums and its extremes need of one line: `n` of its eight pixels exist, all of them if `whole`.
template <DType type, bool moments, bool whole>
__device__ inline void measure_some(const Quad<type> (&q)[8], int n, float (&sum)[4], Extremes (&e)[4], Gathered& gathered) {
  const float some = static_cast<float>(n), each = whole ? 0.125f : 1.0f / some;
  const float fraction = moments ? some / (gathered.count + some) : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = whole || j < n ? flush_signed(value_of_cell<type>(cell_of<type>(q[j], k))) : 0.0f;
    sum[k] = tree8(v);
    if constexpr (moments) gathered.add<whole>(k, v, sum[k], n, each, fraction);
    if constexpr (whole) {
      e[k].add8(v);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < n) e[k].add(v[j]);
      }
    }
  }
  gathered.count += some;
}

template <DType type, bool moments>
__device__ inline void measure_line(const Quad<type> (&q)[8], int n, float (&sum)[4], Extremes (&e)[4], Gathered& gathered) {
  if (n == 8) return measure_some<type, moments, true>(q, n, sum, e, gathered);
  if (n > 0) return measure_some<type, moments, false>(q, n, sum, e, gathered);
#pragma unroll
  for (int k = 0; k < 4; ++k) sum[k] = 0.0f;
}

/// Four numbers a lane become one: that of channel own_channel(pair), combined over the lanes that hold the window's rows.
template <class F>
__device__ inline float combine_rows(const float (&v)[4], int pair, F&& f) {
  const bool upper = (pair & 1) != 0, odd = (pair & 2) != 0;
  const float a = f(upper ? v[2] : v[0], __shfl_xor_sync(~0u, upper ? v[0] : v[2], 8));
  const float b = f(upper ? v[3] : v[1], __shfl_xor_sync(~0u, upper ? v[1] : v[3], 8));
  return f(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 16));
}
__device__ inline int own_channel(int pair) { return (pair & 1) * 2 + (pair >> 1); }

/// One channel of a window.
struct WindowMean {
  uint16_t mean;
  Extremes rest;  // of the window less its mean: rounding keeps order
};

/// Of channel own_channel(pair), after both rows were measured; every lane of the warp takes part.
__device__ inline WindowMean window_mean(const float (&sum)[4], const Extremes (&e)[4], int pair, int values) {
  const float least[4] = {e[0].least, e[1].least, e[2].least, e[3].least}, most[4] = {e[0].most, e[1].most, e[2].most, e[3].most};
  const float total = combine_rows(sum, pair, [](float a, float b) { return a + b; });
  Extremes rest;
  rest.least = combine_rows(least, pair, [](float a, float b) { return min_nan(a, b); });
  rest.most = combine_rows(most, pair, [](float a, float b) { return max_nan(a, b); });
  const uint16_t m = to_bf16(flush(total / static_cast<float>(values)));
  rest.least -= from_bf16(m);
  rest.most -= from_bf16(m);
  return {m, rest};
}

/// The same from both lines of a lane: read(line, columns, n, q) reads the first n of eight pixels (`columns`, or
/// none where the channels do not exist), and does with them what else is to be done.
template <DType type, bool moments, class Read>
__device__ inline WindowMean measure_window(const Window& w, int pair, bool exists, Gathered& gathered, Read&& read) {
  float sum[4];
  Extremes e[4];
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const int line = 2 * pair + h, columns = line < w.rows ? w.columns : 0, n = exists ? columns : 0;
    Quad<type> q[8];
    read(line, columns, n, q);
    float row[4];
    measure_line<type, moments>(q, n, row, e, gathered);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] = h == 0 ? row[k] : sum[k] + row[k];
  }
  return window_mean(sum, e, pair, w.rows * w.columns);
}

}  // namespace satchel::cuda::slab
