#include "satchel/graph/csr.h"

#include <algorithm>
#include <cstring>

#include "satchel/core/error.h"
#include "satchel/core/number.h"
#include "satchel/graph/csr_build.h"
#include "satchel/kernels/sparse.h"

namespace satchel {
using namespace csr_parts;
namespace {

constexpr const char* kOp = "csr";
constexpr int64_t kMostNodes = (int64_t{1} << 31) - 1;  // columns are int32

template <class Value>
std::string placed(const Value& value, int64_t place) {
  std::ostringstream text;
  text << value << " at position " << place;
  return text.str();
}

void check_size(int64_t size, const char* name) {
  if (size < 0 || size > kMostNodes) fail(kOp, std::string(name) + " must be 0 to 2147483647", size);
}

/// Defined, one line of values, on the CPU or on CUDA.
void check_line(const at::Tensor& t, const std::string& name) {
  if (!t.defined()) fail(kOp, name + " must be defined", "an undefined tensor");
  if (t.layout() != at::kStrided) fail(kOp, name + " must be strided", t.layout());
  if (!t.is_cpu() && !t.is_cuda()) fail(kOp, name + " must be on cpu or cuda", t.device());
  if (t.dim() != 1) fail(kOp, name + " must have one dimension", t.sizes());
}

at::Tensor indices_of(const at::Tensor& t, const char* name) {
  check_line(t, name);
  if (t.scalar_type() != at::kInt && t.scalar_type() != at::kLong) {
    fail(kOp, std::string(name) + " must be int32 or int64", c10::toString(t.scalar_type()));
  }
  return t.to(at::kCPU, at::kLong).contiguous();
}

template <class Index>
void check_range(const Index* index, int64_t count, int64_t size, const char* name) {
  const int64_t bad = first_where(count, [&](int64_t i) { return index[i] < 0 || index[i] >= size; });
  if (bad < count) fail(kOp, std::string(name) + " must be at least 0 and below " + std::to_string(size), placed(index[bad], bad));
}

void check_start(const int64_t* start, int64_t rows, int64_t entries) {
  if (start[0] != 0) fail(kOp, "start must begin with 0", placed(start[0], 0));
  const int64_t bad = first_where(rows, [&](int64_t i) { return start[i + 1] < start[i]; });
  if (bad < rows) fail(kOp, "start must never fall, from " + std::to_string(start[bad]), placed(start[bad + 1], bad + 1));
  if (start[rows] != entries) fail(kOp, "start must end with the number of entries, " + std::to_string(entries), placed(start[rows], rows));
}

void check_finite(const at::Tensor& value) {
  const float* v = value.const_data_ptr<float>();
  const int64_t bad = first_where(value.numel(), [&](int64_t i) { return !is_finite(v[i]); });
  if (bad < value.numel()) fail(kOp, "value must be finite in float32", placed(v[bad], bad));
}

/// A float32 copy on the CPU; undefined stays undefined.
at::Tensor values_of(const at::Tensor& value, int64_t entries) {
  if (!value.defined()) return {};
  check_line(value, "value");
  if (value.scalar_type() != at::kFloat && value.scalar_type() != at::kDouble) {
    fail(kOp, "value must be float32 or float64", c10::toString(value.scalar_type()));
  }
  if (value.numel() != entries) fail(kOp, "value must hold " + std::to_string(entries) + ", one an entry", value.numel());
  at::Tensor out = value.detach().to(at::kCPU, at::kFloat, false, true).contiguous();
  check_finite(out);
  return out;
}

/// Equal neighbours as one entry, their values added in double.
Csr merged(const Csr& a) {
  const Entries in(a);
  Csr out = by_rows(a.rows, a.columns, in.value != nullptr, [&](int64_t i, const auto& put) {
    for (int64_t e = in.start[i]; e < in.start[i + 1];) {
      const int32_t to = in.column[e];
      double sum = 0;
      for (; e < in.start[i + 1] && in.column[e] == to; ++e) sum += in.at(e);
      put(to, static_cast<float>(sum));
    }
  });
  if (out.value.defined()) check_finite(out.value);
  return out;
}

template <class T>
at::Tensor tensor_of(const std::vector<T>& values) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, c10::CppTypeToScalarType<T>::value);
  if (!values.empty()) std::memcpy(out.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return out;
}

void check_array(const at::Tensor& t, const char* name, at::ScalarType type, int64_t count) {
  check_line(t, name);
  if (t.scalar_type() != type) fail(kOp, std::string(name) + " must be " + c10::toString(type), c10::toString(t.scalar_type()));
  if (t.numel() != count) fail(kOp, std::string(name) + " must hold " + std::to_string(count) + " values", t.numel());
  if (!t.is_contiguous()) fail(kOp, std::string(name) + " must be contiguous", t.strides());
}

}  // namespace

