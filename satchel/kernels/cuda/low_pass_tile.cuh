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
template <DType type>
struct Shared {
  Cell<type>* cells;
  float *mean, *least, *most;
  BlockRuler* rulers;

  __device__ Shared(uint4* memory, const Tile& a)
      : cells(reinterpret_cast<Cell<type>*>(memory)),
        mean(reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + a.means_at)),
        least(mean + a.tile * a.windows),
        most(least + a.tile * a.windows),
        rulers(reinterpret_cast<BlockRuler*>(most + a.tile * a.windows)) {}
};

/// Bytes of shared memory after the cells.
inline int64_t shared_after_cells(int64_t tile, int64_t windows) {
  return tile * (windows * 12 + static_cast<int64_t>(sizeof(BlockRuler)));
}

/// A warp a channel: its header and ruler from its windows.
template <int bits, DType type>
__device__ inline void make_rulers(const Tile& a, const Shared<type>& shared, int64_t first_map) {
  const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
  for (int channel = static_cast<int>(threadIdx.x / 32); channel < a.tile; channel += warps) {
    Extremes e;
    for (int w = lane; w < a.windows; w += 32) {
      e.least = min_nan(e.least, shared.least[channel * a.windows + w]);
      e.most = max_nan(e.most, shared.most[channel * a.windows + w]);
    }
    e.reduce_warp();
    if (lane != 0) continue;
    shared.rulers[channel] = block_ruler(bits, e, a.code.header);
    store_header(a.headers, a.code.header, first_map + channel, shared.rulers[channel].header);
  }
}

/// Maps of 8 values or more: a group of codes lies in one of them, or in two.
template <int bits, DType type>
__device__ inline void encode_values(const Tile& a, const Shared<type>& shared, UniformSeed seed, int64_t first_group) {
  const int groups = a.tile * a.pixels() / 8, across = static_cast<int>(a.across.divisor);
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += static_cast<int>(blockDim.x)) {
    const Words noise = group_noise(seed, a.code.rounding, first_group + g);
    const int first = static_cast<int>(a.map.divide(static_cast<uint32_t>(g) * 8)), start = g * 8 - first * a.pixels();
    int channel = first, row = static_cast<int>(a.width.divide(static_cast<uint32_t>(start))), column = start - row * a.columns();
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float mean = shared.mean[channel * a.windows + row / kWindow * across + column / kWindow];
      v[j] = number_of<type>(shared.cells[channel * a.pitch + row * a.columns() + column]) - mean;
      if (++column == a.columns()) {
        column = 0;
        if (++row == a.height) row = 0, ++channel;
      }
    }
    const int own = a.pixels() - start;  // values of the first map
    if (own >= 8) {
      store_codes<bits>(a.codes, first_group + g, encode8<bits, true>(v, shared.rulers[first], a.code.levels, noise), 8);
      continue;
    }
    float other[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      other[j] = j < own ? v[7] : v[j];
      v[j] = j < own ? v[j] : v[0];
    }
    const uint64_t mask = (uint64_t{1} << (bits * own)) - 1, eight = encode8<bits, true>(v, shared.rulers[first], a.code.levels, noise);
    const uint64_t next = encode8<bits, true>(other, shared.rulers[first + 1], a.code.levels, noise);
    store_codes<bits>(a.codes, first_group + g, (eight & mask) | (next & ~mask), 8);
  }
}

constexpr int64_t kSmallTile = 32 << 10;    // tiles of this size leave a processor room for six and more
constexpr int64_t kHalfShared = 112 << 10;  // half of an H200's shared memory

/// The largest tile on the current device.
inline int64_t most_shared() { return less_of(kHalfShared, this_gpu().shared_block); }

}  // namespace satchel::cuda
