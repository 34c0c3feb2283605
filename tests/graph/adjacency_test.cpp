// The adjacency of a graph layer and its transpose.
#include "tests/graph/csr_common.h"

namespace satchel {
namespace {

using namespace csr_test;

Dense mean_of(Dense a) {
  for (auto& row : a) {
    double sum = 0;
    for (const double v : row) sum += v;
    for (double& v : row) v = sum == 0 ? 0 : v / sum;
  }
  return a;
}

TEST(Adjacency, MeanDividesByTheRowSum) {
  for (const bool valued : {false, true}) {
    std::vector<float> value;
    for (int e = 0; e < 90; ++e) value.push_back(0.25f + static_cast<float>(e % 7));
    const Csr a = from(random_pairs(30, 30, 90, 7), 30, 30, valued ? floats(value) : at::Tensor());
    const Adjacency m = mean_adjacency(a);
    expect_near(dense(m.matrix), mean_of(dense(a)));
    expect_near(dense(m.transpose), flip(mean_of(dense(a)), 30));
    EXPECT_TRUE(shared(m.matrix.row_scale, m.transpose.column_scale));
    EXPECT_FALSE(m.matrix.column_scale.defined() || m.transpose.row_scale.defined());
    expect_near(dense(mean_adjacency(m.matrix).matrix), dense(m.matrix));  // scales count as part of the values
  }
}

TEST(Adjacency, GcnIsKipfAndWellings) {
  for (const bool symmetric : {true, false}) {
    Csr a = from(random_pairs(30, 30, 80, 9), 30, 30);
    if (symmetric) a = made_symmetric(a);
    Dense truth = dense(a);
    std::vector<double> degree;
    for (size_t i = 0; i < truth.size(); ++i) {
      truth[i][i] = 1;
      double sum = 0;
      for (const double v : truth[i]) sum += v;
      degree.push_back(sum);
    }
    for (size_t i = 0; i < truth.size(); ++i) {
      for (size_t j = 0; j < truth.size(); ++j) truth[i][j] /= std::sqrt(degree[i] * degree[j]);
    }
    const Adjacency g = gcn_adjacency(a);
    expect_near(dense(g.matrix), truth);
    expect_near(dense(g.transpose), flip(truth, 30));
    EXPECT_TRUE(shared(g.matrix.row_scale, g.matrix.column_scale) && shared(g.matrix.row_scale, g.transpose.row_scale));
    EXPECT_EQ(shared(g.matrix.column, g.transpose.column), symmetric);
    EXPECT_EQ(shared(g.matrix.start, g.transpose.start), symmetric);
    expect_long_rows(g.matrix);
    expect_long_rows(g.transpose);
  }
}

TEST(Adjacency, SymmetricStructureIsStoredOnce) {
  const Csr a = made_symmetric(from(random_pairs(50, 50, 200, 11), 50, 50));
  const Adjacency m = mean_adjacency(a);
  EXPECT_TRUE(shared(m.matrix.start, m.transpose.start) && shared(m.matrix.column, m.transpose.column));
  EXPECT_TRUE(shared(m.matrix.start, a.start));
  // start, column, the scale, no long row, one 0 before them, the groups of rows and their order.
  EXPECT_EQ(bytes_of(m), 8 * 51 + 4 * a.entries() + 4 * 50 + 0 + 8 + 4 * (m.matrix.group_row.numel() + m.matrix.group_order.numel()));

  // Rows {1, 0}, {0}: the same matrix as its transpose, but not in rising order.
  const Adjacency loose = adjacency(csr_from_csr(longs({0, 2, 3}), ints({1, 0, 0}), 2));
  EXPECT_TRUE(shared(loose.matrix.column, loose.transpose.column));
  EXPECT_EQ(list<int32_t>(loose.matrix.column), (std::vector<int32_t>{1, 0, 0}));

  // A symmetric structure with other values below the diagonal than above: structure once, values twice.
  const Adjacency values = adjacency(csr_from_csr(longs({0, 1, 2}), ints({1, 0}), 2, floats({3, 4})));
  EXPECT_TRUE(shared(values.matrix.column, values.transpose.column));
  EXPECT_EQ(list<float>(values.transpose.value), (std::vector<float>{4, 3}));
  EXPECT_EQ(bytes_of(values), 8 * 3 + 4 * 2 + 2 * (4 * 2) + 8 + 4 * 2 + 4);
  const Adjacency equal = adjacency(csr_from_csr(longs({0, 1, 2}), ints({1, 0}), 2, floats({3, 3})));
  EXPECT_TRUE(shared(equal.matrix.value, equal.transpose.value));

  // Not square: nothing to share.
  const Adjacency wide = adjacency(from({{0, 1}, {1, 0}}, 2, 3));
  EXPECT_EQ(wide.transpose.rows, 3);
  EXPECT_EQ(bytes_of(wide), 8 * 3 + 4 * 2 + 8 + 4 * 2 + 4 + 8 * 4 + 4 * 2 + 8 + 4 * 2 + 4);
}

TEST(Adjacency, RowsOfSomeNodes) {
  for (const bool valued : {false, true}) {
    std::vector<float> value;
    for (int e = 0; e < 90; ++e) value.push_back(0.25f + static_cast<float>(e % 7));
    const Csr a = from(random_pairs(30, 30, 90, 7), 30, 30, valued ? floats(value) : at::Tensor());
    for (const Adjacency& all : {adjacency(a), mean_adjacency(a), gcn_adjacency(a)}) {
      const std::vector<int64_t> nodes = {7, 0, 29, 12};
      const Adjacency some = rows_for(all, longs(nodes));
      Dense want;
      for (const int64_t node : nodes) want.push_back(dense(all.matrix)[static_cast<size_t>(node)]);
      EXPECT_EQ(dense(some.matrix), want);
      EXPECT_EQ(dense(some.transpose), flip(want, 30));
      EXPECT_EQ(some.nodes(), 30);
      EXPECT_EQ(some.outputs(), 4);
      EXPECT_EQ(list<int64_t>(some.targets), nodes);
      EXPECT_EQ(dense(rows_for(all, ints(nodes)).matrix), want);
      expect_long_rows(some.matrix);
      expect_long_rows(some.transpose);
      const at::Tensor x = at::randn({30, 5});
      EXPECT_TRUE(at::equal(multiply(some.matrix, x), multiply(all.matrix, x).index_select(0, longs(nodes))));
    }
  }
  Pairs hub;  // node 1 has more edges than a stretch
  for (int64_t node = 0; node < 700; ++node) {
    hub.emplace_back(1, node);
    hub.emplace_back(node, 1);
  }
  const Adjacency large = mean_adjacency(from(hub, 700, 700));
  const at::Tensor x = at::randn({700, 3}), two = longs({1, 5});
  EXPECT_TRUE(at::equal(multiply(rows_for(large, two).matrix, x), multiply(large.matrix, x).index_select(0, two)));
  const Adjacency all = mean_adjacency(from(random_pairs(30, 30, 90, 7), 30, 30));
  EXPECT_EQ(rows_for(all, at::empty({0}, at::kLong)).outputs(), 0);
  const auto error = [&](const at::Tensor& nodes) { return error_of([&] { rows_for(all, nodes); }); };
  EXPECT_EQ(error(longs({3, 30})), "[csr] nodes must be at least 0 and below 30, got 30 at position 1");
  EXPECT_EQ(error(ints({3, 4, 3})), "[csr] nodes must be distinct, got 3 at position 2");
  EXPECT_EQ(error(floats({3})), "[csr] nodes must be int32 or int64, got Float");
  EXPECT_EQ(error_of([&] { rows_for(rows_for(all, longs({3})), longs({0})); }),
            "[csr] rows_for() takes an adjacency of all nodes, got one of some");
}

TEST(Adjacency, DirectedHasItsOwnTranspose) {
  const Csr a = from({{0, 1}, {1, 2}, {2, 0}}, 3, 3);
  const Adjacency m = adjacency(a);
  EXPECT_FALSE(shared(m.matrix.column, m.transpose.column));
  EXPECT_EQ(list<int32_t>(m.transpose.column), (std::vector<int32_t>{2, 0, 1}));
}

TEST(Adjacency, MovingToWhereItIsKeepsTheArrays) {
  const Adjacency m = gcn_adjacency(from({{0, 1}, {1, 0}}, 2, 2)), same = to_device(m, at::kCPU);
  EXPECT_TRUE(shared(m.matrix.start, same.transpose.start));
  EXPECT_EQ(bytes_of(m), bytes_of(same));
  EXPECT_EQ(error_of([&] { to_device(m, at::kMeta); }), "[csr] device must be cpu or cuda, got meta");
}

TEST(Adjacency, SumsThatHaveNoScaleAreRefused) {
  const auto valued = [](float a, float b) { return csr_from_csr(longs({0, 0, 2}), ints({0, 1}), 2, floats({a, b})); };
  EXPECT_EQ(error_of([&] { mean_adjacency(valued(1, -1)); }), "[csr] row sum must have a finite reciprocal, got 0 at position 1");
  EXPECT_EQ(error_of([&] { mean_adjacency(valued(1e-42f, 0)); }).find("[csr] row sum must have a finite reciprocal, got"), 0u);
  EXPECT_EQ(error_of([&] { gcn_adjacency(valued(-1, 5)); }), "[csr] degree must be positive, got 0 at position 1");
  EXPECT_EQ(error_of([&] { gcn_adjacency(valued(-3, 5)); }), "[csr] degree must be positive, got -2 at position 1");
  expect_near(dense(mean_adjacency(valued(0, 0)).matrix), {{0, 0}, {0, 0}});  // a row of zeros is a row without entries
  expect_near(dense(mean_adjacency(valued(-1, -3)).matrix), {{0, 0}, {0.25, 0.75}});
}

}  // namespace
}  // namespace satchel
