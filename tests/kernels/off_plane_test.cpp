// The off plane of one-sided codes of 2 bits: the same bytes on every kernel, and off values that are right on average.
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/kernels/side_common.h"

namespace satchel::test {
namespace {

constexpr int64_t kBlocks[] = {1, 3, 8, 49, 64, 100, 256, 1000};
constexpr int64_t kLengths[] = {1, 7, 8, 63, 64, 65, 129, 1000, 3001, 9000};
constexpr SideForm kForm = {2, Side::one_sided};

/// Codes and headers with their off plane.
struct Sampled {
  Coded coded;
  Bytes plane;
  bool operator==(const Sampled&) const = default;
};

SideCode with_plane(SideCode code, uint8_t* bytes) {
  code.plane = {bytes, code.grid.blocks(), off_slot_bytes(code.grid), 0};
  return code;
}

/// Encodes values [cut, n) first, then [0, cut).
Sampled encode_sampled(const CpuKernels& k, const SideCode& plain, const Channel* channels, const Bytes& x, DType type, uint64_t seed,
                       int64_t cut = 0) {
  Guarded plane(off_plane_bytes(plain.grid));
  std::memset(plane.data(), 0, static_cast<size_t>(off_plane_bytes(plain.grid)));
  const OffKey key = off_key(seed);
  std::memcpy(plane.data(), &key, sizeof(key));
  const SideCode code = with_plane(plain, static_cast<uint8_t*>(static_cast<void*>(plane.data())));
  const Source source = {x.data(), type};
  const Coded made = coded(
      code, [&](void* headers) { k.side_measure(code, source, headers, 0, code.grid.blocks()); },
      [&](void* headers, uint8_t* codes) {
        k.side_encode(code, source, channels, seed, headers, codes, cut, code.grid.values);
        if (cut > 0) k.side_encode(code, source, channels, seed, headers, codes, 0, cut);
      });
  EXPECT_TRUE(plane.intact()) << "wrote past the plane";
  return {made, plane.bytes()};
}

Bytes decode_sampled(const CpuKernels& k, const SideCode& plain, const Channel* channels, Sampled in, DType type, bool streaming = false) {
  return decode(k, with_plane(plain, in.plane.data()), channels, in.coded, type, streaming);
}

TEST(OffPlane, SameBytesForEveryShape) {
  Random random(61);
  for (const int64_t inner : {1, 3, 100}) {
    for (const int64_t channel_count : {1, 3, 16, 200}) {
      for (const int64_t length : kLengths) {
        const SideCode code = side_code(kForm, length, random.pick(kBlocks), channel_count, inner, random);
        const std::vector<Channel> channels = channels_of(channel_count, random);
        const DType in = random.pick(kTypes), out = random.pick(kTypes);
        const Bytes x = as_type(mixed_values(length, random), in);
        const uint64_t seed = random.bits();
        SCOPED_TRACE(describe(code, in) + " to " + name_of(out));
        const Sampled truth = encode_sampled(kScalar, code, channels.data(), x, in, seed);
        ASSERT_EQ(truth.coded, encode(kScalar, code, channels.data(), x, in, seed)) << "the plane changes codes or headers";
        const Bytes values = decode_sampled(kScalar, code, channels.data(), truth, out);
        const int64_t cut = random.below(length) / 8 * 8;
        for (const CpuKernels* k : supported_kernels()) {
          ASSERT_EQ(encode_sampled(*k, code, channels.data(), x, in, seed), truth) << k->name;
          ASSERT_EQ(encode_sampled(*k, code, channels.data(), x, in, seed, cut), truth) << k->name << ", cut at " << cut;
          ASSERT_EQ(decode_sampled(*k, code, channels.data(), truth, out), values) << k->name;
          ASSERT_EQ(decode_sampled(*k, code, channels.data(), truth, out, true), values) << k->name << ", past the caches";
        }
      }
    }
  }
}

TEST(OffPlane, DrawsEveryBlockOfAGroupAlikeAndGroupsIndependently) {
  constexpr int64_t kAll = 8 * 5 + 3;  // the last group has three blocks
  constexpr int kSeeds = 80000;
  std::vector<int> drawn(kAll), pairs(8 * 8);
  for (int s = 0; s < kSeeds; ++s) {
    const OffKey key = off_key(static_cast<uint64_t>(s) * 7919 + 1);
    int chosen[6] = {};
    for (int64_t b = 0; b < kAll; ++b) {
      const uint32_t weight = off_weight(key, b, kAll);
      ASSERT_TRUE(weight == 0 || weight == (b < 40 ? 8u : 3u));
      if (weight == 0) continue;
      ++drawn[static_cast<size_t>(b)];
      ++chosen[b / 8];
    }
    for (const int count : chosen) ASSERT_EQ(count, 1);
    ++pairs[static_cast<size_t>(8 * off_draw(key, 1, 8) + off_draw(key, 2, 8))];
  }
  for (int64_t b = 0; b < kAll; ++b) {
    const double p = 1.0 / (b < 40 ? 8 : 3), sd = std::sqrt(kSeeds * p * (1 - p));
    EXPECT_LT(std::abs(drawn[static_cast<size_t>(b)] - kSeeds * p), kZ * sd) << "block " << b;
  }
  double chi = 0;
  for (const int count : pairs) chi += std::pow(count - kSeeds / 64.0, 2) / (kSeeds / 64.0);
  EXPECT_LT(chi, 63 + kZ * std::sqrt(2.0 * 63) + 20);
}

/// Mean over many seeds of what each value comes back as; z of all together and χ² of each, against the draws' own spread.
TEST(OffPlane, OffValuesAreRightOnAverage) {
  Random random(62);
  constexpr int64_t kValues = 16 * 21 + 5, kBlock = 16;
  constexpr int kSeeds = 12000;
  const SideCode code = {
      grid_of(kValues, kBlock), HeaderType::bf16, Rounding::stochastic, side_table(2, Side::one_sided, Levels::optimal, kBlock), 4, 1};
  // Rising, falling, flat and off, and one whose threshold lies outside of all ranges.
  const std::vector<Channel> channels = {
      channel_of(1.2f, 0.3f, -0.6f), channel_of(-0.8f, -0.1f, 0.7f), {0.0f, 0.0f, -1.0f, 0.1f}, channel_of(1.0f, -50.0f, 0.2f)};
  Floats x;
  for (int64_t i = 0; i < kValues; ++i) x.push_back(random.normal());
  const Bytes bytes = as_type(x, DType::f32);
  std::vector<double> sum(kValues), square(kValues);
  const CpuKernels& k = *supported_kernels().front();
  for (int s = 0; s < kSeeds; ++s) {
    const Sampled made = encode_sampled(k, code, channels.data(), bytes, DType::f32, static_cast<uint64_t>(s) + 11);
    const Floats back = floats_of(decode_sampled(k, code, channels.data(), made, DType::f32), DType::f32);
    for (size_t i = 0; i < back.size(); ++i)
      sum[i] += back[i] - double{x[i]}, square[i] += (back[i] - double{x[i]}) * (back[i] - double{x[i]});
  }
  double pooled = 0, chi = 0, by_mean = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    const double z = sum[i] / std::sqrt(square[i] - sum[i] * sum[i] / kSeeds + 1e-12);
    pooled += z, chi += z * z;
    const Channel& c = channels[i % 4];
    if (!is_on(x[i], c)) by_mean += std::abs(c.off_mean - x[i]);
  }
  const double n = static_cast<double>(sum.size());
  EXPECT_LT(std::abs(pooled) / std::sqrt(n), kZ);
  EXPECT_LT(chi, n + kZ * std::sqrt(2 * n) + 20);
  EXPECT_GT(by_mean / n, 0.3) << "the channel means alone would be right: the test proves nothing";
}

class EachOffPlane : public EachKernel {};
EACH_KERNEL(EachOffPlane);

TEST_P(EachOffPlane, NonFiniteValuesShow) {
  const CpuKernels* const k = GetParam();
  Random random(63);
  const SideCode code = {
      grid_of(512, 64), HeaderType::bf16, Rounding::stochastic, side_table(2, Side::one_sided, Levels::optimal, 64), 2, 1};
  const std::vector<Channel> channels = {channel_of(1.0f, 0.0f, std::numeric_limits<float>::infinity()), channel_of(1.0f, 0.0f, -0.5f)};
  Floats x;
  for (int64_t i = 0; i < 512; ++i) x.push_back(random.normal());
  x[70] = std::numeric_limits<float>::infinity();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Sampled made = encode_sampled(*k, code, channels.data(), as_type(x, DType::f32), DType::f32, seed);
    const Floats back = floats_of(decode_sampled(*k, code, channels.data(), made, DType::f32), DType::f32);
    for (size_t i = 0; i < x.size(); ++i) {
      const bool poisoned = i / 64 == 1, no_mean = i % 2 == 0 && !(x[i] > 0);
      EXPECT_EQ(std::isnan(back[i]), poisoned || no_mean) << k->name << " value " << i;
    }
  }
}

}  // namespace
}  // namespace satchel::test
