#include <ATen/ops/eye.h>

#include <limits>

#include "tests/graph/csr_common.h"

namespace satchel {
namespace {

using namespace csr_test;

TEST(Weighted, BothDirectionsHaveTheMeanOfWhatIsGiven) {
  // 0 → 1 with 2 and 1 → 0 with 4: 3 each. 0 → 2 with 6 alone: 6 each. 1 → 2 twice, with 1 and 0.5, and back with 2.5: (1.5 + 2.5)/2.
  // A loop keeps its own weight. Rows are not in order.
  const Csr a = csr_from_csr(longs({0, 2, 5, 7}), ints({2, 1, 2, 0, 2, 2, 1}), 3, floats({6, 2, 1, 4, 0.5, 8, 2.5}));
  const Csr both = made_symmetric_weighted(a);
  EXPECT_EQ(list<int64_t>(both.start), (std::vector<int64_t>{0, 2, 4, 7}));
  EXPECT_EQ(list<int32_t>(both.column), (std::vector<int32_t>{1, 2, 0, 2, 0, 1, 2}));
  EXPECT_EQ(list<float>(both.value), (std::vector<float>{3, 6, 3, 2, 6, 2, 8}));
  expect_long_rows(both);
}

TEST(Weighted, OnesAndScales) {
  const Pairs pairs = random_pairs(40, 40, 300, 5);
  const Csr plain = made_symmetric(from(pairs, 40, 40));
  // Repeated pairs are merged before: every edge has weight 1.
  const Csr ones = made_symmetric_weighted(csr_from_csr(plain.start, plain.column, 40, at::ones({plain.entries()})));
  EXPECT_TRUE(at::equal(ones.start, plain.start) && at::equal(ones.column, plain.column));
  EXPECT_TRUE(at::equal(ones.value, at::ones({plain.entries()})));
  Csr scaled = from({{0, 1}}, 2, 2);
  scaled.row_scale = floats({3, 1});
  EXPECT_EQ(list<float>(made_symmetric_weighted(scaled).value), (std::vector<float>{3, 3}));
}

TEST(Weighted, IsChecked) {
  EXPECT_EQ(error_of([] { made_symmetric_weighted(Csr{}); }), "[csr] start must be defined, got an undefined tensor");
  EXPECT_EQ(error_of([] {
              made_symmetric_weighted(from({{0, 1}}, 2, 3));
            }),
            "[csr] a graph's matrix must be square, got 2 rows and 3 columns");
  const float most = std::numeric_limits<float>::max();
  const Csr large = csr_from_csr(longs({0, 2, 2}), ints({1, 1}), 2, floats({most, most}));
  EXPECT_EQ(error_of([&] { made_symmetric_weighted(large); }), "[csr] weights of an edge must have a finite sum in float32, got inf");
}

}  // namespace
}  // namespace satchel
