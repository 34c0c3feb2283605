// The bytes of packed tensors never change: what a file or a checkpoint holds today is read tomorrow. The digests below were made by the
// commits that their tables name; SATCHEL_PRINT_GOLDEN=1 prints those of this tree.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "satchel/core/spec.h"
#include "satchel/tensor/pack.h"
#include "tests/support.h"

namespace satchel {
namespace {

/// About normal numbers from integers alone: the same on every machine.
at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  at::Tensor x = at::empty(sizes);
  auto* p = x.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    int64_t sum = 0;
    for (uint64_t part = 0; part < 4; ++part) {
      uint64_t h = (seed * 4 + part) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(i) * 0xbf58476d1ce4e5b9u;
      h ^= h >> 31;
      h *= 0x94d049bb133111ebu;
      sum += static_cast<int64_t>(h >> 44) - (int64_t{1} << 19);
    }
    p[i] = static_cast<float>(sum) * 0x1p-19f;
  }
  return x;
}

uint64_t digest(const at::Tensor& bytes) {
  uint64_t h = 1469598103934665603u;
  const auto* p = bytes.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) h = (h ^ p[i]) * 1099511628211u;
  return h;
}

struct Golden {
  const char* name;  // the spec's text
  uint64_t rows, image;
};

uint64_t digest_of(const char* text, at::IntArrayRef sizes) {
  const CodecSpec spec = parse_spec(text);
  const at::Tensor x = numbers(sizes, 3), seed = seed_tensor(11, at::kCPU);
  if (spec.side == Side::one_sided || spec.side == Side::both) {
    const at::Tensor rows = x.reshape({-1, sizes.back()});
    return digest(pack_side(rows, spec, seed, numbers({sizes.back()}, 5), numbers({sizes.back()}, 7)).bytes);
  }
  return digest(pack(x, spec, seed).bytes);
}

constexpr int64_t kRows[] = {301, 40}, kImage[] = {3, 5, 14, 16};

class Goldens : public testing::TestWithParam<Golden> {};

TEST_P(Goldens, PackToTheSameBytes) {
  const Golden& g = GetParam();
  const uint64_t rows = digest_of(g.name, kRows), image = digest_of(g.name, kImage);
  if (std::getenv("SATCHEL_PRINT_GOLDEN") != nullptr) {
    std::printf("    {\"%s\", 0x%016llxu, 0x%016llxu},\n", g.name, static_cast<unsigned long long>(rows),
                static_cast<unsigned long long>(image));
    return;
  }
  EXPECT_EQ(rows, g.rows) << "of rows";
  EXPECT_EQ(image, g.image) << "of an image";
}

/// Made at 3e86b3c, the last commit before the upper half was rebuilt.
constexpr Golden kPresets[] = {
    {"exact", 0xad12c8d40fe1ea27u, 0x59f15612f1cccceeu},
    {"blockwise", 0x5c23a803c7410f23u, 0x1df1b92471ae3a16u},
    {"actnn", 0xa16755d7f43f4360u, 0x5d945326430ec084u},
    {"division", 0x13ea70db9dec4abcu, 0xe73a7c39874f2c2bu},
    {"gact", 0xc62e9a785ec89402u, 0xdd98f5e7c6dcbe3bu},
    {"satchel", 0xef3180420facddedu, 0x59d8a74ec36be21bu},
    {"bits=1", 0xa3247ea17db01ddbu, 0x128fc5449ba0c3b4u},
    {"bits=2", 0x0978161b7d47dac3u, 0xbc5001f66c2ceee9u},
    {"bits=3,block=100", 0x698946cd562e1849u, 0xf41c7dea6839dbbeu},
    {"bits=4,levels=even,header=f32", 0xc15e5500a268cef3u, 0x459ef9b69e62b8b5u},
    {"bits=8,round=nearest", 0x88221528b2fe9520u, 0xc6d333fe3f8fa627u},
    {"bits=32", 0x9627a89023459180u, 0x51c43e5250c91e90u},
    {"side=relu", 0xd15e211e4ddaf336u, 0xdfde4e18488feb85u},
    {"side=relu,bits=3", 0xa967df6d4d0a0f03u, 0x0741b92175e198ebu},
    {"side=one", 0xef3180420facddedu, 0x59d8a74ec36be21bu},
    {"side=one,bits=3", 0x84cc9ce3747be5d7u, 0x917e6eb9b48d4164u},
    {"side=both,bits=4", 0xb455ef24b363eaf8u, 0x45bf96919980f2d1u},
};
INSTANTIATE_TEST_SUITE_P(EveryPreset, Goldens, testing::ValuesIn(kPresets), test::kCaseName);

/// Projected values as they are. A product's order of sums is the CPU's own, so these sums are exact in any order: 32 multiples of 2^−10 up
/// to 4 in size, times ±1/√4, need 18 bits. Made at ecb1b22, not by an earlier commit: they hold the bytes from there on.
TEST(Goldens, ProjectionsThatAreExact) {
  const auto packed = [](at::IntArrayRef sizes) {
    const at::Tensor x = numbers(sizes, 3).mul_(0x1p10).round_().mul_(0x1p-10);
    EXPECT_LE(x.abs().max().item<float>(), 4.0f);
    return digest(pack(x, parse_spec("project=8,rows=64,bits=32"), seed_tensor(11, at::kCPU)).bytes);
  };
  EXPECT_EQ(packed({301, 32}), 0x892f634f0dff8f15u);
  EXPECT_EQ(packed({3, 5, 14, 32}), 0xaa1da26c82e76b9fu);
}

/// Made at 9f37845, before off values were sampled.
constexpr Golden kMeans[] = {
    {"satchel,off=mean", 0x91459faed44d8cc2u, 0xc09011d12287e300u},
    {"side=one,off=mean", 0x91459faed44d8cc2u, 0xc09011d12287e300u},
    {"side=one,bits=3,off=mean", 0x84cc9ce3747be5d7u, 0x917e6eb9b48d4164u},
    {"side=one,header=f32,off=mean", 0xee73586f1913c94bu, 0xa7adc3e385c3643fu},
    {"side=one,block=64,off=mean", 0x8aa619c0e3a31735u, 0x2556f73d727508acu},
    {"side=both,bits=3,off=mean", 0xa07bade3335bc2ccu, 0x34ec8278f9727912u},
};
INSTANTIATE_TEST_SUITE_P(TheMeanOfOffValues, Goldens, testing::ValuesIn(kMeans), test::kCaseName);

}  // namespace
}  // namespace satchel
