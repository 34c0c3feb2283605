// Rows of a product, a part at a time: the same bits as the whole.
#include <gtest/gtest.h>

#include "../tensor/reference.h"
#include "satchel/core/error.h"
#include "satchel/graph/csr.h"

namespace satchel {
namespace {

TEST(MultiplyRows, GiveTheBitsOfTheWhole) {
  at::manual_seed(3);
  // Row 7 is a hub of several stretches.
  const at::Tensor row = at::cat({at::randint(100, {500}), at::full({900}, 7, at::kLong)}), column = at::randint(2000, {1400});
  const Csr a = csr_from_coo(row, column, 100, 2000, at::randn({1400}));
  const at::Tensor x = at::randn({2000, 24}), whole = multiply(a, x);
  for (const int64_t step : {1, 7, 8, 33, 100}) {
    at::Tensor parts = at::full({100, 24}, -1.0);
    for (int64_t first = 0; first < 100; first += step) {
      const int64_t last = std::min<int64_t>(first + step, 100);
      multiply_rows(a, x, first, last, parts.narrow(0, first, last - first));
    }
    EXPECT_TRUE(at::equal(parts, whole)) << step;
  }
}

TEST(MultiplyPlus, AddsToRowsOfAWiderMatrix) {
  at::manual_seed(5);
  const Csr a = csr_from_coo(at::randint(40, {300}), at::randint(50, {300}), 40, 50, at::randn({300}));
  const at::Tensor x = at::randn({50, 9}).narrow(1, 1, 6), plus = at::randn({40, 9}).narrow(1, 3, 6);
  EXPECT_TRUE(at::equal(multiply_plus(a, x, plus), plus + multiply(a, x)));
  EXPECT_THROW(multiply_plus(a, x, at::randn({40, 5})), Error);
  EXPECT_THROW(multiply_plus(a, x, at::randn({40, 6}, at::kDouble)), Error);
}

TEST(Multiply, SumsHalvesInFloat) {
  at::manual_seed(6);
  const Csr a = csr_from_coo(at::randint(40, {900}), at::randint(50, {900}), 40, 50, at::randn({900}));
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::randn({50, 9}).to(type);
    EXPECT_TRUE(at::equal(multiply(a, x), multiply(a, x.to(at::kFloat)).to(type)));
  }
  EXPECT_THROW(multiply(a, at::randn({50, 9}, at::kDouble)), Error);
}

TEST(MultiplyRows, RefuseWhatDoesNotFit) {
  const Csr a = csr_from_coo(at::arange(4), at::arange(4), 4, 4);
  const at::Tensor x = at::randn({4, 3});
  EXPECT_THROW(multiply_rows(a, x, 2, 5, at::empty({3, 3})), Error);
  EXPECT_THROW(multiply_rows(a, x, 3, 2, at::empty({0, 3})), Error);
  EXPECT_THROW(multiply_rows(a, x, 0, 2, at::empty({3, 3})), Error);
  EXPECT_THROW(multiply_rows(a, at::randn({3, 4}).t(), 0, 2, at::empty({2, 3})), Error);
}

}  // namespace
}  // namespace satchel
