#include "satchel/graph/csr.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <map>
#include <set>

#include "tests/graph/csr_common.h"

namespace satchel {
namespace {

using namespace csr_test;

TEST(Csr, PairsInAnyOrderAreSortedAndMerged) {
  struct Size {
    int64_t rows, columns, count;
  };
  for (const auto& [rows, columns, count] :
       {Size{1, 1, 0}, {1, 1, 3}, {7, 5, 1}, {5, 7, 40}, {64, 65, 255}, {257, 3, 5000}, {3, 20000, 400}}) {
    const Pairs pairs = random_pairs(rows, columns, count, static_cast<uint32_t>(rows + count));
    std::mt19937 random(1);
    std::vector<float> value;
    for (int64_t e = 0; e < count; ++e) value.push_back(static_cast<float>(random() % 64) - 31.0f);  // sums of small integers are exact
    std::map<std::pair<int64_t, int64_t>, float> truth;
    for (size_t e = 0; e < pairs.size(); ++e) truth[pairs[e]] += value[e];
    const Csr plain = from(pairs, rows, columns), valued = from(pairs, rows, columns, floats(value));
    ASSERT_EQ(plain.entries(), static_cast<int64_t>(truth.size()));
    EXPECT_FALSE(plain.value.defined());
    EXPECT_TRUE(at::equal(plain.start, valued.start));
    EXPECT_TRUE(at::equal(plain.column, valued.column));
    std::vector<int64_t> start = {0};
    size_t e = 0;
    for (const auto& [pair, sum] : truth) {  // by row, then by column
      while (static_cast<int64_t>(start.size()) <= pair.first) start.push_back(static_cast<int64_t>(e));
      EXPECT_EQ(list<int32_t>(plain.column)[e], pair.second);
      EXPECT_EQ(valued.value.const_data_ptr<float>()[e], sum);
      ++e;
    }
    start.resize(static_cast<size_t>(rows) + 1, static_cast<int64_t>(e));
    EXPECT_EQ(list<int64_t>(plain.start), start);
    expect_long_rows(plain);
  }
}

TEST(Csr, EmptyGraphs) {
  for (const int64_t nodes : {0, 1, 5}) {
    const Csr a = from({}, nodes, nodes);
    EXPECT_EQ(a.entries(), 0);
    EXPECT_EQ(a.start.numel(), nodes + 1);
    EXPECT_EQ(made_symmetric(a).entries(), 0);
    EXPECT_EQ(with_self_loops(a).entries(), nodes);
    EXPECT_EQ(mean_adjacency(a).transpose.entries(), 0);
    EXPECT_EQ(gcn_adjacency(a).nodes(), nodes);
    expect_long_rows(transposed(a));
  }
}

TEST(Csr, IndexTypesAndStridesGiveTheSame) {
  const at::Tensor wide = at::tensor({2, 9, 0, 9, 2, 9, 1, 9}, at::kLong).view({4, 2});
  const at::Tensor row = wide.select(1, 0), column = longs({1, 0, 3, 3});  // every other value
  const Csr a = csr_from_coo(row, column, 3, 4), b = csr_from_coo(row.to(at::kInt), ints({1, 0, 3, 3}), 3, 4);
  EXPECT_EQ(list<int32_t>(a.column), (std::vector<int32_t>{0, 3, 1, 3}));
  EXPECT_TRUE(at::equal(a.start, b.start) && at::equal(a.column, b.column));
  const Csr f = csr_from_coo(row, column, 3, 4, floats({1, 2, 3, 4})),
            d = csr_from_coo(row, column, 3, 4, floats({1, 2, 3, 4}).to(at::kDouble).set_requires_grad(true));
  EXPECT_TRUE(at::equal(f.value, d.value));
  EXPECT_FALSE(d.value.requires_grad());
}

TEST(Csr, ArraysAreKeptInOrderAndCopied) {
  const at::Tensor start = longs({0, 3, 3, 5}), column = ints({2, 0, 2, 1, 1}), value = floats({1, 2, 3, 4, 5});
  const Csr a = csr_from_csr(start, column, 3, value);
  start.mutable_data_ptr<int64_t>()[3] = 99;
  column.mutable_data_ptr<int32_t>()[0] = 99;
  value.mutable_data_ptr<float>()[0] = 99;
  EXPECT_EQ(list<int64_t>(a.start), (std::vector<int64_t>{0, 3, 3, 5}));
  EXPECT_EQ(list<int32_t>(a.column), (std::vector<int32_t>{2, 0, 2, 1, 1}));
  EXPECT_EQ(list<float>(a.value), (std::vector<float>{1, 2, 3, 4, 5}));
  const Csr t = transposed(a);
  EXPECT_EQ(list<int64_t>(t.start), (std::vector<int64_t>{0, 1, 3, 5}));
  EXPECT_EQ(list<int32_t>(t.column), (std::vector<int32_t>{0, 2, 2, 0, 0}));
  EXPECT_EQ(list<float>(t.value), (std::vector<float>{2, 4, 5, 1, 3}));
}

TEST(Csr, LongRowsAreListed) {
  std::vector<int64_t> start = {0}, column;
  for (const int64_t n : {0, 255, 256, 257, 1, 512, 513, 2000}) {
    for (int64_t j = 0; j < n; ++j) column.push_back(j);
    start.push_back(static_cast<int64_t>(column.size()));
  }
  const Csr a = csr_from_csr(longs(start), ints(column), 2000);
  EXPECT_EQ(list<int32_t>(a.long_row), (std::vector<int32_t>{3, 5, 6, 7}));
  EXPECT_EQ(list<int64_t>(a.long_start), (std::vector<int64_t>{0, 2, 4, 7, 15}));
  const Csr star = made_symmetric(from(
      [] {
        Pairs rays;
        for (int64_t j = 1; j < 700; ++j) rays.emplace_back(0, j);
        return rays;
      }(),
      700, 700));
  expect_long_rows(star);
  EXPECT_EQ(star.long_row.numel(), 1);
  for (const Csr& m : {transposed(a), with_self_loops(star), without_self_loops(star), gcn_adjacency(star).transpose}) expect_long_rows(m);
}

TEST(Csr, TransposedIsTheTranspose) {
  Csr a = from(random_pairs(19, 33, 200, 3), 19, 33, floats(std::vector<float>(200, 0.5f)));
  a.row_scale = at::ones({19}).mul_(3);
  a.column_scale = at::ones({33}).mul_(0.25);
  const Csr t = transposed(a), back = transposed(t);
  expect_near(dense(t), flip(dense(a), 33));
  EXPECT_TRUE(at::equal(back.start, a.start) && at::equal(back.column, a.column) && at::equal(back.value, a.value));
  EXPECT_TRUE(shared(back.row_scale, a.row_scale));
}

TEST(Csr, SymmetricHasBothDirectionsOnce) {
  for (const bool sorted : {true, false}) {
    const Pairs pairs = random_pairs(40, 40, 300, 5);
    std::set<std::pair<int64_t, int64_t>> truth;
    std::vector<int64_t> count(41), column;
    for (const auto& [i, j] : pairs) truth.insert({{i, j}, {j, i}});
    Csr a = from(pairs, 40, 40, floats(std::vector<float>(300, 2)));
    if (!sorted) {  // as pairs come, with repeats
      for (int64_t i = 0; i < 40; ++i) {
        for (const auto& [from, to] : pairs) {
          if (from == i) column.push_back(to);
        }
        count[static_cast<size_t>(i) + 1] = static_cast<int64_t>(column.size());
      }
      a = csr_from_csr(longs(count), ints(column), 40);
    }
    const Csr both = made_symmetric(a);
    EXPECT_EQ(both.entries(), static_cast<int64_t>(truth.size()));
    EXPECT_FALSE(both.value.defined());
    const Dense d = dense(both);
    for (const auto& [i, j] : truth) EXPECT_EQ(d[static_cast<size_t>(i)][static_cast<size_t>(j)], 1);
  }
}

TEST(Csr, SelfLoopsOnceOrNever) {
  // Row 0 has its loop twice, row 1 none, row 2 only its loop, row 3 nothing; row 1 is not in order.
  const at::Tensor start = longs({0, 3, 5, 6, 6}), column = ints({0, 2, 0, 3, 0, 2});
  const Csr a = csr_from_csr(start, column, 4), v = csr_from_csr(start, column, 4, floats({5, 6, 7, 8, 9, 4}));
  EXPECT_EQ(list<int32_t>(with_self_loops(a).column), (std::vector<int32_t>{0, 2, 1, 3, 0, 2, 3}));
  EXPECT_EQ(list<int64_t>(with_self_loops(a).start), (std::vector<int64_t>{0, 2, 5, 6, 7}));
  EXPECT_EQ(list<float>(with_self_loops(v).value), (std::vector<float>{1, 6, 1, 8, 9, 1, 1}));
  EXPECT_EQ(list<int32_t>(without_self_loops(a).column), (std::vector<int32_t>{2, 3, 0}));
  EXPECT_EQ(list<float>(without_self_loops(v).value), (std::vector<float>{6, 8, 9}));
  EXPECT_EQ(list<int64_t>(without_self_loops(a).start), (std::vector<int64_t>{0, 1, 3, 3, 3}));
}

TEST(Csr, EveryIndexIsChecked) {
  const auto coo = [](std::vector<int64_t> row, std::vector<int64_t> column, int64_t rows, int64_t columns) {
    return error_of([&] { csr_from_coo(longs(row), longs(column), rows, columns); });
  };
  const auto csr = [](std::vector<int64_t> start, std::vector<int64_t> column, int64_t columns) {
    return error_of([&] { csr_from_csr(longs(start), longs(column), columns); });
  };
  EXPECT_EQ(coo({0, 3}, {0, 0}, 3, 3), "[csr] row must be at least 0 and below 3, got 3 at position 1");
  EXPECT_EQ(coo({0, -1}, {0, 0}, 3, 3), "[csr] row must be at least 0 and below 3, got -1 at position 1");
  EXPECT_EQ(coo({0, 1}, {int64_t{1} << 32, 0}, 3, 3), "[csr] column must be at least 0 and below 3, got 4294967296 at position 0");
  EXPECT_EQ(coo({0}, {0}, 0, 3), "[csr] row must be at least 0 and below 0, got 0 at position 0");
  EXPECT_EQ(coo({0}, {0, 1}, 3, 3), "[csr] column must hold as many as row, 1, got 2");
  EXPECT_EQ(coo({}, {}, -1, 3), "[csr] rows must be 0 to 2147483647, got -1");
  EXPECT_EQ(coo({}, {}, 3, int64_t{1} << 31), "[csr] columns must be 0 to 2147483647, got 2147483648");
  EXPECT_EQ(csr({}, {}, 3), "[csr] start must hold 1 value or more, got 0");
  EXPECT_EQ(csr({1, 2}, {0, 0}, 3), "[csr] start must begin with 0, got 1 at position 0");
  EXPECT_EQ(csr({0, 2, 1, 3}, {0, 0, 0}, 3), "[csr] start must never fall, from 2, got 1 at position 2");
  EXPECT_EQ(csr({0, 2, 2}, {0, 0, 0}, 3), "[csr] start must end with the number of entries, 3, got 2 at position 2");
  EXPECT_EQ(csr({0, 2, 4}, {0, 0, 0}, 3), "[csr] start must end with the number of entries, 3, got 4 at position 2");
  EXPECT_EQ(csr({0, 2}, {0, 3}, 3), "[csr] column must be at least 0 and below 3, got 3 at position 1");
  EXPECT_EQ(csr({0, 2}, {-7, 0}, 3), "[csr] column must be at least 0 and below 3, got -7 at position 0");
  // The first of several, wherever threads meet: one bad index in each half of 100,000.
  std::vector<int64_t> many(100000, 1);
  many[70001] = many[30007] = 5;
  EXPECT_EQ(coo(many, many, 5, 9), "[csr] row must be at least 0 and below 5, got 5 at position 30007");
}

TEST(Csr, TensorsAreChecked) {
  const at::Tensor one = longs({0});
  const auto coo = [&](const at::Tensor& row, const at::Tensor& value = {}) {
    return error_of([&] { csr_from_coo(row, one, 1, 1, value); });
  };
  EXPECT_EQ(coo({}), "[csr] row must be defined, got an undefined tensor");
  EXPECT_EQ(coo(one.to(at::kFloat)), "[csr] row must be int32 or int64, got Float");
  EXPECT_EQ(coo(one.view({1, 1})), "[csr] row must have one dimension, got [1, 1]");
  EXPECT_EQ(coo(one.to(at::kMeta)), "[csr] row must be on cpu or cuda, got meta");
  EXPECT_EQ(coo(one, one), "[csr] value must be float32 or float64, got Long");
  EXPECT_EQ(coo(one, floats({1, 2})), "[csr] value must hold 1, one an entry, got 2");
  EXPECT_EQ(coo(one, floats({std::nanf("")})), "[csr] value must be finite in float32, got nan at position 0");
  EXPECT_EQ(coo(one, floats({-INFINITY})), "[csr] value must be finite in float32, got -inf at position 0");
  EXPECT_EQ(coo(one, at::ones({1}, at::kDouble).mul_(1e300)), "[csr] value must be finite in float32, got inf at position 0");
  const float big = std::numeric_limits<float>::max();
  EXPECT_EQ(error_of([&] {
              csr_from_coo(longs({0, 0}), longs({0, 0}), 1, 1, floats({big, big}));
            }),
            "[csr] value must be finite in float32, got inf at position 0");
}

TEST(Csr, MatricesMadeByHandAreChecked) {
  EXPECT_EQ(error_of([] { transposed(Csr{}); }), "[csr] start must be defined, got an undefined tensor");
  EXPECT_EQ(error_of([] { bytes_of(adjacency(Csr{})); }), "[csr] start must be defined, got an undefined tensor");
  Csr a = from({{0, 1}, {1, 0}}, 2, 2);
  a.column = ints({1, 7});
  for (const auto& run : {&transposed, &made_symmetric, &with_self_loops, &without_self_loops}) {
    EXPECT_EQ(error_of([&] { run(a); }), "[csr] column must be at least 0 and below 2, got 7 at position 1");
  }
  for (const auto& run : {static_cast<Adjacency (*)(const Csr&)>(&adjacency), &mean_adjacency, &gcn_adjacency}) {
    EXPECT_EQ(error_of([&] { run(a); }), "[csr] column must be at least 0 and below 2, got 7 at position 1");
  }
  const Csr wide = from({{0, 1}}, 2, 3);
  for (const auto& run : {&made_symmetric, &with_self_loops, &without_self_loops}) {
    EXPECT_EQ(error_of([&] { run(wide); }), "[csr] a graph's matrix must be square, got 2 rows and 3 columns");
  }
  a = from({{0, 1}}, 2, 2);
  a.row_scale = at::ones({3});
  EXPECT_EQ(error_of([&] { mean_adjacency(a); }), "[csr] row_scale must hold 2 values, got 3");
  a.row_scale = at::ones({2}, at::kDouble);
  EXPECT_EQ(error_of([&] { mean_adjacency(a); }), "[csr] row_scale must be Float, got Double");
}

}  // namespace
}  // namespace satchel
