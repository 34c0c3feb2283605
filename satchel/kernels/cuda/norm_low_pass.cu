// A norm and the low-pass code of its input. Forward takes two reads of the input for output, mask and code. Large planes:
// low_pass_stream.h. Small ones, whose maps fit shared memory: column_moments(), then one read for all the rest, as low_pass_last.cu codes
// them. Backward takes sums a channel, then the gradients in one pass, both straight from codes, means and mask (an eighth of a gradient's
// bytes in fp32) instead of keeping what they decode.
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/low_pass_slab.cuh"
#include "satchel/kernels/cuda/low_pass_tile.cuh"

namespace satchel::cuda {
namespace slab {
namespace {

constexpr int kBits = 2;
constexpr float kLevels = 1 << kBits;
constexpr int kTakers = 8;          // warps of a thread block, at most
constexpr int64_t kLargeMap = 512;  // values from which on two reads serve, where they can

struct Small {
  Tile tile;
  Planes planes;
  StreamNorm norm;
  const void* x;
};

/// A window of a slab of the tile: z and mask to memory, cells, means and extremes to shared memory. All lanes take part.
template <DType type, Then then>
__device__ inline void take_window(const Small& a, const Shared<type>& shared, const Window& w, int first_channel, int slab) {
  const Planes& p = a.planes;
  const int quad = static_cast<int>(threadIdx.x) % 8, pair = static_cast<int>(threadIdx.x) % 32 / 8;
  const int own = slab * kSlab + 4 * quad, channel = first_channel + own;  // in the tile, in the sample
  const bool exists = own < a.tile.tile;
  const Folded norm(a.norm.with, channel, exists);
  Gathered none;
  const WindowMean mean = measure_window<type, false>(w, pair, exists, none, [&](int line, int columns, int n, Quad<type>(&q)[8]) {
    const int64_t at = w.at(p, line, channel);
    Quad<type> skip[8];
    read_line<type>({a.x, at, p.channels}, n, q);
    if constexpr (then == Then::add) read_line<type>({a.norm.skip, at, p.channels}, n, skip);
    const Pixels<type> z(a.norm.z, at, p.channels);
    uint32_t on = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < n) on |= write_norm<type, then>(norm, q[j], skip[j], z, j) << (4 * j);
    }
    if constexpr (then != Then::norm) {
      on = turn_bits(on);
      const int64_t first = at - 4 * quad + static_cast<int64_t>(quad) * p.channels;  // of pixel `quad`, the slab's first channel
      if (quad < columns) write_bits(a.norm.mask, first, p.channels, min(kSlab, a.tile.tile), on);
    }
    const int pixel = (w.row + line) * p.width + w.column;
    if (n == 0) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < n) shared.cells[(own + k) * a.tile.pitch + pixel + j] = cell_of<type>(q[j], k);
      }
    }
  });
  if (!exists) return;
  const int at = (own + own_channel(pair)) * a.tile.windows + w.index;
  a.tile.means[(w.sample * p.channels + first_channel) * a.tile.windows + at] = mean.mean;
  shared.mean[at] = from_bf16(mean.mean);
  shared.least[at] = mean.rest.least;
  shared.most[at] = mean.rest.most;
}

template <DType type, Then then>
__global__ void __launch_bounds__(kTakers * 32, then == Then::add ? 2 : 3) encode_small(const __grid_constant__ Small a) {
  extern __shared__ uint4 memory[];
  const Tile& tile = a.tile;
  const Shared<type> shared(memory, tile);
  const UniformSeed seed(tile.seed);
  const int64_t first_map = static_cast<int64_t>(blockIdx.x) * tile.tile;
  const uint32_t sample = tile.tiles.divide(blockIdx.x);
  const int first_channel = static_cast<int>(first_map - static_cast<int64_t>(sample) * tile.channels);
  const int slabs = (tile.tile + kSlab - 1) / kSlab, warps = static_cast<int>(blockDim.x / 32);
  for (int item = static_cast<int>(threadIdx.x / 32); item < tile.windows * slabs; item += warps) {
    const int window = item / slabs;
    take_window<type, then>(a, shared, Window(a.planes, sample * a.planes.windows.divisor + static_cast<uint32_t>(window)), first_channel,
                            item - window * slabs);
  }
  __syncthreads();
  make_rulers<kBits, type>(tile, shared, first_map);
  __syncthreads();
  encode_values<kBits, type>(tile, shared, seed, first_map * tile.pixels() / 8);  // tiles are multiples of 8 maps: whole groups
}

