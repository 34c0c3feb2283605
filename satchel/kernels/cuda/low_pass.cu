// DIVISION's two frequencies (theory.md 6), bit for bit what cpu/low_pass.cpp does. Fused where windows are 8 × 8 and rows are
// whole windows wide: a thread's 8 values are one line of one window, a thread block is one map, and x is read once.
#include "satchel/kernels/cuda/low_pass_last.cuh"

namespace satchel::cuda {
namespace {

struct Args {
  LowPassShape shape;
  BlockCode code;
  const void* x;
  const uint64_t* seed;
  uint8_t* codes;
  void* headers;
  uint16_t* means;
};

constexpr int kLine = 8;          // values a thread, and the fused kernel's window
constexpr int kMostLines = 1024;  // threads: maps of up to 8192 values

struct MapSize {
  FastDivisor across;  // lines of 8 values a row
  int lines, windows, height;
};

/// Means of a map's windows from the sums of their lines.
__device__ inline void put_means(const Args& a, const MapSize& size, int64_t map, const float* line_sum, float* mean) {
  const int across = static_cast<int>(size.across.divisor);
  for (int w = static_cast<int>(threadIdx.x); w < size.windows; w += static_cast<int>(blockDim.x)) {
    const int row = static_cast<int>(size.across.divide(static_cast<uint32_t>(w))), column = w - row * across;
    const int top = row * kLine, rows = min(kLine, size.height - top);
    float sums[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) sums[k] = k < rows ? line_sum[(top + k) * across + column] : 0.0f;
    const uint16_t m = to_bf16(flush(tree8(sums) / static_cast<float>(rows * kLine)));
    a.means[map * size.windows + w] = m;
    mean[w] = from_bf16(m);
  }
}

/// One map a thread block, `chunks` lines a thread.
template <int bits, DType type, int chunks>
__global__ void __launch_bounds__(kMostLines / chunks) encode_map(const __grid_constant__ Args a, const __grid_constant__ MapSize size) {
  extern __shared__ float line_sum[];
  __shared__ float mean[kMostLines];
  __shared__ float2 pairs[32];
  __shared__ BlockRuler ruler;
  const int64_t map = blockIdx.x, first_group = map * size.lines;
  const UniformSeed seed(a.seed);
  float v[chunks][8];
  Words noise[chunks];
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int line = static_cast<int>(threadIdx.x + c * blockDim.x);
    if (line < size.lines) load8<type>(a.x, (first_group + line) * 8, v[c]);
  }
#pragma unroll
  for (int c = 0; c < chunks; ++c) {  // while the values are on their way
    noise[c] = group_noise(seed, a.code.rounding, first_group + threadIdx.x + c * blockDim.x);
  }
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int line = static_cast<int>(threadIdx.x + c * blockDim.x);
    if (line >= size.lines) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[c][j] = flush_signed(v[c][j]);
    line_sum[line] = tree8(v[c]);
  }
  __syncthreads();
  put_means(a, size, map, line_sum, mean);
  __syncthreads();
  Extremes e;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const uint32_t line = threadIdx.x + c * blockDim.x;
    if (static_cast<int>(line) >= size.lines) continue;
    const uint32_t row = size.across.divide(line);
    const float m = mean[row / kLine * size.across.divisor + line - row * size.across.divisor];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[c][j] = v[c][j] - m;
    e.add8(v[c]);
  }
  const BlockRuler b = shared_ruler(bits, e, a.code.header, a.headers, map, pairs, &ruler);
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const int line = static_cast<int>(threadIdx.x + c * blockDim.x);
    if (line < size.lines) store_codes<bits>(a.codes, first_group + line, encode8<bits, true>(v[c], b, a.code.levels, noise[c]), 8);
  }
}

/// Sum of get(0 … n − 1) as a tree over n rounded up to a power of two: lines of a window are short.
template <class Get>
__device__ float tree_sum(int n, const Get& get) {
  float level[32];  // partial sums of 2^k numbers, kept like the bits of a counter
  int padded = 1;
  while (padded < n) padded *= 2;
  int depth = 0;
  for (int i = 0; i < padded; ++i) {
    float sum = i < n ? get(i) : 0.0f;
    int k = 0;
    for (; (i >> k & 1) != 0; ++k) sum = level[k] + sum;
    level[k] = sum;
    depth = k;
  }
  return level[depth];
}

