// The way back of low_pass_last.cu: codes in the order of the maps, values to channels_last. A thread writes four neighbouring
// channels of a pixel at once, 32 (fp32) or 64 lanes' worth of them side by side: whole lines of memory.
#include "satchel/kernels/cuda/low_pass_last.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

struct Args {
  HeaderType header;
  const uint8_t* codes;
  const void* headers;
  const uint16_t* means;
  void* x;
  FastDivisor tiles, width, across, groups, window_count;  // a sample's tiles; a row's pixels and windows; a map's groups and windows
  int channels, height, pixels;
  int quad_log;  // quads of channels a tile
  int64_t items;

  __device__ int tile() const { return 4 << quad_log; }
  __device__ int columns() const { return static_cast<int>(width.divisor); }
  __device__ int windows() const { return static_cast<int>(window_count.divisor); }
  __device__ int window_of(int row, int column) const { return row / kWindow * static_cast<int>(across.divisor) + column / kWindow; }
};

__device__ inline float value_at(uint32_t code, const Header& h, float mean) {
  const float v = bounded(flush(fmaf(static_cast<float>(code), h.step, h.low)) + mean);
  return is_poisoned(h) || v != v ? __uint_as_float(kCanonicalNaN) : v;
}

/// The same where the header is of usual size, from level_of().
template <int bits>
__device__ inline float usual_value(float level, const Header& h, float mean) {
  constexpr float kCodes = 1 << bits;
  return fmaf(fmaf(level, kCodes, -kCodes), h.step, h.low) + mean;  // the inner product is exact: the code
}

template <int bits>
__device__ inline uint32_t load_eight(const uint8_t* codes, int64_t group) {
  if constexpr (bits == 2) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  return load_four<bits>(codes, 2 * group) | load_four<bits>(codes, 2 * group + 1) << (4 * bits);
}

/// Four channels of a pixel. `usual`: all of them finite.
template <DType type>
__device__ inline void put_quad(void* x, int64_t i, const float (&v)[4], bool usual) {
  if constexpr (type == DType::bf16) {
    if (usual) {  // the processor's own rounding
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(x) + i) = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
      return;
    }
  }
  store4<type>(x, i, v);
}

/// Windows of the 8 pixels from p on.
template <bool by_fours>
__device__ inline void windows_from(const Args& a, int p, int (&window)[8]) {
  int row = static_cast<int>(a.width.divide(static_cast<uint32_t>(p))), column = p - row * a.columns();
  constexpr int kStep = by_fours ? 4 : 1;
#pragma unroll
  for (int j = 0; j < 8; j += kStep) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) window[j + i] = a.window_of(row, column);
    column += kStep;
    if (column == a.columns()) column = 0, ++row;
  }
}

/// 8 pixels of 4 channels a thread; maps are multiples of 8 values. by_fours: rows are multiples of 4 wide.
template <int bits, DType type, bool by_fours>
__global__ void __launch_bounds__(kThreads) decode_groups(const __grid_constant__ Args a) {
  const int64_t item = thread_index();
  if (item >= a.items) return;
  const uint32_t rest = static_cast<uint32_t>(item >> a.quad_log), tile = a.groups.divide(rest), sample = a.tiles.divide(tile);
  const int g = static_cast<int>(rest - tile * a.groups.divisor), quad = static_cast<int>(item & ((1 << a.quad_log) - 1));
  const int channel = static_cast<int>(tile - sample * a.tiles.divisor) * a.tile() + 4 * quad;
  const int64_t map = static_cast<int64_t>(sample) * a.channels + channel;
  int window[8];
  windows_from<by_fours>(a, g * 8, window);
  float v[8][4];
  bool all_usual = true;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Header h = load_header(a.headers, a.header, map + k);
    const uint32_t eight = load_eight<bits>(a.codes, (map + k) * static_cast<int64_t>(a.groups.divisor) + g);
    const uint16_t* means = a.means + (map + k) * a.windows();
    float mean[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = by_fours && j % 4 != 0 ? mean[j - 1] : from_bf16(__ldg(means + window[j]));
    if (is_usual(h)) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j][k] = usual_value<bits>(level_of<bits>(eight, j), h, mean[j]);
    } else {
      all_usual = false;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j][k] = value_at(eight >> (bits * j) & ((1u << bits) - 1), h, mean[j]);
    }
  }
  const int64_t at = (static_cast<int64_t>(sample) * a.pixels + g * 8) * a.channels + channel;
#pragma unroll
  for (int j = 0; j < 8; ++j) put_quad<type>(a.x, at + static_cast<int64_t>(j) * a.channels, v[j], all_usual);
}

