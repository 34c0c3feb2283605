// Small matrices by hand, and their dense form.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/graph/csr.h"
#include "satchel/kernels/sparse.h"
#include "tests/support.h"

namespace satchel::csr_test {

using test::error_of;

using Dense = std::vector<std::vector<double>>;
using Pairs = std::vector<std::pair<int64_t, int64_t>>;

inline at::Tensor longs(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }
inline at::Tensor ints(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong).to(at::kInt); }
inline at::Tensor floats(const std::vector<float>& values) { return at::tensor(values, at::kFloat); }

template <class T>
std::vector<T> list(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), t.const_data_ptr<T>() + t.numel()};
}

inline Dense dense(const Csr& a) {
  Dense out(static_cast<size_t>(a.rows), std::vector<double>(static_cast<size_t>(a.columns)));
  const auto start = list<int64_t>(a.start);
  const auto column = list<int32_t>(a.column);
  for (size_t i = 0; i < out.size(); ++i) {
    for (int64_t e = start[i]; e < start[i + 1]; ++e) {
      const int64_t j = column[static_cast<size_t>(e)];
      double v = a.value.defined() ? a.value.const_data_ptr<float>()[e] : 1.0;
      if (a.row_scale.defined()) v *= a.row_scale.const_data_ptr<float>()[i];
      if (a.column_scale.defined()) v *= a.column_scale.const_data_ptr<float>()[j];
      out[i][static_cast<size_t>(j)] += v;
    }
  }
  return out;
}

inline Dense flip(const Dense& a, int64_t columns) {
  Dense out(static_cast<size_t>(columns), std::vector<double>(a.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) out[j][i] = a[i][j];
  }
  return out;
}

inline void expect_near(const Dense& a, const Dense& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    // Two scales and a value, each rounded once to float32: 3·2^−24 relative, and as much again for a folded product.
    for (size_t j = 0; j < a[i].size(); ++j) EXPECT_NEAR(a[i][j], b[i][j], std::abs(b[i][j]) * 6 * 0x1p-24) << i << ", " << j;
  }
}

inline Pairs random_pairs(int64_t rows, int64_t columns, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Pairs out;
  for (int64_t e = 0; e < count; ++e) out.emplace_back(random() % rows, random() % columns);
  return out;
}

inline Csr from(const Pairs& pairs, int64_t rows, int64_t columns, const at::Tensor& value = {}) {
  std::vector<int64_t> row, column;
  for (const auto& [i, j] : pairs) {
    row.push_back(i);
    column.push_back(j);
  }
  return csr_from_coo(longs(row), longs(column), rows, columns, value);
}

inline void expect_long_rows(const Csr& a) {
  const auto start = list<int64_t>(a.start);
  std::vector<int32_t> row;
  std::vector<int64_t> first = {0};
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t n = start[static_cast<size_t>(i) + 1] - start[static_cast<size_t>(i)];
    if (n <= kStretch) continue;
    row.push_back(static_cast<int32_t>(i));
    first.push_back(first.back() + n / kStretch + (n % kStretch != 0));
  }
  EXPECT_EQ(list<int32_t>(a.long_row), row);
  EXPECT_EQ(list<int64_t>(a.long_start), first);
}

inline bool shared(const at::Tensor& a, const at::Tensor& b) { return a.storage().is_alias_of(b.storage()); }

}  // namespace satchel::csr_test
