// Bit masks and narrowed integers: lossless, any length, any dtype.
#include <limits>

#include "reference.h"

namespace satchel {
namespace {

using reference::normal;

TEST(Mask, IsXAboveZero) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const int64_t n : {0, 1, 7, 8, 9, 511, 512, 513, 100003}) {
      const at::Tensor x = normal({n}, 1, type);
      const PackedMask mask = pack_mask(x);
      EXPECT_EQ(mask.bits.numel(), (n + 7) / 8);
      EXPECT_TRUE(at::equal(unpack_mask(mask), x > 0));
    }
  }
  const at::Tensor odd = at::tensor({0.0f, -0.0f, NAN, INFINITY, -INFINITY, 1.0f});
  EXPECT_TRUE(at::equal(unpack_mask(pack_mask(odd)), odd > 0));
}

TEST(Mask, TakesFlagsAndStrides) {
  const at::Tensor x = normal({13, 17}, 2);
  EXPECT_TRUE(at::equal(unpack_mask(pack_mask(x > 0.5)), x > 0.5));
  EXPECT_TRUE(at::equal(unpack_mask(pack_mask(x.t())), x.t() > 0));
  EXPECT_TRUE(at::equal(unpack_mask(pack_mask(x.select(0, 3).expand({4, 17}))), (x.select(0, 3) > 0).expand({4, 17})));
  EXPECT_EQ(unpack_mask(pack_mask(normal({}, 3))).dim(), 0);
}

TEST(Narrow, EveryTypeAndWidthComesBack) {
  for (const at::ScalarType type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    for (const int64_t n : {0, 1, 8, 13, 70001}) {
      for (const int64_t range : {1, 2, 3, 100}) {
        const at::Tensor x = at::randint(range, {n}, at::kLong).to(type);
        const Narrowed narrowed = narrow(x);
        const at::Tensor back = widen(narrowed);
        EXPECT_TRUE(at::equal(back, x));
        EXPECT_EQ(back.scalar_type(), type);
        EXPECT_LE(narrowed.bits, 7);
      }
    }
  }
}

TEST(Narrow, ExtremesAndOffsets) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  const at::Tensor all = at::tensor({kLeast, int64_t{-1}, int64_t{0}, kMost, int64_t{5}});
  EXPECT_EQ(narrow(all).bits, 64);
  EXPECT_TRUE(at::equal(widen(narrow(all)), all));
  const at::Tensor high = at::tensor({kMost, kMost - 3, kMost - 1});
  EXPECT_EQ(narrow(high).bits, 2);
  EXPECT_TRUE(at::equal(widen(narrow(high)), high));
  const at::Tensor same = at::full({3, 5}, -7, at::kInt);
  EXPECT_EQ(narrow(same).bytes.numel(), 0);
  EXPECT_TRUE(at::equal(widen(narrow(same)), same));
  for (int bits = 1; bits < 63; ++bits) {
    const at::Tensor x = at::tensor({int64_t{-3}, (int64_t{1} << bits) - 4, int64_t{-2}}).repeat({11});
    const Narrowed narrowed = narrow(x);
    EXPECT_EQ(narrowed.bits, bits);
    EXPECT_EQ(narrowed.bytes.numel(), (33 * bits + 7) / 8);
    EXPECT_TRUE(at::equal(widen(narrowed), x)) << bits;
  }
}

TEST(Narrow, KnownRangeAndStrides) {
  const at::Tensor x = at::arange(60).view({6, 10}).to(at::kShort);
  const Narrowed narrowed = narrow(x.t(), 0, 63);
  EXPECT_EQ(narrowed.bits, 6);
  EXPECT_TRUE(at::equal(widen(narrowed), x.t()));
  const at::Tensor large = at::arange(5000000, at::kInt) % 1000;  // more than one part at a time
  EXPECT_TRUE(at::equal(widen(narrow(large)), large));
}

}  // namespace
}  // namespace satchel
