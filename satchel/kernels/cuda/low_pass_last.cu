// DIVISION's two frequencies of channels_last maps, to the bit what low_pass.cu does for maps one after the other.
//
// A thread block has all pixels of `tile` neighbouring channels of one sample. A thread reads one line of one window (8 pixels)
// for 4 channels; lanes 1, 2 and 4 rows apart add the lines up as the window's tree of sums does. The rest's least and most are
// those of the window less its mean, because rounding keeps order: one look at x gives means and headers. The codes come from a
// copy of the tile in shared memory that stands in the coding order (channel after channel). Maps too large for that are read twice
// (low_pass_stream.h).
#include "satchel/kernels/cuda/low_pass_stream.h"
#include "satchel/kernels/cuda/low_pass_tile.cuh"

namespace satchel::cuda {
namespace {

/// lines: the tile in shared memory, codes from quads of it; values: the same for maps of any size; stream: x is read twice.
enum class Form { lines, values, stream };

struct Args : Tile {
  const void* x;
  int low_log, high_log;  // quads of a pixel in one warp, and such parts of the tile
};

/// One line of a window: where it starts and how long it is.
struct Line {
  int quad, window, row, column, count;  // count 0: there is none

  __device__ Line(const Args& a, int item) {
    const int low = item & ((1 << a.low_log) - 1), r = item >> a.low_log & 7, rest = item >> (a.low_log + 3);
    quad = (rest & ((1 << a.high_log) - 1)) << a.low_log | low;
    window = rest >> a.high_log;
    const int down = static_cast<int>(a.across.divide(static_cast<uint32_t>(window)));
    row = down * kWindow + r;
    column = (window - down * static_cast<int>(a.across.divisor)) * kWindow;
    count = window < a.windows && row < a.height ? min(kWindow, a.columns() - column) : 0;
  }
};

/// 8 cells of one channel into the tile.
template <DType type, Form form>
__device__ inline void put_line(Cell<type>* to, const Quad<type> (&q)[8], int k, int count) {
  if constexpr (form == Form::lines) {  // lines start at multiples of 4 and are 4 or 8 long
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (4 * h >= count) break;
      Quad<type> four;
      if constexpr (type == DType::f32) {
        four = make_float4(cell_of<type>(q[4 * h], k), cell_of<type>(q[4 * h + 1], k), cell_of<type>(q[4 * h + 2], k),
                           cell_of<type>(q[4 * h + 3], k));
      } else {
        const auto two = [&](int j) { return cell_of<type>(q[j], k) | static_cast<uint32_t>(cell_of<type>(q[j + 1], k)) << 16; };
        four = make_uint2(two(4 * h), two(4 * h + 2));
      }
      *reinterpret_cast<Quad<type>*>(to + 4 * h) = four;
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) to[j] = cell_of<type>(q[j], k);
    }
  }
}

/// Means of all windows of the tile, and what is least and most of the rest in each. `base` is the tile's first value in x.
template <DType type, Form form>
__device__ inline void measure_windows(const Args& a, const Shared<type>& shared, int64_t base, int64_t first_map) {
  const int items = a.windows << (a.low_log + 3 + a.high_log), stride = static_cast<int>(blockDim.x);
  const int lane_step = 1 << a.low_log;
  for (int item = static_cast<int>(threadIdx.x); (item & ~31) < items; item += stride) {  // whole warps: lanes add up
    const Line line(a, item);
    const int at = line.row * a.columns() + line.column;
    Quad<type> q[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < line.count) q[j] = load_quad<type>(a.x, base + static_cast<int64_t>(at + j) * a.channels + 4 * line.quad);
    }
    const int rows = min(kWindow, a.height - (line.row & ~7)), columns = min(kWindow, a.columns() - line.column);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float v[8];
      Extremes e;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = j < line.count ? number_of<type>(cell_of<type>(q[j], k)) : 0.0f;
        if (j < line.count) e.add(v[j]);
      }
      float sum = tree8(v);
