#include "satchel/core/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace satchel {
namespace {

const int64_t kSizes[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 600, 1000};

TEST(Grid, BlocksPartitionTheValues) {
  for (const int64_t values : kSizes) {
    for (const int64_t block : {1, 2, 3, 8, 255, 256, 5000}) {
      for (const int64_t span : {values, int64_t{1}, int64_t{5}, int64_t{300}, int64_t{5000}}) {
        const Grid grid{values, block, span};
        int64_t at = 0;
        for (int64_t b = 0; b < grid.blocks(); ++b) {
          ASSERT_EQ(grid.begin(b), at);
          ASSERT_GT(grid.end(b), at);
          ASSERT_LE(grid.end(b) - at, block);
          for (int64_t i = at; i < grid.end(b); ++i) {
            ASSERT_EQ(grid.block_of(i), b);
            ASSERT_EQ(i / span, at / span) << "no block crosses a span";
          }
          at = grid.end(b);
          // A block is short only where its span or the tensor ends.
          ASSERT_TRUE(at - grid.begin(b) == block || at == values || at % span == 0);
        }
        ASSERT_EQ(at, values) << values << ' ' << block << ' ' << span;
      }
    }
  }
}

TEST(Grid, MoreThan32Bits) {
  const int64_t values = (int64_t{1} << 33) + 5;
  const Grid whole{values, 256, values}, spans{values, 256, 1000};
  EXPECT_EQ(whole.blocks(), (int64_t{1} << 25) + 1);
  EXPECT_EQ(whole.begin(whole.blocks() - 1), int64_t{1} << 33);
  EXPECT_EQ(whole.end(whole.blocks() - 1), values);
  EXPECT_EQ(spans.end(spans.blocks() - 1), values);
  EXPECT_EQ(spans.block_of(values - 1), spans.blocks() - 1);
  EXPECT_EQ(code_bytes(values, 3), (int64_t{1} << 33) / 8 * 3 + 2);
}

TEST(Layout, CodesRoundTripAndStayInTheirBytes) {
  std::mt19937 random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t values : kSizes) {
      const int64_t bytes = code_bytes(values, bits);
      ASSERT_EQ(bytes, (values * bits + 7) / 8);
      std::vector<uint8_t> codes(static_cast<size_t>(bytes + 4));
      for (int64_t i = bytes; i < bytes + 4; ++i) codes[static_cast<size_t>(i)] = 0xa5;
      std::vector<uint32_t> want(static_cast<size_t>(values));
      for (int64_t i = 0; i < values; ++i) {
        want[static_cast<size_t>(i)] = random() & ((1u << bits) - 1);
        put_code(codes.data(), bits, i, want[static_cast<size_t>(i)]);
      }
      for (int64_t i = 0; i < values; ++i) ASSERT_EQ(get_code(codes.data(), bits, i), want[static_cast<size_t>(i)]);
      for (int64_t i = bytes; i < bytes + 4; ++i) ASSERT_EQ(codes[static_cast<size_t>(i)], 0xa5) << "guard";
    }
  }
}

TEST(Layout, ThePictureOfTheHeader) {
  uint8_t two[1] = {}, three[3] = {};
  for (int i = 0; i < 4; ++i) put_code(two, 2, i, static_cast<uint32_t>(i));
  EXPECT_EQ(two[0], 0b11'10'01'00);
  put_code(three, 3, 2, 0b110);  // bits 6, 7, 8
  EXPECT_EQ(three[0], 0b10'000'000);
  EXPECT_EQ(three[1], 0b1);
}

TEST(Layout, PartsFollowEachOther) {
  for (const int64_t values : kSizes) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const HeaderType header : {HeaderType::bf16, HeaderType::f32}) {
        const Grid grid{values, 64, values};
        const int64_t codes = code_bytes(values, bits), headers = (values + 63) / 64 * (header == HeaderType::bf16 ? 4 : 8);
        const Layout plain = layout_of(grid, bits, header);
        EXPECT_EQ(plain.codes, 0);
        EXPECT_EQ(plain.headers % 16, 0);
        EXPECT_GE(plain.headers, codes);
        EXPECT_LT(plain.headers, codes + 16);
        EXPECT_EQ(plain.total, plain.headers + headers);
        const Layout low = layout_of(grid, bits, header, 10), side = layout_of(grid, bits, header, 0, 3);
        EXPECT_EQ(low.means % 16, 0);
        EXPECT_LT(low.means, plain.total + 16);
        EXPECT_GE(low.means, plain.total);
        EXPECT_EQ(low.total, low.means + 10 * 2);
        EXPECT_EQ(side.channels % 16, 0);
        EXPECT_EQ(side.total, side.channels + 3 * 16);
      }
    }
  }
}

// b + 32/G bits a value (theory.md 3): 2.125 at 2 bits and blocks of 256.
TEST(Layout, BitsPerValue) {
  const int64_t values = 169343 * 256;
  EXPECT_EQ(layout_of({values, 256, values}, 2, HeaderType::bf16).total * 8, values * 2 + values / 256 * 32);
  EXPECT_EQ(layout_of({values, 256, values}, 3, HeaderType::f32).total * 8, values * 3 + values / 256 * 64);
}

}  // namespace
}  // namespace satchel