// ---- backward --------------------------------------------------------------------------------------------------------

struct Backward {
  NormLowPassCode c;
  const void* g;
  Planes planes = {c.parts.maps, c.parts.channels};
};

/// x − mean of four channels in a window as fma(1 + code/4, scale, offset): a code stands in the mantissa's first bits.
struct Decoder {
  float scale[4], offset[4];

  __device__ inline Decoder(const Backward& a, const Window& w, const Seat& seat, const float (&mean)[4]) {
    const int64_t map = w.sample * a.planes.channels + seat.channel;
    if (!seat.exists) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Header h = load_header(a.c.parts.headers, a.c.parts.code.header, map + k);  // a poisoned one has the step NaN
      const float window = from_bf16(a.c.parts.means[(map + k) * a.planes.windows.divisor + w.index]);
      scale[k] = h.step * kLevels;
      offset[k] = (window - mean[k]) + (h.low - scale[k]);
    }
  }
};

/// Codes of the eight pixels from value i of the maps on; what follows the last code of all is read where i is near the end, not used.
template <bool whole_groups>
__device__ inline uint32_t codes_from_value(const uint8_t* codes, int64_t i) {
  if constexpr (whole_groups) return reinterpret_cast<const uint16_t*>(codes)[i / 8];
  const uint32_t* words = reinterpret_cast<const uint32_t*>(codes) + i * kBits / 32;
  return __funnelshift_r(words[0], words[1], static_cast<uint32_t>(i * kBits) & 31);
}

/// One line of a window: g, what the mask lets pass, and codes.
template <DType type, bool whole_groups>
struct GradientLine {
  Quad<type> g[8];
  uint32_t on;  // bit 4·j + k: pixel j of channel k passes
  uint32_t codes[4];
  int64_t at;
  int count;  // pixels

  /// All lanes take part.
  __device__ inline GradientLine(const Backward& a, const Window& w, const Seat& seat, int line) {
    const Planes& p = a.planes;
    const int columns = line < w.rows ? w.columns : 0;
    at = w.at(p, line, seat.channel);
    count = seat.exists ? columns : 0;
    read_line<type>({a.g, at, p.channels}, count, g);
    on = ~0u;
    if (a.c.on != nullptr) {
      const int from = seat.channel - 4 * seat.quad;
      const int64_t first = at - 4 * seat.quad + static_cast<int64_t>(seat.quad) * p.channels;
      on = turn_bits(seat.quad < columns && from < p.channels ? read_bits(a.c.on, first, p.channels, min(kSlab, p.channels - from)) : 0u);
    }
    const int64_t map = w.sample * p.channels + seat.channel;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (count > 0)
        codes[k] = codes_from_value<whole_groups>(a.c.parts.codes, (map + k) * p.pixels() + (w.row + line) * p.width + w.column);
    }
  }
  __device__ inline float passed(int j, int k) const {
    const float own = value_of_cell<type>(cell_of<type>(g[j], k));
    return (on >> (4 * j + k) & 1) != 0 ? own : 0.0f;
  }
};

/// Sums of the threads that have the same channels, in double and always in the same order.
__device__ inline void add_up_block(const Backward& a, const float (&sum_g)[4], const float (&sum_gx)[4], float2* partial) {
  __shared__ float2 shared[kWarps * 32 * 4];
  const Planes& p = a.planes;
  const int me = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int k = 0; k < 4; ++k) shared[me * 4 + k] = make_float2(sum_g[k], sum_gx[k]);
  __syncthreads();
  const int slab = me / kSlab, channel = (static_cast<int>(blockIdx.x << p.log) + slab) * kSlab + me % kSlab;
  if (slab >= 1 << p.log || channel >= p.channels) return;
  double2 total = make_double2(0, 0);
  for (int s = 0; s < p.sides() * 4; ++s) {  // side and pair
    const float2 own = shared[((slab + (s / 4 << p.log)) * 32 + s % 4 * 8 + me % kSlab / 4) * 4 + me % 4];
    total.x += own.x, total.y += own.y;
  }
  partial[blockIdx.y * static_cast<int64_t>(p.channels) + channel] =
      make_float2(static_cast<float>(total.x), static_cast<float>(total.y * a.c.rstd[channel]));
}

