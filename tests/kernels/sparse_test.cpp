// The sparse product: near a sum in double, the same bits on every kernel, and the order of kernels/sparse.h.
#include <cmath>

#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

constexpr int64_t kWidths[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40, 47, 63, 64, 65, 100, 127, 128, 129, 200, 257};
constexpr int64_t kRowEntries[] = {0, 0, 1, 2, 3, 5, 8, 13, 31, 33, 255, 256, 257};

struct Matrix {
  int64_t columns;
  std::vector<int64_t> start = {0};
  std::vector<int32_t> column;
  Floats value, row_scale, column_scale;

  int64_t rows() const { return static_cast<int64_t>(start.size()) - 1; }
  int64_t entries() const { return static_cast<int64_t>(column.size()); }
  void add_row(int64_t count, Random& random) {
    for (int64_t e = 0; e < count; ++e) column.push_back(static_cast<int32_t>(random.below(columns)));
    start.push_back(entries());
  }
  Sparse sparse() const {
    Sparse a;
    a.rows = rows();
    a.columns = columns;
    a.start = start.data();
    a.column = column.data();
    a.value = value.empty() ? nullptr : value.data();
    a.row_scale = row_scale.empty() ? nullptr : row_scale.data();
    a.column_scale = column_scale.empty() ? nullptr : column_scale.data();
    return a;
  }
  double weight(int64_t e) const {
    const auto at = static_cast<size_t>(e);
    return (value.empty() ? 1.0 : double{value[at]}) * (column_scale.empty() ? 1.0 : double{column_scale[static_cast<size_t>(column[at])]});
  }
};

Floats normals(int64_t n, Random& random) {
  Floats x(static_cast<size_t>(n));
  for (float& v : x) v = random.normal();
  return x;
}

/// Rows of every length, one of three stretches and a bit among them. Bits of `parts`: values, row scales, column scales.
Matrix matrix_of(int parts, Random& random) {
  Matrix m{1 + random.below(200), {0}, {}, {}, {}, {}};
  for (int64_t i = random.below(8); i > 0; --i) m.add_row(random.pick(kRowEntries), random);
  m.add_row(3 * kStretch + 1 + random.below(kStretch), random);
  for (int64_t i = random.below(8); i > 0; --i) m.add_row(random.pick(kRowEntries), random);
  if ((parts & 1) != 0) m.value = normals(m.entries(), random);
  if ((parts & 2) != 0) m.row_scale = normals(m.rows(), random);
  if ((parts & 4) != 0) m.column_scale = normals(m.columns, random);
  return m;
}

Bytes multiply(const CpuKernels& k, const Matrix& m, const Floats& x, int64_t width) {
  Guarded y(m.rows() * width * 4);
  k.multiply(m.sparse(), x.data(), width, reinterpret_cast<float*>(y.data()), 0, m.rows());
  EXPECT_TRUE(y.intact()) << k.name << " wrote past y";
  return y.bytes();
}

TEST(Multiply, IsTheSumInDouble) {
  Random random(71);
  for (int parts = 0; parts < 8; ++parts) {
    for (const int64_t width : kWidths) {
      const Matrix m = matrix_of(parts, random);
      const Floats x = normals(m.columns * width, random), y = floats_of(multiply(kScalar, m, x, width), DType::f32);
      for (int64_t i = 0; i < m.rows(); ++i) {
        const double scale = m.row_scale.empty() ? 1.0 : double{m.row_scale[static_cast<size_t>(i)]};
        const int64_t begin = m.start[static_cast<size_t>(i)], end = m.start[static_cast<size_t>(i) + 1];
        for (int64_t j = 0; j < width; ++j) {
          double sum = 0, size = 0;
          for (int64_t e = begin; e < end; ++e) {
            const double term = m.weight(e) * double{x[static_cast<size_t>(m.column[static_cast<size_t>(e)] * width + j)]};
            sum += term;
            size += std::abs(term);
          }
          // Roundings of 2^−24 each that a term goes through at most: its weight, n sums, the stretches', the scale; one more covers
          // the products of errors while n² < 2^24.
          const double roundings = 1.0 + double(end - begin) + double((end - begin) / kStretch) + 1.0 + 1.0;
          ASSERT_NEAR(y[static_cast<size_t>(i * width + j)], scale * sum, roundings * 0x1p-24 * std::abs(scale) * size)
              << "row " << i << " of " << end - begin << " entries, column " << j << " of " << width << ", parts " << parts;
        }
      }
    }
  }
}