namespace csr_parts {

at::Tensor distinct_indices(const at::Tensor& given, int64_t size, const char* name) {
  at::Tensor index = indices_of(given, name);
  const int64_t* at = index.const_data_ptr<int64_t>();
  check_range(at, index.numel(), size, name);
  std::vector<bool> seen(static_cast<size_t>(size));
  for (int64_t i = 0; i < index.numel(); ++i) {
    if (seen[static_cast<size_t>(at[i])]) fail(kOp, std::string(name) + " must be distinct", placed(at[i], i));
    seen[static_cast<size_t>(at[i])] = true;
  }
  return index;
}

Csr checked(const Csr& a) {
  check_size(a.rows, "rows");
  check_size(a.columns, "columns");
  check_array(a.start, "start", at::kLong, a.rows + 1);
  check_line(a.column, "column");
  check_array(a.column, "column", at::kInt, a.column.numel());
  if (a.value.defined()) check_array(a.value, "value", at::kFloat, a.entries());
  if (a.row_scale.defined()) check_array(a.row_scale, "row_scale", at::kFloat, a.rows);
  if (a.column_scale.defined()) check_array(a.column_scale, "column_scale", at::kFloat, a.columns);
  Csr out = to_device(a, at::kCPU);
  const Entries in(out);
  check_start(in.start, a.rows, a.entries());
  check_range(in.column, a.entries(), a.columns, "column");
  return out;
}

void check_square(const Csr& a) {
  if (a.rows != a.columns) {
    fail(kOp, "a graph's matrix must be square", std::to_string(a.rows) + " rows and " + std::to_string(a.columns) + " columns");
  }
}

Csr flipped(const Csr& a) {
  const Entries in(a);
  Csr out = grouped(a.columns, a.rows, a.value, a.entries(), [&](const auto& put) {
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t e = in.start[i]; e < in.start[i + 1]; ++e) put(in.column[e], i, e);
    }
  });
  out.row_scale = a.column_scale;
  out.column_scale = a.row_scale;
  return out;
}

bool rises(const Csr& a) {
  const Entries in(a);
  const auto falls = [&](int64_t i) { return !std::is_sorted(in.column + in.start[i], in.column + in.start[i + 1]); };
  return first_where(a.rows, falls) == a.rows;
}

Csr unscaled(const Csr& a) {
  if (!a.row_scale.defined() && !a.column_scale.defined()) return a;
  const Entries in(a);
  const float* row = a.row_scale.defined() ? a.row_scale.const_data_ptr<float>() : nullptr;
  const float* column = a.column_scale.defined() ? a.column_scale.const_data_ptr<float>() : nullptr;
  Csr out = made(a.rows, a.columns, a.start, a.column, at::empty({a.entries()}, at::kFloat));
  float* value = out.value.mutable_data_ptr<float>();
  at::parallel_for(0, a.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t e = in.start[i]; e < in.start[i + 1]; ++e) {
        const double left = row == nullptr ? 1.0 : row[i], right = column == nullptr ? 1.0 : column[in.column[e]];
        value[e] = static_cast<float>(left * in.at(e) * right);
      }
    }
  });
  check_finite(out.value);
  return out;
}

namespace {

std::vector<int32_t> group_rows(const int64_t* start, int64_t rows) {
  std::vector<int32_t> group;
  int64_t sum = 0, first = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t entries = start[i + 1] - start[i];
    if (i == 0 || sum + entries > kGroupEntries || i - first == kGroupRows) {
      group.push_back(static_cast<int32_t>(i));
      first = i;
      sum = 0;
    }
    sum += entries;
  }
  group.push_back(static_cast<int32_t>(rows));
  return group;
}

struct GroupOrder {
  std::vector<int32_t> group;
  int64_t large = 0;
};

GroupOrder order_of(const std::vector<int32_t>& group, const int64_t* start) {
  std::vector<int32_t> large, others;
  const auto entries = [&](int32_t g) {
    const auto at = static_cast<size_t>(g);
    return start[group[at + 1]] - start[group[at]];
  };
  for (int32_t g = 0; g + 1 < static_cast<int32_t>(group.size()); ++g) {
    if (entries(g) <= kStretch) (entries(g) > kGroupEntries ? large : others).push_back(g);
  }
  const auto has_more = [&](int32_t a, int32_t b) { return entries(a) > entries(b); };
  std::stable_sort(large.begin(), large.end(), has_more);
  GroupOrder order{std::move(large)};
  order.large = static_cast<int64_t>(order.group.size());
  for (auto from = others.begin(); from != others.end();) {
    const auto to = from + std::min<int64_t>(kGroupWindow, others.end() - from);
    std::stable_sort(from, to, has_more);
    from = to;
  }
  order.group.insert(order.group.end(), others.begin(), others.end());
  return order;
}

}  // namespace