#pragma unroll
      for (int o = 1; o < 8; o *= 2) {
        sum += __shfl_xor_sync(~0u, sum, o * lane_step);
        e.least = min_nan(e.least, __shfl_xor_sync(~0u, e.least, o * lane_step));
        e.most = max_nan(e.most, __shfl_xor_sync(~0u, e.most, o * lane_step));
      }
      const int channel = 4 * line.quad + k;
      if (line.count > 0) put_line<type, form>(shared.cells + channel * a.pitch + at, q, k, line.count);
      if (line.count == 0 || line.row % kWindow != 0) continue;
      const uint16_t m = to_bf16(flush(sum / static_cast<float>(rows * columns)));
      const float mean = from_bf16(m);
      a.means[(first_map + channel) * a.windows + line.window] = m;
      shared.mean[channel * a.windows + line.window] = mean;
      shared.least[channel * a.windows + line.window] = e.least - mean;
      shared.most[channel * a.windows + line.window] = e.most - mean;
    }
  }
}

/// Means of pixels p … p + 3 and p + 4 … p + 7 of a channel; rows are multiples of 4 wide.
__device__ inline float2 two_means(const Args& a, const float* mean, int p) {
  const int across = static_cast<int>(a.across.divisor);
  const int row = static_cast<int>(a.width.divide(static_cast<uint32_t>(p))), column = p - row * a.columns();
  const int next_row = column + 4 == a.columns() ? row + 1 : row, next = next_row == row ? column + 4 : 0;
  return make_float2(mean[row / kWindow * across + column / kWindow], mean[next_row / kWindow * across + next / kWindow]);
}

/// Maps are multiples of 8 values and their rows of 4.
template <int bits, DType type>
__device__ inline void encode_lines(const Args& a, const Shared<type>& shared, UniformSeed seed, int64_t first_group) {
  const int groups = a.tile * (a.pixels() / 8);
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += static_cast<int>(blockDim.x)) {
    const Words noise = group_noise(seed, a.code.rounding, first_group + g);
    const int channel = static_cast<int>(a.map.divide(static_cast<uint32_t>(g) * 8)), p = g * 8 - channel * a.pixels();
    const float2 mean = two_means(a, shared.mean + channel * a.windows, p);
    float v[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Quad<type> q = *reinterpret_cast<const Quad<type>*>(shared.cells + g * 8 + 4 * h);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[4 * h + j] = number_of<type>(cell_of<type>(q, j)) - (h == 0 ? mean.x : mean.y);
    }
    store_codes<bits>(a.codes, first_group + g, encode8<bits, true>(v, shared.rulers[channel], a.code.levels, noise), 8);
  }
}

constexpr int kMostThreads = 512;

template <int bits, DType type, Form form>
__global__ void __launch_bounds__(kMostThreads, 2) encode_tile(const __grid_constant__ Args a) {
  extern __shared__ uint4 memory[];
  const Shared<type> shared(memory, a);
  const UniformSeed seed(a.seed);
  const int64_t first_map = static_cast<int64_t>(blockIdx.x) * a.tile, sample = a.tiles.divide(blockIdx.x);
  const int64_t base = sample * a.pixels() * a.channels + (first_map - sample * a.channels);
  measure_windows<type, form>(a, shared, base, first_map);
  __syncthreads();
  make_rulers<bits, type>(a, shared, first_map);
  __syncthreads();
  const int64_t first_group = first_map * a.pixels() / 8;  // tiles are multiples of 8 maps: whole groups
  if constexpr (form == Form::lines) encode_lines<bits, type>(a, shared, seed, first_group);
  if constexpr (form == Form::values) encode_values<bits, type>(a, shared, seed, first_group);
}

// ---- launch ----------------------------------------------------------------------------------------------------------

struct Choice {
  Form form = Form::stream;
  int tile = 0, pitch = 0;
  int64_t cells = 0, bytes = 0;  // of shared memory: the tile, and all
};

constexpr int64_t kLargeMap = 512;  // values from which on two reads of whole lines of memory cost less than one of sectors

