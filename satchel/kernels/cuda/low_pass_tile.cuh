// The end of a low-pass whose maps stand in shared memory: rulers of the channels, and codes of values in coding order.
#pragma once

#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/kernels/cuda/low_pass_last.cuh"

namespace satchel::cuda {

/// A thread block has all pixels of `tile` neighbouring channels of one sample.
struct Tile {
  BlockCode code;
  const uint64_t* seed;
  uint8_t* codes;
  void* headers;
  uint16_t* means;
  FastDivisor tiles, width, across, map;  // a sample's tiles, a row's pixels and windows, a map's values
  int channels, height, windows;
  int tile, pitch;    // channels a tile; values from one of its channels to the next, in shared memory
  uint32_t means_at;  // bytes of the tile in shared memory

  Tile(const LowPassParts& to, const uint64_t* of_seed, int each, int64_t apart, int64_t cells)
      : code(to.code),
        seed(of_seed),
        codes(to.codes),
        headers(to.headers),
        means(to.means),
        tiles(static_cast<uint32_t>(to.channels / each)),
        width(static_cast<uint32_t>(to.maps.width)),
        across(static_cast<uint32_t>(ceil_div(to.maps.width, kWindow))),
        map(static_cast<uint32_t>(to.maps.map_values())),
        channels(static_cast<int>(to.channels)),
        height(static_cast<int>(to.maps.height)),
        windows(static_cast<int>(to.maps.windows())),
        tile(each),
        pitch(static_cast<int>(apart)),
        means_at(static_cast<uint32_t>(cells)) {}
  __device__ int pixels() const { return static_cast<int>(map.divisor); }
  __device__ int columns() const { return static_cast<int>(width.divisor); }
};

/// Shared memory: | cells, tile × pitch | means, least, most: tile × windows each | rulers |
/// Once the rulers stand, the window of every pixel stands in place of least and most: a byte each, of at most kMostWindows windows.
template <DType type>
struct Shared {
  Cell<type>* cells;
  float *mean, *least, *most;
  BlockRuler* rulers;
  uint8_t* window;

  __device__ Shared(uint4* memory, const Tile& a)
      : cells(reinterpret_cast<Cell<type>*>(memory)),
        mean(reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + a.means_at)),
        least(mean + a.tile * a.windows),
        most(least + a.tile * a.windows),
        rulers(reinterpret_cast<BlockRuler*>(most + a.tile * a.windows)),
        window(reinterpret_cast<uint8_t*>(least)) {}

  /// After make_rulers(). The thread block waits before and after.
  __device__ void fill_windows(const Tile& a) const {
    __syncthreads();
    for (int p = static_cast<int>(threadIdx.x); p < a.pixels(); p += static_cast<int>(blockDim.x)) {
      const int row = static_cast<int>(a.width.divide(static_cast<uint32_t>(p))), column = p - row * a.columns();
      window[p] = static_cast<uint8_t>(row / kWindow * static_cast<int>(a.across.divisor) + column / kWindow);
    }
    __syncthreads();
  }
};

/// Bytes of shared memory after the cells.
inline int64_t shared_after_cells(int64_t tile, int64_t windows) {
  return tile * (windows * 12 + static_cast<int64_t>(sizeof(BlockRuler)));
}

constexpr int64_t kMostWindows = 256;  // of a map whose groups encode_values() codes; 8 channels' least and most are a byte a pixel

/// Eight threads a channel: its header and ruler from its windows. Tiles are multiples of 8 channels: whole warps.
template <int bits, DType type>
__device__ inline void make_rulers(const Tile& a, const Shared<type>& shared, int64_t first_map) {
  for (int item = static_cast<int>(threadIdx.x); item < a.tile * 8; item += static_cast<int>(blockDim.x)) {
    const int channel = item / 8;
    Extremes e;
    for (int w = item % 8; w < a.windows; w += 8) {
      e.least = min_nan(e.least, shared.least[channel * a.windows + w]);
      e.most = max_nan(e.most, shared.most[channel * a.windows + w]);
    }
    e.reduce(8);
    if (item % 8 != 0) continue;
    shared.rulers[channel] = block_ruler(bits, e, a.code.header);
    store_header(a.headers, a.code.header, first_map + channel, shared.rulers[channel].header);
  }
}

/// Maps of 8 values or more: a group of codes lies in one of them, or in two. Those of two are coded by threads of their own: a warp would
/// code all of its groups as if they were.
template <int bits, DType type>
__device__ inline void encode_values(const Tile& a, const Shared<type>& shared, UniformSeed seed, int64_t first_group) {
  shared.fill_windows(a);
  const int pixels = a.pixels(), groups = a.tile * pixels / 8, threads = static_cast<int>(blockDim.x);
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += threads) {
    const int channel = static_cast<int>(a.map.divide(static_cast<uint32_t>(g) * 8)), start = g * 8 - channel * pixels;
    if (start + 8 > pixels) continue;
    const Words noise = group_noise(seed, a.code.rounding, first_group + g);
    const Cell<type>* cells = shared.cells + channel * a.pitch + start;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(shared.window) + start / 4;  // the third may stand behind the last pixel's
    const uint32_t window[2] = {__funnelshift_r(words[0], words[1], start % 4 * 8), __funnelshift_r(words[1], words[2], start % 4 * 8)};
    const float* mean = shared.mean + channel * a.windows;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = number_of<type>(cells[j]) - mean[window[j / 4] >> (8 * (j % 4)) & 0xff];
    store_codes<bits>(a.codes, first_group + g, encode8<bits, true>(v, shared.rulers[channel], a.code.levels, noise), 8);
  }
  for (int channel = 1 + static_cast<int>(threadIdx.x); channel < a.tile; channel += threads) {
    const int g = channel * pixels / 8, before = channel * pixels - g * 8;  // values of the map before
    if (before == 0) continue;
    const Words noise = group_noise(seed, a.code.rounding, first_group + g);
    float v[8], w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int map = j < before ? channel - 1 : channel, p = j < before ? pixels - before + j : j - before;
      v[j] = w[j] = number_of<type>(shared.cells[map * a.pitch + p]) - shared.mean[map * a.windows + shared.window[p]];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // any value of the same map stands for one of the other
      if (j < before)
        w[j] = v[7];
      else
        v[j] = v[0];
    }
    const uint64_t mask = (uint64_t{1} << (bits * before)) - 1;
    const uint64_t eight = encode8<bits, true>(v, shared.rulers[channel - 1], a.code.levels, noise);
    const uint64_t next = encode8<bits, true>(w, shared.rulers[channel], a.code.levels, noise);
    store_codes<bits>(a.codes, first_group + g, (eight & mask) | (next & ~mask), 8);
  }
}

constexpr int64_t kSmallTile = 32 << 10;    // tiles of this size leave a processor room for six and more
constexpr int64_t kHalfShared = 112 << 10;  // half of an H200's shared memory

/// The largest tile on the current device.
inline int64_t most_shared() { return less_of(kHalfShared, this_gpu().shared_block); }

}  // namespace satchel::cuda
