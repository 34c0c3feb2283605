// A norm's output, mask and low-pass code in two reads of its input. Large planes: low_pass_stream.h. Small ones, whose maps fit shared
// memory: column_moments(), then one read for all the rest, as low_pass_last.cu codes them.
#include "satchel/kernels/cuda/low_pass_slab.cuh"
#include "satchel/kernels/cuda/low_pass_stream.h"
#include "satchel/kernels/cuda/low_pass_tile.cuh"

namespace satchel::cuda {
namespace slab {
namespace {

constexpr int kBits = 2;
constexpr int kTakers = 8;          // warps of a thread block, at most
constexpr int64_t kLargeMap = 512;  // values from which on two reads serve, where they can

struct Small {
  Tile tile;
  Planes planes;
  StreamNorm norm;
  const void* x;
};

/// One channel of a line goes to shared memory.
template <DType type>
__device__ inline void put_cells(Cell<type>* to, const Quad<type> (&q)[8], int k, int count) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < count) to[j] = cell_of<type>(q[j], k);
  }
}

/// A window of a slab of the tile: z and mask to memory, cells, means and extremes to shared memory. All lanes take part.
template <DType type, Then then>
__device__ inline void take_window(const Small& a, const Shared<type>& shared, const Window& w, int first_channel, int slab) {
  const Planes& p = a.planes;
  const int quad = static_cast<int>(threadIdx.x) % 8, pair = static_cast<int>(threadIdx.x) % 32 / 8;
  const int own = slab * kSlab + 4 * quad, channel = first_channel + own;  // in the tile, in the sample
  const bool exists = own < a.tile.tile;
  const Folded norm(a.norm.with, channel, exists);
  float sum[4];
  Extremes e[4];
  Gathered none;
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const int line = 2 * pair + h, columns = line < w.rows ? w.columns : 0, n = exists ? columns : 0;
    const int64_t at = w.at(p, line, channel);
    Quad<type> q[8], skip[8];
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
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (n > 0) put_cells<type>(shared.cells + (own + k) * a.tile.pitch + pixel, q, k, n);
    }
    float row[4];
    measure_line<type, false>(q, n, row, e, none);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] = h == 0 ? row[k] : sum[k] + row[k];
  }
  const WindowMean mean = window_mean(sum, e, pair, w.rows * w.columns);
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
  if (best.bytes > most_shared()) return {};
  for (int tile = 2 * least; least == kSlab && tile <= 4 * kSlab && channels % tile == 0; tile *= 2) {
    if (const Choice c = made(tile); tile / kSlab * s.windows() <= kTakers && c.bytes <= kSmallTile) best = c;
  }
  return best;
}

bool is_large(const LowPassShape& s) { return low_pass_streams(s) && s.map_values() >= kLargeMap; }

template <DType type, Then then>
void launch(const Small& a, const Choice& c, unsigned blocks, cudaStream_t s) {
  allow_shared(reinterpret_cast<const void*>(encode_small<type, then>), c.bytes, "norm_low_pass");
  const int items = a.tile.windows * ((c.tile + kSlab - 1) / kSlab), threads = (items < kTakers ? items : kTakers) * 32;
  encode_small<type, then><<<blocks, threads, static_cast<size_t>(c.bytes), s>>>(a);
}

void encode_small_maps(const LowPassParts& to, const void* x, DType type, const StreamNorm& norm, const uint64_t* seed, cudaStream_t s) {
  const LowPassShape& maps = to.maps;
  const Choice c = choose(maps, to.channels, type);
  const Small a = {{to.code, seed, to.codes, to.headers, to.means, FastDivisor(static_cast<uint32_t>(to.channels / c.tile)),
                    FastDivisor(static_cast<uint32_t>(maps.width)), FastDivisor(static_cast<uint32_t>(ceil_div(maps.width, kWindow))),
                    FastDivisor(static_cast<uint32_t>(maps.map_values())), static_cast<int>(to.channels), static_cast<int>(maps.height),
                    static_cast<int>(maps.windows()), c.tile, static_cast<int>(maps.map_values() | 1), static_cast<uint32_t>(c.cells)},
                   Planes(maps, to.channels),
                   norm,
                   x};
  const unsigned blocks = grid_size(maps.maps / c.tile);
  with_type(type, [&](auto t) {
    if (norm.mask == nullptr) {
      launch<t(), Then::norm>(a, c, blocks, s);
    } else if (norm.skip == nullptr) {
      launch<t(), Then::relu>(a, c, blocks, s);
    } else {
      launch<t(), Then::add>(a, c, blocks, s);
    }
  });
  check_launch("norm_low_pass");
}

void check(const LowPassParts& to, DType type, const char* op) {
  if (!norm_low_pass_fits(to, type)) fail(op, "norm_low_pass_fits must be true of the code");
  if (!is_aligned(to.codes) || !is_aligned(to.headers)) fail(op, "codes and headers must start at a multiple of 16");
}

}  // namespace
}  // namespace slab

bool norm_low_pass_fits(const LowPassParts& to, DType type) {
  const LowPassShape& s = to.maps;
  if (s.maps == 0 || to.code.levels.bits != slab::kBits || !fits_last(s, to.code, to.channels, nullptr)) return false;
  if (s.map_values() < 8 || s.maps / to.channels * s.map_values() >= int64_t{1} << 24) return false;
  return slab::is_large(s) || (s.maps * s.windows() < int64_t{1} << 31 && slab::choose(s, to.channels, type).tile > 0);
}

int64_t norm_low_pass_scratch_bytes(const LowPassParts& to) {
  const int64_t sums = slab::Planes(to.maps, to.channels).parts(kSlabBack) * to.channels * static_cast<int64_t>(sizeof(float2));
  return more_of(sums, more_of(low_pass_stream_scratch_bytes(to.maps, to.channels, true), column_moments_scratch_bytes(to.channels)));
}

void norm_low_pass_measure(const LowPassParts& to, const void* x, DType type, const Moments& moments, void* scratch, StreamHandle stream) {
  slab::check(to, type, "norm_low_pass_measure");
  if (slab::is_large(to.maps)) return low_pass_stream_measure(to, x, type, &moments, scratch, stream);
  column_moments(x, type, to.maps.maps / to.channels * to.maps.map_values(), to.channels, moments, scratch, stream);
}

void norm_encode(const NormLowPassCode& code, const NormPass& pass, const uint64_t* seed, StreamHandle stream) {
  constexpr const char* op = "norm_low_pass_encode";
  const LowPassParts& to = code.parts;
  slab::check(to, pass.type, op);
  for (const void* p : {pass.x, pass.skip, static_cast<const void*>(pass.z)}) {
    if (!is_aligned(p)) fail(op, "activations must start at a multiple of 16");
  }
  if (code.on == nullptr && pass.skip != nullptr) fail(op, "a sum must have a mask");
  const StreamNorm norm = {pass.skip, pass.with, code.on, pass.z};
  if (slab::is_large(to.maps)) return low_pass_stream_encode(to, pass.x, pass.type, norm, seed, stream);
  slab::encode_small_maps(to, pass.x, pass.type, norm, seed, static_cast<cudaStream_t>(stream));
}

}  // namespace satchel::cuda
