// The sparse product, emulated on the CPU: to the bit the scalar kernel's, also in parts of rows.
#include "satchel/kernels/cuda/cuda.h"
#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

/// A matrix with the lists that the GPU needs, as kernels/sparse.h has them.
struct Matrix {
  int64_t rows, columns;
  std::vector<int64_t> start = {0}, long_start = {0};
  std::vector<int32_t> column, long_row, group = {0}, order;
  int64_t large = 0;
  Floats value, row_scale, column_scale;

  Matrix(int64_t row_count, int64_t column_count, Random& random) : rows(row_count), columns(column_count) {
    const int64_t hubs = random.below(3);
    int64_t in_group = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t entries = random.one_in(30) && hubs > 0 ? random.below(1100) : random.one_in(4) ? 0 : random.below(30);
      for (int64_t e = 0; e < entries; ++e) column.push_back(static_cast<int32_t>(random.below(columns))), value.push_back(random.normal());
      start.push_back(start.back() + entries);
      row_scale.push_back(random.normal());
      if (r > 0 && (in_group + entries > kGroupEntries || r - group.back() == kGroupRows))
        group.push_back(static_cast<int32_t>(r)), in_group = 0;
      in_group += entries;
      if (entries <= kStretch) continue;
      long_row.push_back(static_cast<int32_t>(r));
      long_start.push_back(long_start.back() + ceil_div(entries, kStretch));
    }
    group.push_back(static_cast<int32_t>(rows));
    const auto of_group = [&](size_t g) { return start[static_cast<size_t>(group[g + 1])] - start[static_cast<size_t>(group[g])]; };
    for (size_t g = 0; g + 1 < group.size(); ++g) {  // large ones first, the others in any order
      if (of_group(g) > kStretch) continue;
      const int64_t at = of_group(g) > kGroupEntries ? large++ : large + random.below(static_cast<int64_t>(order.size()) - large + 1);
      order.insert(order.begin() + at, static_cast<int32_t>(g));
    }
    for (int64_t c = 0; c < columns; ++c) column_scale.push_back(random.normal());
  }

  Sparse view(bool values, bool scales, bool ordered) const {
    Sparse s;
    s.rows = rows, s.columns = columns, s.start = start.data(), s.column = column.data();
    if (values) s.value = value.data();
    if (scales) s.row_scale = row_scale.data(), s.column_scale = column_scale.data();
    s.long_rows = static_cast<int64_t>(long_row.size()), s.long_stretches = long_start.back();
    s.long_row = long_row.data(), s.long_start = long_start.data();
    s.groups = static_cast<int64_t>(group.size()) - 1, s.group_row = group.data();
    if (ordered) s.ordered_groups = static_cast<int64_t>(order.size()), s.large_groups = large, s.group_order = order.data();
    return s;
  }
  Sparse part(Sparse s, int64_t first, int64_t last) const {
    s.start += first, s.rows = last - first, s.first_row = first;
    s.group_order = nullptr, s.ordered_groups = s.large_groups = 0;
    if (s.row_scale != nullptr) s.row_scale += first;
    const auto from = std::upper_bound(group.begin(), group.end(), first) - 1, to = std::lower_bound(from, group.end(), last);
    s.group_row += from - group.begin(), s.groups = to - from;
    const auto a = std::lower_bound(long_row.begin(), long_row.end(), first) - long_row.begin(),
               b = std::lower_bound(long_row.begin(), long_row.end(), last) - long_row.begin();
    s.long_rows = b - a, s.long_row += a, s.long_start += a;
    s.first_stretch = long_start[static_cast<size_t>(a)];
    s.long_stretches = long_start[static_cast<size_t>(b)] - s.first_stretch;
    return s;
  }
};

TEST(EmulatedSparse, ProductIsTheScalarKernels) {
  Random random(99);
  const int64_t widths[] = {1, 2, 3, 4, 8, 12, 16, 40, 47, 64, 100, 136}, lengths[] = {1, 5, 33, 200};
  for (int trial = 0; trial < 150; ++trial) {
    const Matrix m(random.pick(lengths), random.pick(lengths), random);
    const int64_t width = random.pick(widths), wider = width + (random.one_in(3) ? 1 + random.below(8) : 0);
    const DType type = kTypes[trial % 3];
    const Sparse all = m.view(random.one_in(2), random.one_in(2), random.one_in(2));
    SCOPED_TRACE(std::to_string(m.rows) + " x " + std::to_string(m.columns) + ", " + std::to_string(m.column.size()) + " entries, width " +
                 std::to_string(width) + " of " + std::to_string(wider) + ", " + std::to_string(m.long_row.size()) + " long rows, " +
                 name_of(type));
    Floats v;
    for (int64_t i = 0; i < m.columns * wider; ++i) v.push_back(random.normal());
    const Bytes x = stored(v, type);
    v = floats_of(x, type);
    Floats dense, y(static_cast<size_t>(m.rows * width)), beside;
    for (int64_t i = 0; i < m.columns * width; ++i) dense.push_back(v[static_cast<size_t>(i / width * wider + i % width)]);
    kScalar.multiply(all, dense.data(), width, y.data(), 0, m.rows);
    const bool adds = random.one_in(2);
    for (int64_t i = 0; i < m.rows * width; ++i) beside.push_back(random.normal());
    const Bytes plus = stored(beside, type);
    if (adds) {
      for (int64_t i = 0; i < m.rows * width; ++i) y[static_cast<size_t>(i)] = load(plus.data(), type, i) + y[static_cast<size_t>(i)];
    }
    const int64_t first = random.one_in(2) ? 0 : random.below(m.rows),
                  last = first == 0 ? m.rows : first + 1 + random.below(m.rows - first);
    const Sparse a = first == 0 ? all : m.part(all, first, last);
    Placed from(x, shift_of(type, random)), to((last - first) * width * size_of(type), shift_of(type, random));
    Placed other(slice(plus, type, first * width, last * width), shift_of(type, random)),
        scratch(4 * cuda::multiply_scratch_values(a, width));
    cuda::multiply(a, {type, width, from.data(), wider, to.data(), width, adds ? other.data() : nullptr, width}, scratch.floats(), nullptr);
    ASSERT_TRUE(from.intact() && to.intact() && scratch.intact());
    ASSERT_TRUE(same(to.bytes(), slice(stored(y, type), type, first * width, last * width), type));
  }
}

}  // namespace
}  // namespace satchel::test
