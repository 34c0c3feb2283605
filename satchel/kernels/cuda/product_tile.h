// Tiles of the product from codes (norm_act_product.cu), and which of them a GPU gets. No CUDA, as gpu.h.
#pragma once

#include "satchel/kernels/cuda/gpu.h"

namespace satchel::cuda::epilogue::product {

constexpr int kBlockThreads = 512, kRows = 32, kChannels = 128;
constexpr int kPitch = kChannels + 8;          // numbers a row of Z: lanes of a fragment meet 32 banks
constexpr int kTableBytes = 4 * 256 * 4 + 64;  // of channels and of keys, beside the tile

constexpr int kPanelColumns = 256;      // of tiles that Hopper multiplies in panels (product_sums.cuh),
constexpr unsigned kPanelBytes = 1024;  // which start at a multiple of this

enum class Math { full, tf32, bf16, f16 };  // float32 by FMA; float32 as tf32; 16 bits, in shared memory too

constexpr bool is_half(Math math) { return math == Math::bf16 || math == Math::f16; }
constexpr int bytes_of(Math math) { return is_half(math) ? 2 : 4; }  // a number of G or Z

/// `across` warps side by side, each of `fragments` times 16 columns.
struct TileShape {
  int fragments, across;

  constexpr int width() const { return 16 * fragments * across; }
  constexpr int teams() const { return 4 / across; }
  constexpr int pitch() const { return (width() + 31) / 32 * 32 + 8; }  // numbers a row of G
  constexpr int sums() const { return 16 * fragments; }                 // a thread

  /// Tensor cores add up 16 rows of 16 bits at a time.
  constexpr bool serves(Math math) const { return !is_half(math) || kRows / teams() >= 16; }

  /// Steps of G in shared memory: more where a step is few bytes, so that as many are on their way.
  constexpr int stages(Math math) const { return is_half(math) && width() <= 128 ? 5 : 3; }

  /// Shared memory that a launch asks for: G and Z while steps are multiplied, then a team's sums.
  constexpr int bytes(Math math) const {
    const int g = stages(math) * kRows * pitch() * bytes_of(math), z = 2 * kRows * kPitch * bytes_of(math);
    const int team = teams() == 1 ? 0 : kBlockThreads / teams() * sums() * 4;
    return static_cast<int>(more_of(g + z, team));
  }
  constexpr BlockNeeds needs(Math math) const { return {kBlockThreads, 1, bytes(math) + kTableBytes}; }
};

constexpr TileShape kTiles[] = {{4, 4}, {4, 2}, {3, 2}, {3, 1}};

/// The tile that costs least for so many columns, of those that the GPU has the shared memory for; no fragments: none. Decoding is worth
/// about 40 columns of FMAs, or 160 of tensor cores.
constexpr TileShape tile_of(const Gpu& gpu, int64_t columns, Math math) {
  TileShape best = {0, 0};
  int64_t least = 0;
  for (const TileShape& tile : kTiles) {
    if (!tile.serves(math) || resident_each(gpu, tile.needs(math)) == 0) continue;
    const int64_t cost = (columns + tile.width() - 1) / tile.width() * (tile.width() + (math == Math::full ? 40 : 160));
    if (best.fragments == 0 || cost < least) best = tile, least = cost;
  }
  return best;
}

}  // namespace satchel::cuda::epilogue::product
