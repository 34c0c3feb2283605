// Backward of a norm straight from the low-pass code of its input: sums a channel, then the gradients in one pass. Both passes read
// codes, means and mask (an eighth of a gradient's bytes in fp32) instead of keeping what they decode.
#include "satchel/kernels/cuda/channel_sums.cuh"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/kernels/cuda/low_pass_slab.cuh"

namespace satchel::cuda {
namespace slab {
namespace {

constexpr int kBits = 2;
constexpr float kLevels = 1 << kBits;

struct Backward {
  Planes planes;
  HeaderType header;
  const uint8_t* codes;
  const void* headers;
  const uint16_t* means;
  const uint8_t* mask;  // null: all pass
  const void* g;
  NormParameters with;
};

/// x − mean of four channels in a window as fma(1 + code/4, scale, offset): a code stands in the mantissa's first bits.
struct Decoder {
  float scale[4], offset[4];

  __device__ inline Decoder(const Backward& a, const Window& w, const Seat& seat, const float (&mean)[4]) {
    const int64_t map = w.sample * a.planes.channels + seat.channel;
    if (!seat.exists) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Header h = load_header(a.headers, a.header, map + k);  // a poisoned one has the step NaN
      const float window = from_bf16(a.means[(map + k) * a.planes.windows.divisor + w.index]);
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
    if (a.mask != nullptr) {
      const int from = seat.channel - 4 * seat.quad;
      const int64_t first = at - 4 * seat.quad + static_cast<int64_t>(seat.quad) * p.channels;
      on = turn_bits(seat.quad < columns && from < p.channels ? read_bits(a.mask, first, p.channels, min(kSlab, p.channels - from)) : 0u);
    }
    const int64_t map = w.sample * p.channels + seat.channel;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (count > 0) codes[k] = codes_from_value<whole_groups>(a.codes, (map + k) * p.pixels() + (w.row + line) * p.width + w.column);
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
      make_float2(static_cast<float>(total.x), static_cast<float>(total.y * a.with.rstd[channel]));
}

template <DType type, bool whole_groups>
__global__ void __launch_bounds__(kWarps * 32, kSlabBack.each) sum_windows(const __grid_constant__ Backward a, float2* partial) {
  const Planes& p = a.planes;
  const Seat seat(p);
  float mean[4], sum_g[4] = {}, sum_gx[4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) mean[k] = seat.exists ? a.with.mean[seat.channel + k] : 0.0f;
  for_units(p, [&](uint32_t unit) {
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

struct Outputs {
  const float *sum_g, *sum_gx;
  float share;  // 1 / rows
  void *g_skip, *dx;
};

/// Four channels: dx = along·(x − mean) + slope·gz + offset.
struct Line {
  float mean[4], slope[4], along[4], offset[4];

  __device__ inline Line(const Backward& a, const Outputs& o, const Seat& seat) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int c = seat.channel + k;
      const float rstd = seat.exists ? a.with.rstd[c] : 0.0f;
      mean[k] = seat.exists ? a.with.mean[c] : 0.0f;
      slope[k] = seat.exists ? a.with.gamma[c] * rstd : 0.0f;
      along[k] = seat.exists ? -(slope[k] * rstd) * (o.sum_gx[c] * o.share) : 0.0f;
      offset[k] = seat.exists ? -slope[k] * (o.sum_g[c] * o.share) : 0.0f;
    }
  }
};

template <DType type, bool whole_groups>
__global__ void __launch_bounds__(kWarps * 32, kSlabBack.each)
    back_windows(const __grid_constant__ Backward a, const __grid_constant__ Outputs o) {
  const Planes& p = a.planes;
  const Seat seat(p);
  const Line own(a, o, seat);
  for_units(p, [&](uint32_t unit) {
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
      const Pixels<type> g_skip(o.g_skip, line.at, p.channels), to_x(o.dx, line.at, p.channels);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= line.count) continue;
        float passed[4], dx[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          passed[k] = line.passed(j, k);
          dx[k] = fmaf(own.slope[k], passed[k], fmaf(level_of<kBits>(line.codes[k], j), decoder.scale[k], decoder.offset[k]));
        }
        if (o.g_skip != nullptr) g_skip.write(j, passed);
        if (o.dx != nullptr) to_x.write(j, dx);
      }
    }
  });
}

Backward backward_of(const NormLowPassCode& code, const void* g, const float* gamma) {
  const LowPassParts& from = code.parts;
  const NormParameters with = {code.mean, code.rstd, gamma, nullptr};
  return {Planes(from.maps, from.channels), from.code.header, from.codes, from.headers, from.means, code.on, g, with};
}

/// Do lines of windows start where groups of codes do?
bool has_whole_groups(const LowPassShape& s) { return s.width % 8 == 0; }

void check(const LowPassParts& from, DType type, const void* g, const char* op) {
  if (!norm_low_pass_fits(from, type)) fail(op, "norm_low_pass_fits must be true of the code");
  if (!is_aligned(from.codes) || !is_aligned(from.headers) || !is_aligned(g)) {
    fail(op, "codes, headers and activations must start at a multiple of 16");
  }
}

}  // namespace
}  // namespace slab

void norm_sums(const NormLowPassCode& code, const void* g, DType type, const NormSums& to, void* scratch, StreamHandle stream) {
  using namespace slab;
  constexpr const char* op = "norm_low_pass_sums";
  const LowPassParts& from = code.parts;
  check(from, type, g, op);
  const Backward a = backward_of(code, g, nullptr);
  const auto s = static_cast<cudaStream_t>(stream);
  float2* partial = static_cast<float2*>(scratch);
  const dim3 grid = a.planes.grid(kSlabBack);
  with_type(type, [&](auto t) {
    if (has_whole_groups(from.maps)) {
      sum_windows<t(), true><<<grid, kWarps * 32, 0, s>>>(a, partial);
    } else {
      sum_windows<t(), false><<<grid, kWarps * 32, 0, s>>>(a, partial);
    }
  });
  check_launch(op);
  const int64_t entries = a.planes.parts(kSlabBack) * from.channels;
  finish_sums<<<finish_blocks(from.channels), kFinishThreads, 0, s>>>(partial, entries, from.channels, to.beta, to.gamma);
  check_launch(op);
}

void norm_back(const NormLowPassCode& code, const NormBack& back, StreamHandle stream) {
  using namespace slab;
  constexpr const char* op = "norm_low_pass_back";
  const LowPassParts& from = code.parts;
  check(from, back.type, back.g, op);
  for (const void* p : {back.skip, back.x}) {
    if (!is_aligned(p)) fail(op, "activations must start at a multiple of 16");
  }
  const Backward a = backward_of(code, back.g, back.gamma);
  const auto rows = static_cast<double>(from.maps.maps / from.channels * from.maps.map_values());
  const Outputs o = {back.sum_g, back.sum_gx, static_cast<float>(1 / rows), back.skip, back.x};
  const auto s = static_cast<cudaStream_t>(stream);
  const dim3 grid = a.planes.free_grid(kSlabBack);
  with_type(back.type, [&](auto t) {
    if (has_whole_groups(from.maps)) {
      back_windows<t(), true><<<grid, kWarps * 32, 0, s>>>(a, o);
    } else {
      back_windows<t(), false><<<grid, kWarps * 32, 0, s>>>(a, o);
    }
  });
  check_launch(op);
}

}  // namespace satchel::cuda