template <DType type, bool whole_groups>
__global__ void __launch_bounds__(kWarps * 32, kSlabBack.each) sum_windows(const __grid_constant__ Backward a, float2* partial) {
  const Planes& p = a.planes;
  const Seat seat(p);
  float mean[4], sum_g[4] = {}, sum_gx[4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) mean[k] = seat.exists ? a.c.mean[seat.channel + k] : 0.0f;
  for_neighbours(p, [&](uint32_t unit) {
    const Window w(p, p.units - 1 - unit);
    const Decoder decoder(a, w, seat, mean);
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const GradientLine<type, whole_groups> line(a, w, seat, 2 * seat.pair + h);
      if (line.count == 0) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {  // pixels that do not exist have the gradient 0
          const float g = line.passed(j, k);
          sum_g[k] += g;
          sum_gx[k] = fmaf(g, fmaf(level_of<kBits>(line.codes[k], j), decoder.scale[k], decoder.offset[k]), sum_gx[k]);
        }
      }
    }
  });
  add_up_block(a, sum_g, sum_gx, partial);
}

/// Four channels: dx = along·(x − mean) + slope·gz + offset.
struct Line {
  float mean[4], slope[4], along[4], offset[4];

  /// `inverse` is 1/N.
  __device__ inline Line(const Backward& a, const NormBack& o, float inverse, const Seat& seat) {
    if (!seat.exists) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int c = seat.channel + k;
      mean[k] = a.c.mean[c];
      slope[k] = o.gamma[c] * a.c.rstd[c];
      along[k] = -(slope[k] * a.c.rstd[c]) * (o.sum_gx[c] * inverse);
      offset[k] = -slope[k] * (o.sum_g[c] * inverse);
    }
  }
};

template <DType type, bool whole_groups>
__global__ void __launch_bounds__(kWarps * 32, kSlabBack.each)
    back_windows(const __grid_constant__ Backward a, const __grid_constant__ NormBack o, float inverse) {
  const Planes& p = a.planes;
  const Seat seat(p);
  const Line own(a, o, inverse, seat);
  for_neighbours(p, [&](uint32_t unit) {
    const Window w(p, unit);
    Decoder decoder(a, w, seat, own.mean);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      decoder.offset[k] = fmaf(own.along[k], decoder.offset[k], own.offset[k]);
      decoder.scale[k] = own.along[k] * decoder.scale[k];
    }
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const GradientLine<type, whole_groups> line(a, w, seat, 2 * seat.pair + h);
      const Pixels<type> g_skip(o.skip, line.at, p.channels), to_x(o.x, line.at, p.channels);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= line.count) continue;
        float passed[4], dx[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          passed[k] = line.passed(j, k);
          dx[k] = fmaf(own.slope[k], passed[k], fmaf(level_of<kBits>(line.codes[k], j), decoder.scale[k], decoder.offset[k]));
        }
        if (o.skip != nullptr) g_skip.write(j, passed);
        if (o.x != nullptr) to_x.write(j, dx);
      }
    }
  });
}

// ---- launch ----------------------------------------------------------------------------------------------------------

struct Choice {
  int tile = 0;  // 0: none serves
  int64_t cells = 0, bytes = 0;
};

Choice choose(const LowPassShape& s, int64_t channels, DType type) {
  const auto made = [&](int tile) {
    Choice c{tile, align_up(tile * (s.map_values() | 1) * size_of(type)), 0};
    c.bytes = c.cells + shared_after_cells(tile, s.windows());
    return c;
  };
  int least = 8;
  while (least < kSlab && channels % (2 * least) == 0) least *= 2;
  Choice best = made(least);
  if (best.bytes > most_shared() || s.windows() > kMostWindows) return {};
  for (int tile = 2 * least; least == kSlab && tile <= 4 * kSlab && channels % tile == 0; tile *= 2) {
    if (const Choice c = made(tile); tile / kSlab * s.windows() <= kTakers && c.bytes <= kSmallTile) best = c;
  }
  return best;
}

bool is_large(const LowPassShape& s) { return low_pass_streams(s) && s.map_values() >= kLargeMap; }

void encode_small_maps(const char* op, const LowPassParts& to, const NormPass& pass, const StreamNorm& norm, const uint64_t* seed,
                       StreamHandle stream) {
  const Choice c = choose(to.maps, to.channels, pass.type);
  const Small a = {{to, seed, c.tile, to.maps.map_values() | 1, c.cells}, Planes(to.maps, to.channels), norm, pass.x};
  const int items = a.tile.windows * ((c.tile + kSlab - 1) / kSlab), warps = items < kTakers ? items : kTakers;
  const LaunchSize size = {grid_size(to.maps.maps / c.tile), static_cast<unsigned>(warps) * 32, static_cast<size_t>(c.bytes)};
  with_type(pass.type, [&](auto t) {
    with_then(norm, [&](auto then) {
      if constexpr (then() != Then::nothing) {
        allow_shared(reinterpret_cast<const void*>(encode_small<t(), then()>), c.bytes, op);
        launch_kernel(op, stream, size, encode_small<t(), then()>, a);
      }
    });
  });
}

