// A·x on CUDA: the bits of the CPU, for every width, every kind of entry, hubs and empty rows.
#include "cuda_fixture.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/csr_build.h"
#include "satchel/kernels/sparse.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// With the lists of rows, as the graph room makes them.
Csr listed(const Csr& a) { return csr_parts::finished(a); }

/// Row 1 is a hub of a quarter of the entries, row 2 is empty, row 3 has exactly one stretch and row 4 one entry more.
Csr random_csr(int64_t rows, int64_t columns, int64_t entries, int parts) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{41});
  const at::Tensor others = at::randint(5, rows, {entries}, generator, at::TensorOptions(at::kLong));
  const auto repeated = [](int64_t row, int64_t times) { return at::full({times}, row, at::kLong); };
  const at::Tensor row = std::get<0>(at::cat({others, repeated(1, entries / 4), repeated(3, kStretch), repeated(4, kStretch + 1)}).sort());
  Csr a;
  a.rows = rows;
  a.columns = columns;
  a.start = at::cat({at::zeros({1}, at::kLong), at::bincount(row, {}, rows).cumsum(0)});
  a.column = at::randint(0, columns, {row.numel()}, generator, at::TensorOptions(at::kInt));
  if ((parts & 1) != 0) a.value = normal({row.numel()}, 42);
  if ((parts & 2) != 0) a.row_scale = normal({rows}, 43);
  if ((parts & 4) != 0) a.column_scale = normal({columns}, 44);
  return a;
}

Csr there(Csr a) {
  for (at::Tensor* t :
       {&a.start, &a.column, &a.value, &a.row_scale, &a.column_scale, &a.long_row, &a.long_start, &a.group_row, &a.group_order}) {
    if (t->defined()) *t = t->cuda();
  }
  return a;
}

TEST_F(Cuda, MultiplyGivesTheBitsOfTheCpu) {
  for (int parts = 0; parts < 8; ++parts) {
    const Csr a = listed(random_csr(2000, 1500, 20000, parts)), gpu = there(a);
    for (const int64_t width : {0,  1,  2,  3,   4,   6,   7,   8,   12,  15,  16,  17,  24,  32,  33,  40, 47,
                                50, 64, 96, 100, 127, 128, 130, 132, 160, 192, 200, 256, 257, 260, 512, 640}) {
      const at::Tensor x = normal({1500, width}, 45), cpu = multiply(a, x);
      EXPECT_TRUE(same(multiply(gpu, x.cuda()).cpu(), cpu)) << "parts " << parts << ", width " << width;
    }
  }
}

TEST_F(Cuda, MultiplyOfMisalignedRows) {
  const Csr a = listed(random_csr(300, 200, 3000, 0));
  const at::Tensor line = normal({1 + 200 * 40}, 46), x = line.narrow(0, 1, 200 * 40).view({200, 40});
  EXPECT_TRUE(same(multiply(there(a), line.cuda().narrow(0, 1, 200 * 40).view({200, 40})).cpu(), multiply(a, x)));
}

TEST_F(Cuda, MultiplyShowsWhatIsNotANumber) {
  const Csr a = listed(random_csr(300, 200, 3000, 7));
  at::Tensor x = normal({200, 40}, 47);
  x[7][11] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(at::equal(multiply(there(a), x.cuda()).cpu().isnan(), multiply(a, x).isnan()));
}

TEST_F(Cuda, MultiplyWithoutEntries) {
  Csr a;
  a.rows = 4;
  a.columns = 5;
  a.start = at::zeros({5}, at::kLong);
  a.column = at::zeros({0}, at::kInt);
  EXPECT_TRUE(at::equal(multiply(there(listed(a)), normal({5, 3}, 48).cuda()).cpu(), at::zeros({4, 3})));
}

TEST_F(Cuda, MultiplyNamesAMissingListOfLongRows) {
  const Csr a = there(random_csr(300, 200, 3000, 0));
  reference::expect_error([&] { multiply(a, normal({200, 8}, 49).cuda()); }, "[multiply] a matrix on CUDA must have its lists");
}

TEST_F(Cuda, MultiplySumsHalvesInFloat) {
  // The float32 sums of the same numbers, rounded once at the end.
  for (const int parts : {0, 2, 7}) {
    const Csr a = listed(random_csr(2000, 1500, 20000, parts)), gpu = there(a);
    for (const int64_t width : {1, 2, 7, 8, 16, 40, 47, 50, 64, 100, 128, 136, 256, 257, 512}) {
      for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
        const at::Tensor x = normal({1500, width}, 45).to(type);
        const at::Tensor expected = multiply(a, x.to(at::kFloat)).to(type);
        EXPECT_TRUE(at::equal(multiply(gpu, x.cuda()).cpu(), expected)) << "parts " << parts << ", width " << width << " " << type;
      }
    }
  }
}

TEST_F(Cuda, ProductsPlusAreTheBitsOfTheCpu) {
  at::manual_seed(6);
  const at::Tensor row = at::cat({at::randint(300, {3000}), at::full({900}, 7, at::kLong), at::full({300}, 8, at::kLong)});
  const Csr a = csr_from_coo(row, at::randint(300, {row.numel()}), 300, 300, at::randn({row.numel()})), gpu = to_device(a, at::kCUDA);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t width : {3, 40, 64, 130}) {
      const at::Tensor wide = at::randn({300, 2 * width}).to(type), x = wide.narrow(1, 0, width), plus = wide.narrow(1, width, width);
      const at::Tensor there = wide.cuda();
      EXPECT_TRUE(at::equal(multiply_plus(gpu, there.narrow(1, 0, width), there.narrow(1, width, width)).cpu(), multiply_plus(a, x, plus)))
          << type << " plus, width " << width;
    }
  }
}

TEST_F(Cuda, MultiplyNamesALongListThatDoesNotFit) {
  Csr a = there(listed(random_csr(300, 200, 3000, 0)));
  a.long_stretches = 0;
  reference::expect_error([&] { multiply(a, normal({200, 8}, 49).cuda()); }, "[multiply] long_stretches must be");
}

TEST_F(Cuda, PartsOfAProductAreTheBitsOfTheWhole) {
  // Rows 1, 40 and 41 are hubs, so that parts begin before, between and after them.
  const auto repeated = [](int64_t row) { return at::full({700}, row, at::kLong); };
  at::manual_seed(5);
  const at::Tensor row = at::cat({at::randint(100, {500}), repeated(1), repeated(40), repeated(41)});
  const Csr a = csr_from_coo(row, at::randint(3000, {row.numel()}), 100, 3000, at::randn({row.numel()}));
  const at::Tensor x = at::randn({3000, 40});
  const at::Tensor whole = multiply(a, x);
  const Csr there = to_device(a, at::kCUDA);
  for (const int64_t step : {1, 8, 33, 40, 41, 100}) {
    const at::Tensor parts = at::full({100, 40}, -1.0, at::kCUDA);
    for (int64_t first = 0; first < 100; first += step) {
      const int64_t last = std::min<int64_t>(first + step, 100);
      multiply_rows(there, x.cuda(), first, last, parts.narrow(0, first, last - first));
    }
    EXPECT_TRUE(at::equal(parts.cpu(), whole)) << step;
  }
}

}  // namespace
}  // namespace satchel
