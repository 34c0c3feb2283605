// First read of planes that are coded in two: window means, extremes of the rest window by window, and moments of the channels, all from
// one look at x. Windows are read from the last to the first, so that the second read finds the first ones in the cache. What is merged
// with what depends on sizes alone.
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/low_pass_slab.cuh"
#include "satchel/kernels/cuda/low_pass_stream.h"

namespace satchel::cuda {
namespace slab {
namespace {

constexpr int kSlices = 8;         // of a map's windows, in the kernel that makes headers
constexpr int kFinishSlices = 32;  // of the parts, in the one that ends the moments

/// Moments of a part of the rows.
struct alignas(16) Part {
  float count, mean, squares, unused;
};

struct Measure {
  Planes planes;
  const void* x;
  uint16_t* means;
  float2* extremes;  // sample × window × channel
  Part* parts;       // part × channel
};

/// Threads of a block that have the same channels become one part.
__device__ inline void merge_block(const Measure& a, const Gathered& own) {
  __shared__ float count[kWarps * 32], mean[kWarps * 32 * 4], squares[kWarps * 32 * 4];
  const Planes& p = a.planes;
  const int me = static_cast<int>(threadIdx.x);
  count[me] = own.count;
#pragma unroll
  for (int k = 0; k < 4; ++k) mean[me * 4 + k] = own.mean[k], squares[me * 4 + k] = own.squares[k];
  __syncthreads();
  const int slab = me / kSlab, channel = (static_cast<int>(blockIdx.x << p.log) + slab) * kSlab + me % kSlab;
  if (slab >= 1 << p.log || channel >= p.channels) return;
  const auto thread = [&](int s) { return (slab + (s / 4 << p.log)) * 32 + s % 4 * 8 + me % kSlab / 4; };  // s: side and pair
  Merge all(mean[thread(0) * 4 + me % 4]);  // a part has a window for its first side, and that has a first row
  for (int s = 0; s < p.sides() * 4; ++s) {
    const int t = thread(s);
    if (count[t] > 0.0f) all.add(count[t], mean[t * 4 + me % 4], squares[t * 4 + me % 4]);
  }
  a.parts[blockIdx.y * static_cast<int64_t>(p.channels) + channel] = {static_cast<float>(all.count), static_cast<float>(all.mean()),
                                                                      static_cast<float>(all.square()), 0.0f};
}

template <DType type, bool moments>
__global__ void __launch_bounds__(kWarps * 32, kSlabMeasure.each) measure_windows(const __grid_constant__ Measure a) {
  const Planes& p = a.planes;
  const Seat seat(p);
  Gathered gathered;
  for_units(p, [&](uint32_t unit) {
    const Window w(p, p.units - 1 - unit);
    const WindowMean own = measure_window<type, moments>(w, seat.pair, seat.exists, gathered, [&](int line, int, int n, Quad<type>(&q)[8]) {
      read_line<type>({a.x, w.at(p, line, seat.channel), p.channels}, n, q);
    });
    if (!seat.exists) return;
    const int64_t map = w.sample * p.channels + seat.channel + own_channel(seat.pair);
    a.means[map * p.windows.divisor + w.index] = own.mean;
    a.extremes[(w.sample * p.windows.divisor + w.index) * p.channels + seat.channel + own_channel(seat.pair)] =
        make_float2(own.rest.least, own.rest.most);
  });
  if constexpr (moments) merge_block(a, gathered);
}

/// A thread block makes the headers of 32 channels of a sample, a thread a channel and slice of its windows.
template <int bits>
__global__ void __launch_bounds__(kSlab* kSlices)
    make_headers(const __grid_constant__ Planes p, const float2* extremes, HeaderType header, void* headers) {
  __shared__ float2 shared[kSlices][kSlab];
  const int lane = static_cast<int>(threadIdx.x) % kSlab, slice = static_cast<int>(threadIdx.x) / kSlab;
  const int64_t sample = blockIdx.x / static_cast<unsigned>(p.slabs());
  const int channel = static_cast<int>(blockIdx.x - sample * p.slabs()) * kSlab + lane, windows = static_cast<int>(p.windows.divisor);
  Extremes e;
  if (channel < p.channels) {
#pragma unroll 4
    for (int w = slice; w < windows; w += kSlices) {
      const float2 own = extremes[(sample * windows + w) * p.channels + channel];
      e.least = min_nan(e.least, own.x);
      e.most = max_nan(e.most, own.y);
    }
  }
  shared[slice][lane] = make_float2(e.least, e.most);
  __syncthreads();
  if (slice != 0 || channel >= p.channels) return;
  for (int s = 1; s < kSlices; ++s) {
    e.least = min_nan(e.least, shared[s][lane].x);
    e.most = max_nan(e.most, shared[s][lane].y);
  }
  store_header(headers, header, sample * p.channels + channel, block_ruler(bits, e, header).header);
}

/// A thread a channel, parts shared out over the warps, always in the same order.
__global__ void __launch_bounds__(kFinishSlices * 32)
    finish_parts(const Part* parts, int64_t count, int channels, const __grid_constant__ Moments to) {
  __shared__ double shared[3][kFinishSlices][33];
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  Merge all(c < channels ? parts[c].mean : 0.0f);
  if (c < channels) {
#pragma unroll 4
    for (int64_t part = slice; part < count; part += kFinishSlices) {
      const Part own = parts[part * channels + c];
      all.add(own.count, own.mean, own.squares);
    }
  }
  shared[0][slice][lane] = all.count, shared[1][slice][lane] = all.sum, shared[2][slice][lane] = all.squares;
  __syncthreads();
  if (slice != 0 || c >= channels) return;
  for (int s = 1; s < kFinishSlices; ++s) {
    all.count += shared[0][s][lane], all.sum += shared[1][s][lane], all.squares += shared[2][s][lane];
  }
  write_moments(all, to, c);
}

int64_t extremes_bytes(const LowPassShape& s) { return align_up(s.maps * s.windows() * static_cast<int64_t>(sizeof(float2))); }

}  // namespace
}  // namespace slab

bool low_pass_streams(const LowPassShape& s) {
  return s.width % 4 == 0 && s.map_values() % 8 == 0 && s.maps * s.windows() < int64_t{1} << 31;
}

int64_t low_pass_stream_scratch_bytes(const LowPassShape& s, int64_t channels, bool moments) {
  const slab::Planes p(s, channels);
  const int64_t parts = moments ? p.parts(kSlabMeasure) * channels * static_cast<int64_t>(sizeof(slab::Part)) : 0;
  return slab::extremes_bytes(s) + parts;
}

void low_pass_stream_measure(const LowPassParts& to, const void* x, DType type, const Moments* moments, void* scratch,
                             StreamHandle stream) {
  using namespace slab;
  const Planes p(to.maps, to.channels);
  auto* extremes = static_cast<float2*>(scratch);
  auto* parts = reinterpret_cast<Part*>(static_cast<uint8_t*>(scratch) + extremes_bytes(to.maps));
  const Measure a = {p, x, to.means, extremes, parts};
  const dim3 grid = moments != nullptr ? p.grid(kSlabMeasure) : p.free_grid(kSlabMeasure);
  with_values(type, moments != nullptr, [&](auto t, auto with) {
    launch_kernel("low_pass", stream, {grid, kWarps * 32}, measure_windows<t(), with()>, a);
  });
  const unsigned blocks = grid_size(to.maps.maps / to.channels * p.slabs());
  with_usual_bits(to.code.levels.bits, [&](auto bits) {
    launch_kernel("low_pass", stream, {blocks, kSlab * kSlices}, make_headers<bits()>, p, extremes, to.code.header, to.headers);
  });
  if (moments == nullptr) return;
  launch_kernel("low_pass", stream, {grid_size(ceil_div(to.channels, 32)), kFinishSlices * 32}, finish_parts, parts, p.parts(kSlabMeasure),
                p.channels, *moments);
}

}  // namespace satchel::cuda