/// The largest tile of at most 64 channels that stays small, else whole sectors (32 bytes a pixel); large maps, and those without a
/// place for these, are read twice where that is possible. Tile 0 in another form: none of these serves.
Choice choose(const LowPassShape& s, int64_t channels, DType type) {
  const bool by_lines = s.width % 4 == 0 && s.map_values() % 8 == 0, streams = low_pass_streams(s);
  const int sector = static_cast<int>(32 / size_of(type)), least = channels % sector == 0 ? sector : 8;
  const int64_t pitch = by_lines ? s.map_values() : s.map_values() | 1, most = most_shared();
  const auto made = [&](int tile) {
    Choice c{by_lines ? Form::lines : Form::values, tile, static_cast<int>(pitch), align_up(tile * pitch * size_of(type)), 0};
    c.bytes = c.cells + shared_after_cells(tile, s.windows());
    return c;
  };
  if (streams && s.map_values() >= kLargeMap) return {};
  if (!by_lines && s.windows() > kMostWindows) return streams ? Choice{} : Choice{Form::values};
  for (int tile = 64; tile > least; tile /= 2) {
    if (const Choice c = made(tile); channels % tile == 0 && c.bytes <= less_of(kSmallTile, most)) return c;
  }
  if (const Choice c = made(least); c.bytes <= most) return c;
  return streams ? Choice{} : Choice{Form::values};
}

template <int bits, DType type, Form form>
void launch(const Args& a, const Choice& c, unsigned blocks, StreamHandle stream) {
  allow_shared(reinterpret_cast<const void*>(encode_tile<bits, type, form>), c.bytes, "low_pass");
  const int64_t items = static_cast<int64_t>(a.windows) * 8 * (c.tile / 4), turns = ceil_div(items, kMostThreads);
  const unsigned threads = static_cast<unsigned>(ceil_div(ceil_div(items, turns), 32) * 32);
  launch_kernel("low_pass", stream, {blocks, threads, static_cast<size_t>(c.bytes)}, encode_tile<bits, type, form>, a);
}

bool is_served(const Choice& c) { return c.form == Form::stream || c.tile > 0; }

void encode_stream(const LowPassParts& to, const void* x, DType type, const uint64_t* seed, void* scratch, StreamHandle stream) {
  low_pass_stream_measure(to, x, type, nullptr, scratch, stream);
  low_pass_stream_encode(to, x, type, {nullptr, {}, nullptr, nullptr}, seed, stream);
}

}  // namespace

bool low_pass_last_encodes(const LowPassShape& s, const BlockCode& code, int64_t channels, const void* x, DType type) {
  return fits_last(s, code, channels, x) && s.map_values() >= 8 && is_served(choose(s, channels, type));
}

int64_t low_pass_last_scratch_bytes(const LowPassShape& s, int64_t channels, DType type) {
  return s.maps > 0 && choose(s, channels, type).form == Form::stream ? low_pass_stream_scratch_bytes(s, channels, false) : 0;
}

void low_pass_last_encode(const LowPassShape& s, const BlockCode& code, int64_t channels, const void* x, DType type, const uint64_t* seed,
                          uint8_t* codes, void* headers, uint16_t* means, void* scratch, StreamHandle stream) {
  if (code.grid.values == 0) return;
  const Choice c = choose(s, channels, type);
  const LowPassParts to = {s, code, channels, codes, headers, means};
  if (c.form == Form::stream) return encode_stream(to, x, type, seed, scratch, stream);
  const int quads = c.tile / 4, low = quads < 4 ? quads : 4;
  const Args a = {{to, seed, c.tile, c.pitch, c.cells}, x, log2_up(low), log2_up(quads / low)};
  const unsigned blocks = grid_size(s.maps / c.tile);
  with_type(type, [&](auto t) {
    with_usual_bits(code.levels.bits, [&](auto bits) {
      if (c.form == Form::lines) return launch<bits(), t(), Form::lines>(a, c, blocks, stream);
      return launch<bits(), t(), Form::values>(a, c, blocks, stream);
    });
  });
}

}  // namespace satchel::cuda