/// All pixels of a tile of channels a thread block, for maps of any size: codes and means through shared memory.
template <int bits, DType type>
__global__ void __launch_bounds__(kThreads) decode_tile(const __grid_constant__ Args a) {
  extern __shared__ uint4 memory[];  // | means: windows × tile, fp32 | the tile's codes |
  float* mean = reinterpret_cast<float*>(memory);
  const int windows = a.windows(), tile = a.tile(), threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  uint8_t* codes = reinterpret_cast<uint8_t*>(mean + windows * tile);
  const int64_t first_map = static_cast<int64_t>(blockIdx.x) * tile, sample = a.tiles.divide(blockIdx.x);
  const int count = tile / 8 * a.pixels * bits;
  const uint8_t* from = a.codes + first_map / 8 * a.pixels * bits;
  if ((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(count)) % 4 == 0) {
    for (int i = me; i < count / 4; i += threads) {
      reinterpret_cast<uint32_t*>(codes)[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
    }
  } else {
    for (int i = me; i < count; i += threads) codes[i] = __ldg(from + i);
  }
  for (int i = me; i < windows * tile; i += threads) {
    const int channel = static_cast<int>(a.window_count.divide(static_cast<uint32_t>(i)));
    mean[(i - channel * windows) * tile + channel] = from_bf16(__ldg(a.means + first_map * windows + i));
  }
  const int quad = me & ((1 << a.quad_log) - 1);  // threads are a multiple of the quads: each keeps its own
  Header h[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) h[k] = load_header(a.headers, a.header, first_map + 4 * quad + k);
  const bool usual = is_usual(h[0]) && is_usual(h[1]) && is_usual(h[2]) && is_usual(h[3]);
  __syncthreads();
  const int64_t base = sample * a.pixels * a.channels + (first_map - sample * a.channels) + 4 * quad;
  for (int p = me >> a.quad_log; p < a.pixels; p += threads >> a.quad_log) {
    const int row = static_cast<int>(a.width.divide(static_cast<uint32_t>(p)));
    const float4 m = reinterpret_cast<const float4*>(mean)[(a.window_of(row, p - row * a.columns()) << a.quad_log) + quad];
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float own = k == 0 ? m.x : k == 1 ? m.y : k == 2 ? m.z : m.w;
      const uint32_t code = get_code(codes, bits, (4 * quad + k) * a.pixels + p);
      v[k] = usual ? usual_value<bits>(level_of<bits>(code, 0), h[k], own) : value_at(code, h[k], own);
    }
    put_quad<type>(a.x, base + static_cast<int64_t>(p) * a.channels, v, usual);
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

constexpr int64_t kShared = 48 << 10;

/// Channels that make a whole line of 128 bytes, or the most that the sample is a multiple of.
int64_t line_tile(int64_t channels, DType type) {
  int64_t tile = 128 / size_of(type);
  while (channels % tile != 0) tile /= 2;
  return tile;
}

int64_t shared_bytes(const LowPassShape& s, int bits, int64_t tile) { return s.windows() * tile * 4 + tile / 8 * s.map_values() * bits; }

/// The tile of decode_tile; 0 where the maps are too large for it.
int64_t small_tile(const LowPassShape& s, int bits, int64_t channels, DType type) {
  for (int64_t tile = line_tile(channels, type); tile >= 8; tile /= 2) {
    if (shared_bytes(s, bits, tile) <= kShared) return tile;
  }
  return 0;
}

}  // namespace

bool low_pass_last_decodes(const LowPassShape& s, const BlockCode& code, int64_t channels, const void* x, DType type) {
  if (!fits_last(s, code, channels, x)) return false;
  return s.map_values() % 8 == 0 ? s.maps < (int64_t{1} << 36) / s.map_values() : small_tile(s, code.levels.bits, channels, type) > 0;
}

void low_pass_last_decode(const LowPassShape& s, const BlockCode& code, int64_t channels, const uint8_t* codes, const void* headers,
                          const uint16_t* means, void* x, DType type, StreamHandle stream) {
  if (s.maps == 0) return;
  const int64_t pixels = s.map_values();
  const bool groups = pixels % 8 == 0;
  const int64_t tile = groups ? line_tile(channels, type) : small_tile(s, code.levels.bits, channels, type);
  const int quad_log = log2_up(static_cast<int>(tile / 4));
  const Args a = {code.header,
                  codes,
                  headers,
                  means,
                  x,
                  FastDivisor(static_cast<uint32_t>(channels / tile)),
                  FastDivisor(static_cast<uint32_t>(s.width)),
                  FastDivisor(static_cast<uint32_t>(ceil_div(s.width, kWindow))),
                  FastDivisor(static_cast<uint32_t>(ceil_div(pixels, 8))),
                  FastDivisor(static_cast<uint32_t>(s.windows())),
                  static_cast<int>(channels),
                  static_cast<int>(s.height),
                  static_cast<int>(pixels),
                  quad_log,
                  s.maps / 4 * (pixels / 8)};
  const int64_t items = pixels << quad_log;
  const unsigned threads = static_cast<unsigned>(ceil_div(ceil_div(items, ceil_div(items, kThreads)), 32) * 32);
  with_type(type, [&](auto t) {
    with_usual_bits(code.levels.bits, [&](auto bits) {
      if (!groups) {
        const size_t shared = static_cast<size_t>(shared_bytes(s, bits(), tile));
        launch_kernel("low_pass", stream, {grid_size(s.maps / tile), threads, shared}, decode_tile<bits(), t()>, a);
      } else {
        const auto kernel = s.width % 4 == 0 ? decode_groups<bits(), t(), true> : decode_groups<bits(), t(), false>;
        launch_kernel("low_pass", stream, {blocks_for(a.items)}, kernel, a);
      }
    });
  });
}

}  // namespace satchel::cuda
