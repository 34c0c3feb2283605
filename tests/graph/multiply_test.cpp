// A·x of tensors on the CPU: near the dense product in double, the same bits for any number of threads, every rule named.
#include <ATen/Parallel.h>

#include "../tensor/reference.h"
#include "satchel/graph/csr.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;
using reference::same;

/// A random matrix by hand: row 1 is a hub, row 2 is empty.
Csr random_csr(int64_t rows, int64_t columns, int64_t entries, int parts) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{31});
  at::Tensor row = at::randint(0, rows, {entries}, generator, at::TensorOptions(at::kLong));
  row = at::where(row.eq(2), at::ones_like(row), row);
  row = std::get<0>(at::cat({row, at::ones({entries / 4}, at::kLong)}).sort());
  Csr a;
  a.rows = rows;
  a.columns = columns;
  a.start = at::cat({at::zeros({1}, at::kLong), at::bincount(row, {}, rows).cumsum(0)});
  a.column = at::randint(0, columns, {row.numel()}, generator, at::TensorOptions(at::kInt));
  if ((parts & 1) != 0) a.value = normal({row.numel()}, 32);
  if ((parts & 2) != 0) a.row_scale = normal({rows}, 33);
  if ((parts & 4) != 0) a.column_scale = normal({columns}, 34);
  return a;
}

at::Tensor dense(const Csr& a) {
  const at::Tensor row = at::repeat_interleave(a.start.diff());
  const at::Tensor value = a.value.defined() ? a.value.to(at::kDouble) : at::ones({a.entries()}, at::kDouble);
  at::Tensor m = at::zeros({a.rows, a.columns}, at::kDouble).index_put_({row, a.column.to(at::kLong)}, value, true);
  if (a.row_scale.defined()) m = m * a.row_scale.to(at::kDouble).unsqueeze(1);
  if (a.column_scale.defined()) m = m * a.column_scale.to(at::kDouble);
  return m;
}

Csr absolute(Csr a) {
  for (at::Tensor* t : {&a.value, &a.row_scale, &a.column_scale}) {
    if (t->defined()) *t = t->abs();
  }
  return a;
}

TEST(MultiplyTensor, IsTheDenseProduct) {
  for (int parts = 0; parts < 8; ++parts) {
    const Csr a = random_csr(300, 200, 4000, parts);
    for (const int64_t width : {0, 1, 16, 40, 128, 200}) {
      const at::Tensor x = normal({200, width}, 35), y = multiply(a, x);
      ASSERT_EQ(y.sizes(), (at::IntArrayRef{300, width}));
      // A row has at most n = 1,300 entries: n + n/256 + 3 roundings of 2^−24 of Σ|w||x| (kernels/sparse.h).
      const at::Tensor bound = dense(absolute(a)).mm(x.to(at::kDouble).abs()) * (1310 * 0x1p-24);
      EXPECT_TRUE(((y - dense(a).mm(x.to(at::kDouble))).abs() <= bound).all().item<bool>()) << parts << ", width " << width;
    }
  }
}

TEST(MultiplyTensor, OfFloat16IsTheDenseProductRounded) {
  for (const int parts : {0, 2, 7}) {
    const Csr a = random_csr(300, 200, 4000, parts);
    for (const int64_t width : {1, 40, 128}) {
      const at::Tensor x = normal({200, width}, 35).to(at::kHalf), y = multiply(a, x), wide = x.to(at::kDouble);
      ASSERT_EQ(y.scalar_type(), at::kHalf);
      // The float32 sum's bound from above, and one rounding to float16: 2^−11 of the result, or 2^−25.
      const at::Tensor want = dense(a).mm(wide), off = dense(absolute(a)).mm(wide.abs()) * (1310 * 0x1p-24);
      const at::Tensor bound = off + (want.abs() + off) * 0x1p-11 + 0x1p-25;
      EXPECT_TRUE(((y.to(at::kDouble) - want).abs() <= bound).all().item<bool>()) << parts << ", width " << width;
    }
  }
}

TEST(MultiplyTensor, SameBitsForAnyThreadsAndStrides) {
  const Csr a = random_csr(3000, 2000, 50000, 7);
  const at::Tensor x = normal({2000, 96}, 36);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor y = multiply(a, x);
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(same(multiply(a, x), y)) << threads;
  }
  at::set_num_threads(before);
  EXPECT_TRUE(same(multiply(a, x.t().contiguous().t()), y));
  EXPECT_FALSE(multiply(a, x.detach().requires_grad_()).requires_grad());
}

TEST(MultiplyTensor, EmptyMatrices) {
  Csr a;
  a.columns = 5;
  a.start = at::zeros({1}, at::kLong);
  a.column = at::zeros({0}, at::kInt);
  EXPECT_EQ(multiply(a, normal({5, 3}, 1)).sizes(), (at::IntArrayRef{0, 3}));
  a.rows = 4;
  a.columns = 0;
  a.start = at::zeros({5}, at::kLong);
  EXPECT_TRUE(at::equal(multiply(a, at::zeros({0, 3})), at::zeros({4, 3})));
}

TEST(MultiplyTensor, BadInputIsNamed) {
  const Csr a = random_csr(10, 20, 50, 7);
  const at::Tensor x = normal({20, 3}, 37);
  const auto with = [&](auto change) {
    Csr bad = a;
    change(bad);
    return [bad, x] { multiply(bad, x); };
  };
  expect_error([&] { multiply(Csr{}, x); }, "[multiply] matrix must have start and column");
  expect_error([&] { multiply(a, at::Tensor()); }, "[multiply] tensor must be defined");
  expect_error([&] { multiply(a, x.to(at::kInt)); }, "[multiply] x must be float32, float16 or bfloat16, got Int");
  expect_error([&] { multiply(a, x.narrow(0, 0, 19)); }, "[multiply] x must have 20 rows, got [19, 3]");
  expect_error([&] { multiply(a, x.view({20, 3, 1})); }, "[multiply] x must have 20 rows");
  expect_error(with([](Csr& m) { m.rows = 11; }), "[multiply] start must be one line of 12 numbers, got [11]");
  expect_error(with([](Csr& m) { m.column = m.column.to(at::kLong); }), "[multiply] column must be Int, got Long");
  expect_error(with([](Csr& m) { m.value = m.value.narrow(0, 1, 3); }), "[multiply] value must be one line of");
  expect_error(with([](Csr& m) { m.row_scale = m.row_scale.to(at::kMeta); }), "[multiply] row_scale must be on the matrix's device");
  expect_error(with([](Csr& m) { m.column_scale = m.row_scale; }), "[multiply] column_scale must be one line of 20 numbers, got [10]");
}

}  // namespace
}  // namespace satchel