/// Means of any windows: one a thread.
template <DType type>
__global__ void __launch_bounds__(kThreads) means_any(const __grid_constant__ Args a) {
  const LowPassShape& s = a.shape;
  const int64_t w = thread_index(), windows = s.windows();
  if (w >= s.maps * windows) return;
  const int64_t across = ceil_div(s.width, s.size), down = ceil_div(s.height, s.size), in_map = w % windows;
  const int64_t d0 = in_map / across / down * s.size, h0 = in_map / across % down * s.size, c0 = in_map % across * s.size;
  const int nd = static_cast<int>(min(static_cast<int64_t>(s.size), s.depth - d0));
  const int nh = static_cast<int>(min(static_cast<int64_t>(s.size), s.height - h0));
  const int nc = static_cast<int>(min(static_cast<int64_t>(s.size), s.width - c0));
  const int64_t base = w / windows * s.map_values();
  const float sum = tree_sum(nd, [&](int d) {
    return tree_sum(nh, [&](int h) {
      const int64_t at = base + ((d0 + d) * s.height + h0 + h) * s.width + c0;
      return tree_sum(nc, [&](int c) { return flush(load(a.x, type, at + c)); });
    });
  });
  a.means[w] = to_bf16(flush(sum / static_cast<float>(static_cast<int64_t>(nd) * nh * nc)));
}

/// The mean that value i of the tensor lies under.
__device__ inline float mean_at(const LowPassShape& s, const uint16_t* means, int64_t i) {
  const int64_t map = i / s.map_values(), at = i % s.map_values();
  const int64_t d = at / s.width / s.height / s.size, h = at / s.width % s.height / s.size, c = at % s.width / s.size;
  return from_bf16(means[map * s.windows() + (d * ceil_div(s.height, s.size) + h) * ceil_div(s.width, s.size) + c]);
}

template <DType type>
__global__ void __launch_bounds__(kThreads) rest_any(const __grid_constant__ Args a, float* rest) {
  const int64_t i = thread_index();
  if (i < a.code.grid.values) rest[i] = flush(load(a.x, type, i)) - mean_at(a.shape, a.means, i);
}

__device__ inline float joined(float rest, float mean) {
  const float v = bounded(rest + mean);
  return v != v ? __uint_as_float(kCanonicalNaN) : v;
}

template <DType type>
__global__ void __launch_bounds__(kThreads) decode_any(const __grid_constant__ Args a, void* x) {
  const int64_t i = thread_index();
  if (i >= a.code.grid.values) return;
  const Header h = load_header(a.headers, a.code.header, a.code.grid.block_of(i));
  store(x, type, i, joined(value_of(get_code(a.codes, a.code.levels.bits, i), h, a.code.levels), mean_at(a.shape, a.means, i)));
}

template <DType type>
__global__ void __launch_bounds__(kThreads) spread_any(const __grid_constant__ LowPassShape s, const uint16_t* means, void* x) {
  const int64_t i = thread_index();
  if (i < s.maps * s.map_values()) store(x, type, i, joined(0.0f, mean_at(s, means, i)));
}

constexpr int kQuads = 4;

/// Four neighbouring values of one window line a thread and step: rows and windows are multiples of 4 wide, a block is a map.
template <int bits, DType type>
__global__ void __launch_bounds__(kThreads)
    decode_quads(const __grid_constant__ Args a, void* x, const __grid_constant__ FastDivisor map_quads,
                 const __grid_constant__ FastDivisor row_quads, const __grid_constant__ FastDivisor size, uint32_t windows) {
  const uint32_t quads = static_cast<uint32_t>(a.code.grid.values / 4);
  const uint32_t across = size.divide(row_quads.divisor * 4 + size.divisor - 1);
  const uint32_t first = static_cast<uint32_t>(thread_index()) / 32 * 32 * kQuads + threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint32_t quad = first + 32 * q;
    if (quad >= quads) return;
    const uint32_t map = map_quads.divide(quad), at = quad - map * map_quads.divisor;
    const uint32_t row = row_quads.divide(at), column = (at - row * row_quads.divisor) * 4;
    const float mean = from_bf16(__ldg(a.means + static_cast<int64_t>(map) * windows + size.divide(row) * across + size.divide(column)));
    const Header h = load_header(a.headers, a.code.header, map);
    const uint32_t four = load_four<bits>(a.codes, quad);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float rest = flush(fmaf(static_cast<float>(four >> (bits * j) & ((1u << bits) - 1)), h.step, h.low));
      v[j] = is_poisoned(h) ? __uint_as_float(kCanonicalNaN) : bounded(rest + mean);
    }
    store4<type>(x, static_cast<int64_t>(quad) * 4, v);
  }
}

