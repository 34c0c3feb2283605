// Max-pool: eight neighbouring channels of one place a thread, where channels are a multiple of 8. Forward reads the window and writes
// values and offsets; backward gathers from the windows that a place is in, so that nothing is added by two threads.
#include "satchel/kernels/cuda/pool.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace pool {
namespace {

struct Places {
  int begin, end;
};

/// Which places of window o lie on the map.
__device__ inline Places places_of(const PoolSide& s, int o) {
  const int first = o * s.stride - s.padding, left = s.size - first;  // left ≥ 1, or the window is empty
  const int begin = first >= 0 ? 0 : (-first + s.dilation - 1) / s.dilation;
  const int most = left <= 0 ? 0 : (left + s.dilation - 1) / s.dilation;
  return {begin, most < s.kernel ? most : s.kernel};
}

/// Which windows may hold value i.
__device__ inline Places windows_of(const PoolSide& s, int i) {
  const int at = i + s.padding, reach = (s.kernel - 1) * s.dilation, end = at / s.stride + 1;
  return {at <= reach ? 0 : (at - reach + s.stride - 1) / s.stride, end < s.out ? end : s.out};
}

/// The place that value i has in window o; −1 where dilation steps over it.
__device__ inline int place_of(const PoolSide& s, int i, int o) {
  const int at = i + s.padding - o * s.stride;
  if (s.dilation == 1) return at;
  return at % s.dilation == 0 ? at / s.dilation : -1;
}

/// A place of maps of height × width.
struct Position {
  int64_t sample;
  int row, column;

  __device__ inline Position(int64_t at, int height, int width) {
    const int64_t line = quotient(at, width);
    sample = quotient(line, height);
    row = static_cast<int>(line - sample * height), column = static_cast<int>(at - line * width);
  }
};

/// Eight offsets to and from `bits` bytes; `aligned`: two and four bytes at once.
__device__ inline void store_offsets(uint8_t* offsets, int64_t group, int bits, uint64_t eight, int count) {
  uint8_t* to = offsets + group * bits;
  if (count == 8 && bits == 2) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(eight);
  } else if (count == 8 && bits == 4) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(eight);
  } else {
    for (int k = 0; k * 8 < count * bits; ++k) to[k] = static_cast<uint8_t>(eight >> (8 * k));
  }
}

__device__ inline uint64_t load_offsets(const uint8_t* offsets, int64_t group, int bits) {
  const uint8_t* from = offsets + group * bits;
  if (bits == 2) return __ldg(reinterpret_cast<const uint16_t*>(from));
  if (bits == 4) return __ldg(reinterpret_cast<const uint32_t*>(from));
  uint64_t eight = 0;
  for (int k = 0; k < bits; ++k) eight |= static_cast<uint64_t>(__ldg(from + k)) << (8 * k);
  return eight;
}

__device__ inline bool wins(float v, float best) { return v > best || v != v; }

constexpr uint32_t kMinusInfinity = 0xff800000u;

/// A thread: eight channels of one window.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    pool_groups(const __grid_constant__ MaxPool p, const void* x, void* y, uint8_t* offsets, int64_t groups) {
  const int64_t group = thread_index();
  if (group >= groups) return;
  const int64_t each = p.channels / 8, pixel = quotient(group, each), channel = (group - pixel * each) * 8;
  const Position o(pixel, p.height.out, p.width.out);
  const Places rows = places_of(p.height, o.row), columns = places_of(p.width, o.column);
  const int top = o.row * p.height.stride - p.height.padding, left = o.column * p.width.stride - p.width.padding;
  const bool empty = rows.begin >= rows.end || columns.begin >= columns.end;
  float best[8];
  int at[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) best[j] = float_of(kMinusInfinity), at[j] = empty ? 0 : rows.begin * p.width.kernel + columns.begin;
  for (int r = rows.begin; r < rows.end; ++r) {
    const int64_t line = o.sample * p.height.size + top + r * p.height.dilation;
#pragma unroll 4
    for (int c = columns.begin; c < columns.end; ++c) {
      const Eight<type> v = read8<type, true>(x, (line * p.width.size + left + c * p.width.dilation) * p.channels + channel);
      const int offset = r * p.width.kernel + c;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float value = v[j];
        if (wins(value, best[j])) best[j] = value, at[j] = offset;
      }
    }
  }
  write8<type, true>(y, group * 8, best);
  uint64_t eight = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) eight |= static_cast<uint64_t>(at[j]) << (p.bits * j);
  store_offsets(offsets, group, p.bits, eight, 8);
}

/// Any channels and addresses: eight values of y a thread, one after the other.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    pool_any(const __grid_constant__ MaxPool p, const void* x, void* y, uint8_t* offsets, int64_t values) {
  const int64_t group = thread_index(), first = group * 8;
  if (first >= values) return;
  const int count = values - first < 8 ? static_cast<int>(values - first) : 8;
  uint64_t eight = 0;
  for (int j = 0; j < count; ++j) {
    const int64_t pixel = quotient(first + j, p.channels), channel = first + j - pixel * p.channels;
    const Position o(pixel, p.height.out, p.width.out);
    const Places rows = places_of(p.height, o.row), columns = places_of(p.width, o.column);
    const int top = o.row * p.height.stride - p.height.padding, left = o.column * p.width.stride - p.width.padding;
    const bool empty = rows.begin >= rows.end || columns.begin >= columns.end;
    float best = float_of(kMinusInfinity);
    int at = empty ? 0 : rows.begin * p.width.kernel + columns.begin;
    for (int r = rows.begin; r < rows.end; ++r) {
      const int64_t line = o.sample * p.height.size + top + r * p.height.dilation;
      for (int c = columns.begin; c < columns.end; ++c) {
        const float value = load(x, type, (line * p.width.size + left + c * p.width.dilation) * p.channels + channel);
        if (wins(value, best)) best = value, at = r * p.width.kernel + c;
      }
    }
    write1<type>(y, first + j, best);
    eight |= static_cast<uint64_t>(at) << (p.bits * j);
  }
  store_offsets(offsets, group, p.bits, eight, count);
}