/// Do lines of windows start where groups of codes do?
bool has_whole_groups(const LowPassShape& s) { return s.width % 8 == 0; }

void check_fit(const LowPassParts& parts, DType type, const char* op) {
  if (!norm_low_pass_fits(parts, type)) fail(op, "norm_low_pass_fits must be true of the code");
  check_aligned({parts.codes, parts.headers}, op);
}

}  // namespace
}  // namespace slab

using namespace slab;

bool norm_low_pass_fits(const LowPassParts& to, DType type) {
  const LowPassShape& s = to.maps;
  if (s.maps == 0 || to.code.levels.bits != kBits || !fits_last(s, to.code, to.channels, nullptr)) return false;
  if (s.map_values() < 8 || s.maps / to.channels * s.map_values() >= int64_t{1} << 24) return false;
  return is_large(s) || (s.maps * s.windows() < int64_t{1} << 31 && choose(s, to.channels, type).tile > 0);
}

int64_t norm_low_pass_scratch_bytes(const LowPassParts& to) {
  const int64_t sums = Planes(to.maps, to.channels).parts(kSlabBack) * to.channels * static_cast<int64_t>(sizeof(float2));
  return more_of(sums, more_of(low_pass_stream_scratch_bytes(to.maps, to.channels, true), column_moments_scratch_bytes(to.channels)));
}

void norm_low_pass_measure(const LowPassParts& to, const void* x, DType type, const Moments& moments, void* scratch, StreamHandle stream) {
  check_fit(to, type, "norm_low_pass_measure");
  if (is_large(to.maps)) return low_pass_stream_measure(to, x, type, &moments, scratch, stream);
  column_moments(x, type, to.maps.maps / to.channels * to.maps.map_values(), to.channels, moments, scratch, stream);
}

void norm_encode(const NormLowPassCode& code, const NormPass& pass, const uint64_t* seed, StreamHandle stream) {
  constexpr const char* op = "norm_low_pass_encode";
  const LowPassParts& to = code.parts;
  check_fit(to, pass.type, op);
  check_aligned({pass.x, pass.skip, pass.z}, op);
  if (code.on == nullptr && pass.skip != nullptr) fail(op, "a sum must have a mask");
  const StreamNorm norm = {pass.skip, pass.with, code.on, pass.z};
  if (is_large(to.maps)) return low_pass_stream_encode(to, pass.x, pass.type, norm, seed, stream);
  encode_small_maps(op, to, pass, norm, seed, stream);
}

void norm_sums(const NormLowPassCode& code, const NormSums& o, StreamHandle stream) {
  constexpr const char* op = "norm_low_pass_sums";
  const LowPassParts& from = code.parts;
  check_fit(from, o.type, op);
  check_aligned({o.g}, op);
  const Backward a = {code, o.g};
  float2* partial = static_cast<float2*>(o.scratch);
  with_values(o.type, has_whole_groups(from.maps), [&](auto t, auto whole) {
    launch_kernel(op, stream, {a.planes.grid(kSlabBack), kWarps * 32}, sum_windows<t(), whole()>, a, partial);
  });
  finish_sums(op, partial, a.planes.parts(kSlabBack) * from.channels, from.channels, o.beta, o.gamma, stream);
}

void norm_back(const NormLowPassCode& code, const NormBack& back, StreamHandle stream) {
  constexpr const char* op = "norm_low_pass_back";
  const LowPassParts& from = code.parts;
  check_fit(from, back.type, op);
  check_aligned({back.g, back.skip, back.x}, op);
  const Backward a = {code, back.g};
  const auto rows = static_cast<double>(from.maps.maps / from.channels * from.maps.map_values());
  with_values(back.type, has_whole_groups(from.maps), [&](auto t, auto whole) {
    launch_kernel(op, stream, {a.planes.free_grid(kSlabBack), kWarps * 32}, back_windows<t(), whole()>, a, back,
                  static_cast<float>(1 / rows));
  });
}

}  // namespace satchel::cuda
