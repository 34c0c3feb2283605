// Masks, and integers in the fewest bits.
#include <cmath>
#include <limits>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 4097};

TEST(Mask, OneWherePositive) {
  Random random(61);
  for (const DType type : kTypes) {
    for (const int64_t n : kLengths) {
      Floats x = mixed_values(n, random);
      const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1p-149f, -0x1p-149f, -0.0f, 0x1p-126f, 0x1p-24f};
      for (float& v : x) v = random.one_in(4) ? random.pick(odd) : v;
      const Bytes bytes = as_type(x, type);
      const Floats seen = floats_of(bytes, type);
      for (const CpuKernels* k : supported_kernels()) {
        Guarded mask(code_bytes(n, 1));
        k->mask({bytes.data(), type}, mask.data(), 0, n);
        ASSERT_TRUE(mask.intact()) << k->name;
        const Bytes got = mask.bytes();
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(get_code(got.data(), 1, i) != 0, flush(seen[static_cast<size_t>(i)]) > 0) << k->name << ' ' << i;
        }
        // The bits after the last value are 0: equal tensors have equal bytes.
        for (int64_t i = n; i < 8 * static_cast<int64_t>(got.size()); ++i) ASSERT_EQ(get_code(got.data(), 1, i), 0u) << k->name;
      }
    }
  }
}

class EachMask : public EachKernel {};
EACH_KERNEL(EachMask);

TEST_P(EachMask, PiecesAndOriginsGiveTheSameBytes) {
  const CpuKernels* const k = GetParam();
  Random random(62);
  const Bytes x = as_type(mixed_values(1003, random), DType::bf16), tail = slice(x, DType::bf16, 200, 1003);
  Guarded whole(126);
  kScalar.mask({x.data(), DType::bf16}, whole.data(), 0, 1003);
  Guarded mask(126);
  k->mask({tail.data(), DType::bf16, 200}, mask.data(), 200, 1003);
  k->mask({x.data(), DType::bf16}, mask.data(), 0, 200);
  ASSERT_EQ(mask.bytes(), whole.bytes()) << k->name;
}

TEST(Narrow, BitsNeeded) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(bits_needed(0, 0), 0);
  EXPECT_EQ(bits_needed(kMin, kMin), 0);
  EXPECT_EQ(bits_needed(-1, 0), 1);
  EXPECT_EQ(bits_needed(0, 255), 8);
  EXPECT_EQ(bits_needed(0, 256), 9);
  EXPECT_EQ(bits_needed(-128, 127), 8);
  EXPECT_EQ(bits_needed(0, kMax), 63);
  EXPECT_EQ(bits_needed(-1, kMax), 64);
  EXPECT_EQ(bits_needed(kMin, kMax), 64);
}

/// n integers that need `bits` above `least`, both ends among them.
std::vector<int64_t> integers(int64_t n, int64_t least, int bits, Random& random) {
  const uint64_t mask = bits == 0 ? 0 : ~uint64_t{0} >> (64 - bits);
  std::vector<int64_t> x;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t above = i == 0 ? mask : i == 1 ? 0 : random.bits() & mask;
    x.push_back(static_cast<int64_t>(static_cast<uint64_t>(least) + above));
  }
  return x;
}

TEST(Narrow, EveryWidthComesBack) {
  Random random(63);
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  for (int bits = 0; bits <= 64; ++bits) {
    const int64_t half = bits == 0 ? 0 : bits == 64 ? kMin : -(int64_t{1} << (bits - 1));
    for (const int64_t least : {half, kMin}) {
      for (const int64_t n : {0, 1, 2, 7, 8, 9, 65, 1000}) {
        const std::vector<int64_t> x = integers(n, least, bits, random);
        if (n > 1) {
          ASSERT_EQ(bits_needed(*std::min_element(x.begin(), x.end()), *std::max_element(x.begin(), x.end())), bits);
        }
        Guarded codes(code_bytes(n, bits)), back(n * 8);
        narrow(x.data(), least, bits, codes.data(), 0, n);
        ASSERT_TRUE(codes.intact()) << bits;
        const Bytes stream = codes.bytes();
        widen(stream.data(), least, bits, reinterpret_cast<int64_t*>(back.data()), 0, n);
        ASSERT_TRUE(back.intact()) << bits;
        ASSERT_EQ(n == 0 ? 0 : std::memcmp(back.data(), x.data(), static_cast<size_t>(n) * 8), 0) << bits << " bits, " << n;
        if (bits < 1 || bits > 8) continue;  // the stream is that of codes
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(get_code(stream.data(), bits, i), static_cast<uint64_t>(x[static_cast<size_t>(i)]) - static_cast<uint64_t>(least));
        }
      }
    }
  }
}

TEST(Narrow, RangesGiveTheSameBytes) {
  Random random(64);
  for (const int bits : {0, 1, 3, 7, 8, 13, 31, 33, 57, 63, 64}) {
    const std::vector<int64_t> x = integers(1003, -5, bits, random);
    Guarded whole(code_bytes(1003, bits)), parts(code_bytes(1003, bits));
    narrow(x.data(), -5, bits, whole.data(), 0, 1003);
    narrow(x.data(), -5, bits, parts.data(), 504, 1003);
    narrow(x.data(), -5, bits, parts.data(), 0, 504);
    ASSERT_EQ(parts.bytes(), whole.bytes()) << bits;
    ASSERT_TRUE(parts.intact());
    std::vector<int64_t> back(1003);
    widen(whole.data(), -5, bits, back.data(), 104, 611);
    for (size_t i = 0; i < back.size(); ++i) ASSERT_EQ(back[i], i < 104 || i >= 611 ? 0 : x[i]) << bits << ' ' << i;
  }
}

}  // namespace
}  // namespace satchel::test