Csr finished(Csr a) {
  const int64_t* start = a.start.const_data_ptr<int64_t>();
  std::vector<int32_t> group = group_rows(start, a.rows);
  a.group_row = tensor_of(group);
  const GroupOrder order = order_of(group, start);
  a.group_order = tensor_of(order.group);
  a.large_groups = order.large;
  a.group_list = std::make_shared<const std::vector<int32_t>>(std::move(group));
  std::vector<int32_t> row;
  std::vector<int64_t> first = {0};
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t entries = start[i + 1] - start[i];
    if (entries <= kStretch) continue;
    row.push_back(static_cast<int32_t>(i));
    first.push_back(first.back() + (entries + kStretch - 1) / kStretch);
  }
  a.long_row = tensor_of(row);
  a.long_start = tensor_of(first);
  a.long_stretches = first.back();
  std::vector<LongRow> list;
  for (size_t i = 0; i < row.size(); ++i) list.push_back({row[i], first[i]});
  list.push_back({a.rows, first.back()});
  a.long_list = std::make_shared<const std::vector<LongRow>>(std::move(list));
  return a;
}

Csr with_diagonal(const Csr& a, bool present) {
  check_square(a);
  const Csr plain = unscaled(a);
  const Entries in(plain);
  return by_rows(a.rows, a.columns, in.value != nullptr, [&](int64_t i, const auto& put) {
    bool due = present;
    for (int64_t e = in.start[i]; e < in.start[i + 1]; ++e) {
      const int32_t to = in.column[e];
      if (due && to > i) {
        put(static_cast<int32_t>(i), 1.0f);
        due = false;
      }
      if (to != i) put(to, in.at(e));
    }
    if (due) put(static_cast<int32_t>(i), 1.0f);
  });
}

}  // namespace csr_parts

Csr csr_from_coo(const at::Tensor& row, const at::Tensor& column, int64_t rows, int64_t columns, const at::Tensor& value) {
  check_size(rows, "rows");
  check_size(columns, "columns");
  const at::Tensor r = indices_of(row, "row"), c = indices_of(column, "column");
  const int64_t entries = r.numel();
  if (c.numel() != entries) fail(kOp, "column must hold as many as row, " + std::to_string(entries), c.numel());
  const int64_t *from = r.const_data_ptr<int64_t>(), *to = c.const_data_ptr<int64_t>();
  check_range(from, entries, rows, "row");
  check_range(to, entries, columns, "column");
  const Csr by_column = grouped(columns, rows, values_of(value, entries), entries, [&](const auto& put) {
    for (int64_t e = 0; e < entries; ++e) put(to[e], from[e], e);
  });
  return finished(merged(flipped(by_column)));
}

Csr csr_from_csr(const at::Tensor& start, const at::Tensor& column, int64_t columns, const at::Tensor& value) {
  check_size(columns, "columns");
  const at::Tensor s = indices_of(start, "start"), c = indices_of(column, "column");
  const int64_t rows = s.numel() - 1, entries = c.numel();
  if (rows < 0) fail(kOp, "start must hold 1 value or more", s.numel());
  check_size(rows, "rows");
  check_start(s.const_data_ptr<int64_t>(), rows, entries);
  check_range(c.const_data_ptr<int64_t>(), entries, columns, "column");
  return finished(made(rows, columns, s.clone(), c.to(at::kInt), values_of(value, entries)));
}

Csr transposed(const Csr& a) {
  const Csr in = checked(a);
  return to_device(finished(flipped(in)), a.device());
}

Csr made_symmetric(const Csr& a) {
  Csr one = checked(a);
  check_square(one);
  one.value = one.row_scale = one.column_scale = at::Tensor();
  const Csr other = flipped(one);
  if (!rises(one)) one = flipped(other);
  const Entries x(one), y(other);
  // Two rising lists become one, without repeats.
  Csr both = by_rows(a.rows, a.columns, false, [&](int64_t i, const auto& put) {
    int64_t e = x.start[i], f = y.start[i];
    const int64_t e_end = x.start[i + 1], f_end = y.start[i + 1];
    while (e < e_end || f < f_end) {
      const int32_t to = f == f_end || (e < e_end && x.column[e] < y.column[f]) ? x.column[e] : y.column[f];
      put(to, 1.0f);
      while (e < e_end && x.column[e] == to) ++e;
      while (f < f_end && y.column[f] == to) ++f;
    }
  });
  return to_device(finished(std::move(both)), a.device());
}

Csr with_self_loops(const Csr& a) {
  const Csr in = checked(a);
  return to_device(finished(with_diagonal(in, true)), a.device());
}

Csr without_self_loops(const Csr& a) {
  const Csr in = checked(a);
  return to_device(finished(with_diagonal(in, false)), a.device());
}

}  // namespace satchel