/// Calls visit(window, offset) for every window that place i is in: its number among the sample's, and the offset that means i.
template <class F>
__device__ inline void for_windows(const MaxPool& p, const Position& i, const F& visit) {
  const Places rows = windows_of(p.height, i.row), columns = windows_of(p.width, i.column);
  for (int r = rows.begin; r < rows.end; ++r) {
    const int row = place_of(p.height, i.row, r);
    if (row < 0) continue;
    const int64_t line = (i.sample * p.height.out + r) * p.width.out;
    for (int c = columns.begin; c < columns.end; ++c) {
      const int column = place_of(p.width, i.column, c);
      if (column >= 0) visit(line + c, row * p.width.kernel + column);
    }
  }
}

/// A thread: eight channels of one place of the input.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    gather_groups(const __grid_constant__ MaxPool p, const void* g, const uint8_t* offsets, void* dx, int64_t groups) {
  const int64_t group = thread_index();
  if (group >= groups) return;
  const int64_t each = p.channels / 8, pixel = quotient(group, each), own = group - pixel * each;
  const uint32_t mask = (1u << p.bits) - 1;
  float sum[8] = {};
  for_windows(p, Position(pixel, p.height.size, p.width.size), [&](int64_t window, int offset) {
    const int64_t from = window * each + own;
    const Eight<type> v = read8<type, true>(g, from * 8);
    const uint64_t eight = load_offsets(offsets, from, p.bits);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((static_cast<uint32_t>(eight >> (p.bits * j)) & mask) == static_cast<uint32_t>(offset)) sum[j] += v[j];
    }
  });
  write8<type, true>(dx, group * 8, sum);
}

/// Any channels and addresses: one value a thread.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    gather_any(const __grid_constant__ MaxPool p, const void* g, const uint8_t* offsets, void* dx, int64_t values) {
  const int64_t i = thread_index();
  if (i >= values) return;
  const int64_t pixel = quotient(i, p.channels), channel = i - pixel * p.channels;
  float sum = 0.0f;
  for_windows(p, Position(pixel, p.height.size, p.width.size), [&](int64_t window, int offset) {
    const int64_t from = window * p.channels + channel;
    const uint32_t at = p.bits == 0 ? 0 : get_code(offsets, p.bits, from);
    if (at == static_cast<uint32_t>(offset)) sum += load(g, type, from);
  });
  write1<type>(dx, i, sum);
}

int64_t pixels(const MaxPool& p, bool out) {
  return p.samples * (out ? p.height.out : p.height.size) * static_cast<int64_t>(out ? p.width.out : p.width.size);
}

bool fits(const PoolSide& s) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const auto within = [](int64_t v, int64_t least) { return v >= least && v < kMost; };
  return within(s.size, 1) && within(s.out, 1) && within(s.kernel, 1) && within(s.stride, 1) && within(s.padding, 0) &&
         within(s.dilation, 1) && within(int64_t{s.kernel} * s.dilation, 1) && within(int64_t{s.out} * s.stride, 1) &&
         within(int64_t{s.size} + s.padding + s.stride, 1);
}

void check(const MaxPool& p, const uint8_t* offsets, const char* op) {
  if (!max_pool_fits(p)) fail(op, "max_pool_fits must be true of the sizes");
  if (!is_aligned(offsets)) fail(op, "offsets must start at a multiple of 16");
}

}  // namespace
}  // namespace pool

bool max_pool_fits(const MaxPool& p) {
  if (!pool::fits(p.height) || !pool::fits(p.width) || p.samples < 1 || p.channels < 1 || p.bits < 0 || p.bits > 8) return false;
  return int64_t{p.height.kernel} * p.width.kernel <= int64_t{1} << p.bits;
}

void max_pool(const MaxPool& p, const void* x, DType type, void* y, uint8_t* offsets, StreamHandle stream) {
  constexpr const char* op = "max_pool";
  pool::check(p, offsets, op);
  const int64_t values = pool::pixels(p, true) * p.channels;
  const bool vector = p.channels % 8 == 0 && is_aligned(x) && is_aligned(y);
  const unsigned blocks = blocks_for(ceil_div(values, 8));
  with_type(type, [&](auto t) {
    if (vector)
      launch_kernel(op, stream, {blocks}, pool::pool_groups<t()>, p, x, y, offsets, values / 8);
    else
      launch_kernel(op, stream, {blocks}, pool::pool_any<t()>, p, x, y, offsets, values);
  });
}

void max_pool_back(const MaxPool& p, const void* g, DType type, const uint8_t* offsets, void* dx, StreamHandle stream) {
  constexpr const char* op = "max_pool_back";
  pool::check(p, offsets, op);
  const int64_t values = pool::pixels(p, false) * p.channels;
  const bool vector = p.channels % 8 == 0 && is_aligned(g) && is_aligned(dx);
  with_type(type, [&](auto t) {
    if (vector)
      launch_kernel(op, stream, {blocks_for(values / 8)}, pool::gather_groups<t()>, p, g, offsets, dx, values / 8);
    else
      launch_kernel(op, stream, {blocks_for(values)}, pool::gather_any<t()>, p, g, offsets, dx, values);
  });
}

}  // namespace satchel::cuda
