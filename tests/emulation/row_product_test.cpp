// Rows by weights in one pass, emulated on the CPU: sums in double.
#include "satchel/kernels/cuda/row_product.h"

#include "tests/emulation/norm_common.h"

namespace satchel::test {
namespace {

/// A matrix of numbers of a type, rows `stride` numbers apart.
struct Matrix {
  int64_t rows, columns, stride;
  Bytes memory;
  DType type;

  Matrix(int64_t rows, int64_t columns, int64_t more, DType type, Random& random)
      : rows(rows), columns(columns), stride(columns + more), memory(gradient(rows * stride, type, random)), type(type) {}
  double at(int64_t r, int64_t c) const { return static_cast<double>(load(memory.data(), type, r * stride + c)); }
};

struct Case {
  int64_t rows, columns, depth[2];  // depth 0: no second factor
};

void expect_product(const Case& c, DType type, bool by_depth, Random& random) {
  const int count = c.depth[1] == 0 ? 1 : 2;
  const int64_t more = random.one_in(2) ? 8 : 0;
  std::vector<Matrix> a, b;
  std::vector<Placed> rows, weights;
  cuda::RowProductSides s;
  s.type = type, s.count = count, s.rows = c.rows, s.columns = c.columns;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const int64_t depth = c.depth[i];
    a.emplace_back(c.rows, depth, more, type, random);
    b.emplace_back(by_depth ? depth : c.columns, by_depth ? c.columns : depth, more, type, random);
    rows.emplace_back(a[i].memory), weights.emplace_back(b[i].memory);
  }
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    s.a[i] = rows[i].data(), s.a_stride[i] = a[i].stride, s.depth[i] = c.depth[i];
    s.b[i] = weights[i].data(), s.by_depth[i] = by_depth ? b[i].stride : 1, s.by_column[i] = by_depth ? 1 : b[i].stride;
  }
  const Matrix bias(1, c.columns, 0, type, random);
  Placed added(bias.memory);
  if (random.one_in(2)) s.bias = added.data();
  s.to_stride = c.columns + 8;
  const Bytes before(static_cast<size_t>(2 * c.rows * s.to_stride), 0x5a);
  Placed to(before);
  s.to = to.data();
  ASSERT_TRUE(cuda::row_product_fits(s));
  cuda::row_product(s, nullptr);
  ASSERT_TRUE(to.intact());
  int64_t depth = 0;
  for (const int64_t d : c.depth) depth += (d + 63) / 64 * 64;
  const Bytes result = to.bytes();
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t n = 0; n < s.to_stride; ++n) {
      if (n >= c.columns) {
        ASSERT_EQ(result[static_cast<size_t>(2 * (r * s.to_stride + n))], 0x5a) << "between the rows";
        continue;
      }
      double sum = s.bias == nullptr ? 0 : bias.at(0, n), size = std::abs(sum);
      for (size_t i = 0; i < a.size(); ++i) {
        for (int64_t k = 0; k < c.depth[i]; ++k) {
          const double term = a[i].at(r, k) * (by_depth ? b[i].at(k, n) : b[i].at(n, k));
          sum += term, size += std::abs(term);
        }
      }
      // A rounding for each of the depth and one for the bias, then that to 16 bits.
      const double bound = size * static_cast<double>(depth + 1) * kUnit * 1.01, found = load(result.data(), type, r * s.to_stride + n);
      ASSERT_NEAR(found, sum, bound + rounding_of(type, std::abs(sum) + bound)) << r << ", " << n;
    }
  }
}

TEST(EmulatedRowProduct, OneOrTwoFactors) {
  const LargeShared gpu;
  Random random(77);
  const Case cases[] = {{1, 8, {8, 0}},         {127, 128, {64, 64}}, {129, 40, {40, 40}},    {300, 136, {72, 0}},
                        {130, 128, {128, 128}}, {513, 64, {16, 200}}, {260, 256, {256, 256}}, {128, 80, {128, 0}}};
  for (const Case& c : cases) {
    for (const DType type : {DType::f16, DType::bf16}) {
      for (const bool by_depth : {false, true}) {
        SCOPED_TRACE(std::to_string(c.rows) + " rows of " + std::to_string(c.depth[0]) + " and " + std::to_string(c.depth[1]) + " to " +
                     std::to_string(c.columns) + (by_depth ? ", by depth" : ""));
        expect_product(c, type, by_depth, random);
      }
    }
  }
}

/// More tiles than thread blocks: each goes round its stages.
TEST(EmulatedRowProduct, ManyTiles) {
  const LargeShared gpu;
  Random random(78);
  expect_product({128 * 9 + 5, 264, {16, 136}}, DType::f16, true, random);
  expect_product({128 * 7, 8, {8, 8}}, DType::bf16, false, random);
}

TEST(EmulatedRowProduct, RefusesWhatItCannotCopyByEights) {
  LargeShared gpu;
  alignas(16) uint16_t memory[256] = {};
  cuda::RowProductSides s;
  s.type = DType::bf16, s.rows = 4, s.columns = 16;
  s.a[0] = s.b[0] = s.to = memory, s.a_stride[0] = s.depth[0] = 8, s.by_depth[0] = 16, s.by_column[0] = 1, s.to_stride = 16;
  EXPECT_TRUE(cuda::row_product_fits(s));
  const auto refused = [&](auto change) {
    cuda::RowProductSides other = s;
    change(other);
    return !cuda::row_product_fits(other);
  };
  EXPECT_TRUE(refused([](auto& o) { o.type = DType::f32; }));
  EXPECT_TRUE(refused([](auto& o) { o.columns = 12; }));
  EXPECT_TRUE(refused([](auto& o) { o.depth[0] = 7; }));
  EXPECT_TRUE(refused([](auto& o) { o.a_stride[0] = 9; }));
  EXPECT_TRUE(refused([](auto& o) { o.to_stride = 17; }));
  EXPECT_TRUE(refused([](auto& o) { o.by_column[0] = 2; }));
  EXPECT_TRUE(refused([&](auto& o) { o.a[0] = memory + 1; }));
  EXPECT_TRUE(refused([](auto& o) { o.rows = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.depth[0] = 960; }));  // its weights take 255 KiB
  EXPECT_TRUE(refused([](auto&) { ::emulation::gpu = ::emulation::kFewProcessors; }));
}

}  // namespace
}  // namespace satchel::test