bool is_fused(const LowPassShape& s, const BlockCode& code, const void* x) {
  return is_aligned(x) && s.size == kLine && s.depth == 1 && s.width % kLine == 0 && s.map_values() <= kLine * kMostLines &&
         code.levels.even && has_usual_bits(code) && code.grid.block == s.map_values() && code.grid.is_straight();
}

}  // namespace

int64_t low_pass_scratch_bytes(const LowPassShape& s, const BlockCode& code, const void* x) {
  return is_fused(s, code, x) ? 0 : code.grid.values * 4;
}

void low_pass_encode(const LowPassShape& s, const BlockCode& code, const void* x, DType type, const uint64_t* seed, uint8_t* codes,
                     void* headers, uint16_t* means, void* scratch, StreamHandle stream) {
  if (code.grid.values == 0) return;
  const Args a = {s, code, x, seed, codes, headers, means};
  with_type(type, [&](auto t) {
    if (is_fused(s, code, x)) {
      const int lines = static_cast<int>(s.map_values()) / kLine, chunks = lines > 128 ? 2 : 1;
      const unsigned threads = static_cast<unsigned>(ceil_div(lines, 32 * chunks) * 32), maps = grid_size(s.maps);
      const MapSize size = {FastDivisor(static_cast<uint32_t>(s.width / kLine)), lines, static_cast<int>(s.windows()),
                            static_cast<int>(s.height)};
      const size_t bytes = static_cast<size_t>(lines) * sizeof(float);
      with_usual_bits(code.levels.bits, [&](auto bits) {
        launch_kernel("low_pass", stream, {maps, threads, bytes}, chunks == 1 ? encode_map<bits(), t(), 1> : encode_map<bits(), t(), 2>, a,
                      size);
      });
      return;
    }
    launch_kernel("low_pass", stream, {blocks_for(s.maps * s.windows())}, means_any<t()>, a);
    launch_kernel("low_pass", stream, {blocks_for(code.grid.values)}, rest_any<t()>, a, static_cast<float*>(scratch));
    encode(code, scratch, DType::f32, seed, codes, headers, stream);
  });
}

void low_pass_means(const LowPassShape& s, const void* x, DType type, uint16_t* means, StreamHandle stream) {
  if (s.maps == 0) return;
  const Args a = {s, {}, x, nullptr, nullptr, nullptr, means};
  with_type(type, [&](auto t) { launch_kernel("low_pass", stream, {blocks_for(s.maps * s.windows())}, means_any<t()>, a); });
}

void low_pass_spread(const LowPassShape& s, const uint16_t* means, void* x, DType type, StreamHandle stream) {
  if (s.maps == 0) return;
  with_type(type, [&](auto t) { launch_kernel("low_pass", stream, {blocks_for(s.maps * s.map_values())}, spread_any<t()>, s, means, x); });
}

void low_pass_decode(const LowPassShape& s, const BlockCode& code, const uint8_t* codes, const void* headers, const uint16_t* means,
                     void* x, DType type, StreamHandle stream) {
  if (code.grid.values == 0) return;
  const Args a = {s, code, nullptr, nullptr, const_cast<uint8_t*>(codes), const_cast<void*>(headers), const_cast<uint16_t*>(means)};
  const bool quads = s.depth == 1 && s.width % 4 == 0 && s.size % 4 == 0 && code.levels.even && has_usual_bits(code) &&
                     code.grid.block == s.map_values() && is_aligned(x) && is_aligned(codes, code_alignment(code.levels.bits)) &&
                     code.grid.values < (int64_t{1} << 31) && code.grid.is_straight();
  with_type(type, [&](auto t) {
    if (quads) {
      with_usual_bits(code.levels.bits, [&](auto bits) {
        launch_kernel("low_pass", stream, {blocks_for(ceil_div(code.grid.values / 4, kQuads * 32) * 32)}, decode_quads<bits(), t()>, a, x,
                      FastDivisor(static_cast<uint32_t>(s.map_values() / 4)), FastDivisor(static_cast<uint32_t>(s.width / 4)),
                      FastDivisor(static_cast<uint32_t>(s.size)), static_cast<uint32_t>(s.windows()));
      });
    } else {
      launch_kernel("low_pass", stream, {blocks_for(code.grid.values)}, decode_any<t()>, a, x);
    }
  });
}

}  // namespace satchel::cuda
