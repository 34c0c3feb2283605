// What launches ask of a GPU fits every GPU of the table, in one wave where it can. The H200's launches are those that its results come
// from.
#include "satchel/kernels/cuda/gpu.h"

#include <gtest/gtest.h>

#include <string_view>

#include "satchel/kernels/cuda/product_tile.h"

namespace satchel::cuda {
namespace {

using epilogue::product::kTiles;
using epilogue::product::Math;
using epilogue::product::tile_of;
using epilogue::product::TileShape;

constexpr Math kMaths[] = {Math::full, Math::tf32, Math::bf16, Math::f16};

const Gpu& gpu_named(std::string_view name) {
  for (const NamedGpu& g : kGpus) {
    if (name == g.name) return g.gpu;
  }
  ADD_FAILURE() << "no " << name;
  return kGpus[0].gpu;
}

struct Kernel {
  const char* name;
  BlockNeeds needs;
};
constexpr Kernel kKernels[] = {{"few walk", kFewWalk},         {"many walk", kManyWalk},         {"side encode", kSideEncode},
                               {"decode fours", kDecodeFours}, {"decode eights", kDecodeEights}, {"slab measure", kSlabMeasure},
                               {"slab back", kSlabBack},       {"project back", kProjectBack},   {"scale", kScale},
                               {"column sums", kColumnSums}};

TEST(Gpu, HoldsWhatLaunchBoundsPromise) {
  for (const NamedGpu& g : kGpus) {
    for (const Kernel& k : kKernels) {
      // 256 threads, eight times: 2,048 threads, where GeForce has room for 1,536.
      const int64_t promised = k.needs.each == 8 && g.gpu.threads == 1536 ? 6 : k.needs.each;
      EXPECT_EQ(resident_each(g.gpu, k.needs), promised) << g.name << ", " << k.name;
    }
  }
}

TEST(Gpu, LimitsOneByOne) {
  constexpr Gpu kGpu = {10, 1024, 8, 1 << 16, 64 << 10, 48 << 10};
  EXPECT_EQ(resident(kGpu, {128, 4}), 40);                // as asked
  EXPECT_EQ(resident_each(kGpu, {512, 4}), 2);            // threads
  EXPECT_EQ(resident_each(kGpu, {32, 16}), 8);            // thread blocks
  EXPECT_EQ(resident_each(kGpu, {128, 8, 15 << 10}), 4);  // shared memory with the KiB that CUDA takes: 64 / 16
  EXPECT_EQ(resident_each(kGpu, {128, 8, 48 << 10}), 1);
  EXPECT_EQ(resident_each(kGpu, {128, 8, (48 << 10) + 1}), 0);
  constexpr Gpu kFewRegisters = {10, 1024, 8, 1 << 15, 64 << 10, 48 << 10};
  EXPECT_EQ(resident_each(kFewRegisters, {128, 4}), 2);  // 128 registers a thread, 16,384 a thread block
}

TEST(Gpu, H200AsMeasured) {
  const Gpu& h200 = gpu_named("h200");
  EXPECT_EQ(resident(h200, kFewWalk), 396);
  EXPECT_EQ(resident(h200, kManyWalk), 528);
  EXPECT_EQ(resident(h200, kSideEncode), 792);
  EXPECT_EQ(resident(h200, kDecodeFours), 1056);
  EXPECT_EQ(resident(h200, kProjectBack), 264);
  for (const Math math : kMaths) {
    for (const TileShape& tile : kTiles) EXPECT_EQ(resident(h200, tile.needs(math)), 132);
  }
}

TEST(Gpu, FreeGridsAreOneWave) {
  for (const NamedGpu& g : kGpus) {
    for (const Kernel& k : kKernels) {
      const int64_t at_once = resident(g.gpu, k.needs);
      for (int64_t unit = 1; unit <= at_once; ++unit) {
        const int64_t blocks = blocks_in_units(int64_t{1} << 31, unit, at_once);
        ASSERT_LE(blocks, at_once) << g.name << ", " << k.name;
        ASSERT_GT(blocks, at_once - unit) << g.name << ", " << k.name;
        ASSERT_EQ(blocks % unit, 0);
        ASSERT_EQ(blocks_in_units(1, unit, at_once), unit);  // few values: one unit
      }
      EXPECT_EQ(blocks_in_units(int64_t{1} << 31, at_once + 1, at_once), at_once + 1);  // one unit, whatever fits
    }
  }
}

/// The most thread blocks that a multiprocessor gets, by the mean over all.
double imbalance(int64_t blocks, int processors) {
  return static_cast<double>((blocks + processors - 1) / processors * processors) / static_cast<double>(blocks);
}

TEST(Gpu, SumsOfAnH200SpreadWell) {
  // Whole thread blocks: 528 over 170 multiprocessors are 4 on some and 3.1 on average, 396 over 128 are 4 and 3.09, which is the worst.
  for (const NamedGpu& g : kGpus) {
    for (const BlockNeeds& needs : {kFewWalk, kManyWalk, kSideEncode, kSlabMeasure, kSlabBack, kColumnSums}) {
      EXPECT_LE(imbalance(kSumProcessors * needs.each, g.gpu.processors), 1.3) << g.name;
    }
  }
}

TEST(ProductTile, Bytes) {
  // Three stages of 32 rows of G (264, 136, 104 or 72 numbers), two of Z (136).
  EXPECT_EQ(kTiles[0].bytes(Math::full), 3 * 32 * 264 * 4 + 2 * 32 * 136 * 4);
  EXPECT_EQ(kTiles[0].bytes(Math::bf16), (3 * 32 * 264 + 2 * 32 * 136) * 2);
  EXPECT_EQ(kTiles[1].bytes(Math::tf32), 3 * 32 * 136 * 4 + 2 * 32 * 136 * 4);
  EXPECT_EQ(kTiles[1].bytes(Math::f16), 256 * 64 * 4);  // the sums of a team
  EXPECT_EQ(kTiles[2].bytes(Math::full), 3 * 32 * 104 * 4 + 2 * 32 * 136 * 4);
  EXPECT_EQ(kTiles[3].bytes(Math::full), 3 * 32 * 72 * 4 + 2 * 32 * 136 * 4);
}

TEST(ProductTile, EveryGpuHasOne) {
  for (const NamedGpu& g : kGpus) {
    for (const Math math : kMaths) {
      for (int64_t columns = 1; columns <= 512; ++columns) {
        const TileShape tile = tile_of(g.gpu, columns, math);
        ASSERT_GT(tile.fragments, 0) << g.name;
        ASSERT_LE(tile.needs(math).shared, g.gpu.shared_block) << g.name;
        // One wave, and more than half of the GPU, for up to 512 channels.
        const int64_t at_once = resident(g.gpu, tile.needs(math)), tiles = (columns + tile.width() - 1) / tile.width() * 4;
        const int64_t blocks = parts_of_tiles(tiles, 1 << 20, at_once) * tiles;
        ASSERT_EQ(at_once, g.gpu.processors);
        ASSERT_LE(blocks, at_once) << g.name << ", " << columns;
        ASSERT_GT(2 * blocks, at_once) << g.name << ", " << columns;
      }
    }
  }
}

TEST(ProductTile, ByColumnsAndSharedMemory) {
  const auto width = [](const char* name, int64_t columns, Math math) { return tile_of(gpu_named(name), columns, math).width(); };
  for (const char* name : {"a100", "h200", "b200"}) {
    EXPECT_EQ(width(name, 40, Math::full), 48);
    EXPECT_EQ(width(name, 128, Math::full), 128);
    EXPECT_EQ(width(name, 256, Math::full), 256);
    EXPECT_EQ(width(name, 256, Math::bf16), 256);
  }
  for (const char* name : {"rtx3090", "rtx4090", "rtx5090"}) {
    EXPECT_EQ(width(name, 128, Math::full), 128);
    EXPECT_EQ(width(name, 256, Math::full), 128);  // 256 columns of fp32 take 137 KiB
    EXPECT_EQ(width(name, 256, Math::tf32), 128);
    EXPECT_EQ(width(name, 256, Math::f16), 256);
  }
  constexpr Gpu kSmall = {10, 1024, 16, 1 << 16, 64 << 10, 48 << 10};
  EXPECT_EQ(tile_of(kSmall, 40, Math::full).fragments, 0);
}

TEST(ProductTile, PartsOfTiles) {
  EXPECT_EQ(parts_of_tiles(1, 1000, 132), 132);
  EXPECT_EQ(parts_of_tiles(5, 1000, 132), 26);
  EXPECT_EQ(parts_of_tiles(5, 3, 132), 3);       // no more than there are steps
  EXPECT_EQ(parts_of_tiles(200, 1000, 132), 1);  // more tiles than multiprocessors
}

}  // namespace
}  // namespace satchel::cuda