TEST(Multiply, SameBitsOnEveryKernel) {
  Random random(72);
  for (int parts = 0; parts < 8; ++parts) {
    for (const int64_t width : kWidths) {
      const Matrix m = matrix_of(parts, random);
      Floats x = normals(m.columns * width, random);
      for (float& v : x) v = random.one_in(30) ? std::ldexp(v, static_cast<int>(random.below(60)) - 30) : v;
      const Bytes truth = multiply(kScalar, m, x, width);
      for (const CpuKernels* k : supported_kernels()) ASSERT_EQ(multiply(*k, m, x, width), truth) << k->name << ", width " << width;
    }
  }
}

class EachMultiply : public EachKernel {};
EACH_KERNEL(EachMultiply);

TEST_P(EachMultiply, RangesOfRowsWriteNothingElse) {
  const CpuKernels* const k = GetParam();
  Random random(73);
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t width = random.pick(kWidths);
    const Matrix m = matrix_of(7, random);
    const Floats x = normals(m.columns * width, random);
    const Bytes truth = multiply(kScalar, m, x, width);
    const int64_t first = random.below(m.rows() + 1), last = first + random.below(m.rows() - first + 1);
    Guarded y(m.rows() * width * 4);
    Bytes expected = y.bytes();
    std::copy(truth.begin() + first * width * 4, truth.begin() + last * width * 4, expected.begin() + first * width * 4);
    k->multiply(m.sparse(), x.data(), width, reinterpret_cast<float*>(y.data()), first, last);
    ASSERT_EQ(y.bytes(), expected) << k->name;
    ASSERT_TRUE(y.intact()) << k->name;
  }
}

/// 2^24 swallows every 1 that is added to it alone, but not the 256 ones of the next stretch.
TEST_P(EachMultiply, StretchesAreSummedApart) {
  const CpuKernels* const k = GetParam();
  Matrix m{2, {0}, {}, {}, {}, {}};
  m.column.assign(2 * kStretch + 1, 1);
  m.column[0] = 0;
  m.start.push_back(m.entries());
  const Floats x = {0x1p24f, 1.0f};
  EXPECT_EQ(floats_of(multiply(*k, m, x, 1), DType::f32)[0], 0x1p24f + 256.0f) << k->name;  // the last 1, alone in its stretch, is lost too
}

TEST_P(EachMultiply, EmptyRowsAreZero) {
  const CpuKernels* const k = GetParam();
  Random random(74);
  Matrix m{5, {0, 0, 0, 0}, {}, {}, {}, {}};
  m.row_scale = {-1.0f, 2.0f, 0.0f};
  for (const int64_t width : kWidths) {
    for (const float v : floats_of(multiply(*k, m, normals(5 * width, random), width), DType::f32)) ASSERT_EQ(v, 0.0f) << k->name;
  }
}

TEST_P(EachMultiply, NotANumberStaysVisibleInItsColumn) {
  const CpuKernels* const k = GetParam();
  Random random(75);
  for (const int64_t width : kWidths) {
    if (width == 0) continue;
    Matrix m = matrix_of(7, random);
    for (float& v : m.value) v = random.one_in(2) ? 0.0f : v;  // a weight of 0 hides nothing
    Floats x = normals(m.columns * width, random);
    const int64_t bad = m.column[static_cast<size_t>(random.below(m.entries()))], column = random.below(width);
    x[static_cast<size_t>(bad * width + column)] = random.one_in(2) ? NAN : INFINITY;
    const Floats y = floats_of(multiply(*k, m, x, width), DType::f32);
    for (int64_t i = 0; i < m.rows(); ++i) {
      const auto from = m.column.begin() + m.start[static_cast<size_t>(i)], to = m.column.begin() + m.start[static_cast<size_t>(i) + 1];
      const bool reads = std::find(from, to, static_cast<int32_t>(bad)) != to;
      for (int64_t j = 0; j < width; ++j) {
        ASSERT_EQ(is_finite(y[static_cast<size_t>(i * width + j)]), !(reads && j == column)) << k->name << ", width " << width;
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
