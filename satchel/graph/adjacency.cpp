#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>

#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/number.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/csr_build.h"

namespace satchel {
using namespace csr_parts;
namespace {

/// Moves tensors; the same array is moved once.
class Mover {
 public:
  explicit Mover(at::Device device) : device_(device) {
    if (!device.is_cpu() && !device.is_cuda()) fail("csr", "device must be cpu or cuda", device);
  }

  Csr operator()(const Csr& a) {
    Csr to = a;
    if (device_.is_cuda() && a.column_scale.defined() && a.device().is_cpu()) {
      to.value = folded(a);
      to.column_scale = at::Tensor();
    }
    for (at::Tensor* t : {&to.start, &to.column, &to.value, &to.row_scale, &to.column_scale, &to.long_row, &to.long_start, &to.group_row,
                          &to.group_order}) {
      *t = move(*t);
    }
    return to;
  }

 private:
  /// value · column_scale an entry; once for a matrix and a transpose of the same arrays.
  at::Tensor folded(const Csr& a) {
    at::Tensor& value =
        folded_[{a.column.const_data_ptr(), a.value.defined() ? a.value.const_data_ptr() : nullptr, a.column_scale.const_data_ptr()}];
    if (value.defined()) return value;
    const Entries in(a);
    value = at::empty({a.entries()}, at::kFloat);
    float* to = value.mutable_data_ptr<float>();
    const float* scale = a.column_scale.const_data_ptr<float>();
    at::parallel_for(0, a.entries(), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) to[e] = (in.value == nullptr ? 1.0f : in.value[e]) * scale[in.column[e]];
    });
    return value;
  }

  at::Tensor move(const at::Tensor& t) {
    if (!t.defined() || t.device() == device_) return t;
    at::Tensor& moved = moved_[{t.const_data_ptr(), t.numel(), t.scalar_type()}];
    if (!moved.defined()) moved = t.to(device_);
    return moved;
  }

  at::Device device_;
  std::map<std::tuple<const void*, int64_t, at::ScalarType>, at::Tensor> moved_;
  std::map<std::tuple<const void*, const void*, const void*>, at::Tensor> folded_;
};

/// Is Aᵀ's structure A's own? Columns rise in every row. Visits the entries in the order in which a transpose would be written, and
/// compares instead.
bool symmetric(const Csr& a) {
  const Entries in(a);
  std::vector<int64_t> next(in.start, in.start + a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t e = in.start[i]; e < in.start[i + 1]; ++e) {
      const int32_t j = in.column[e];
      const int64_t mirror = next[static_cast<size_t>(j)]++;
      if (mirror >= in.start[j + 1] || in.column[mirror] != i) return false;
    }
  }
  return true;
}

/// With the transpose; arrays that are the same for both are stored once.
Adjacency paired(Csr a) {
  Csr m = finished(std::move(a));
  // Where all values are one, the order within a row does not matter: compare in rising order, then share as it is.
  const bool ordered = rises(m);
  const bool shares = m.rows == m.columns && (ordered || !m.value.defined()) && symmetric(ordered ? m : flipped(flipped(m)));
  if (!shares) {
    Csr t = finished(flipped(m));
    return {std::move(m), std::move(t)};
  }
  Csr t = m;
  std::swap(t.row_scale, t.column_scale);
  if (m.value.defined()) {
    const at::Tensor mirrored = flipped(m).value;
    if (!at::equal(mirrored, m.value)) t.value = mirrored;
  }
  return {std::move(m), std::move(t)};
}

struct RowSum {
  double sum = 0;
  bool zero = true;  // every value is
};

RowSum sum_of(const Entries& in, int64_t i) {
  if (in.value == nullptr) return {static_cast<double>(in.start[i + 1] - in.start[i]), in.start[i + 1] == in.start[i]};
  RowSum out;
  for (int64_t e = in.start[i]; e < in.start[i + 1]; ++e) {
    out.sum += in.value[e];
    out.zero &= in.value[e] == 0.0f;
  }
  return out;
}

/// f(row sum) of every row, 0 for rows of zeros; throws where it is not finite.
template <class Function>
at::Tensor scales(const Csr& a, const char* rule, const Function& f) {
  const Entries in(a);
  at::Tensor out = at::empty({a.rows}, at::kFloat);
  float* scale = out.mutable_data_ptr<float>();
  at::parallel_for(0, a.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowSum row = sum_of(in, i);
      scale[i] = row.zero ? 0.0f : static_cast<float>(f(row.sum));
    }
  });
  const int64_t bad = first_where(a.rows, [&](int64_t i) { return !is_finite(scale[i]); });
  if (bad < a.rows) {
    std::ostringstream got;
    got << sum_of(in, bad).sum << " at position " << bad;
    fail("csr", rule, got.str());
  }
  return out;
}

}  // namespace

Csr to_device(const Csr& a, at::Device device) { return Mover(device)(a); }

Adjacency to_device(const Adjacency& a, at::Device device) {
  Mover move(device);
  return {move(a.matrix), move(a.transpose), a.targets.defined() ? a.targets.to(device) : a.targets};
}

Adjacency adjacency(const Csr& a) {
  Csr m = checked(a);
  return to_device(paired(std::move(m)), a.device());
}

Adjacency mean_adjacency(const Csr& a) {
  Csr m = unscaled(checked(a));
  m.row_scale = scales(m, "row sum must have a finite reciprocal", [](double sum) { return 1.0 / sum; });
  return to_device(paired(std::move(m)), a.device());
}

Adjacency gcn_adjacency(const Csr& a) {
  Csr m = with_diagonal(checked(a), true);
  m.row_scale = scales(m, "degree must be positive", [](double degree) { return 1.0 / std::sqrt(degree); });
  m.column_scale = m.row_scale;
  return to_device(paired(std::move(m)), a.device());
}

Adjacency rows_for(const Adjacency& a, const at::Tensor& nodes) {
  if (a.targets.defined()) fail("csr", "rows_for() takes an adjacency of all nodes", "one of some");
  const at::Tensor chosen = distinct_indices(nodes, a.matrix.rows, "nodes");
  const Csr all = to_device(a.matrix, at::kCPU);
  const Entries in(all);
  const int64_t* node = chosen.const_data_ptr<int64_t>();
  Csr some = by_rows(chosen.numel(), all.columns, in.value != nullptr, [&](int64_t i, const auto& put) {
    for (int64_t e = in.start[node[i]]; e < in.start[node[i] + 1]; ++e) put(in.column[e], in.at(e));
  });
  if (all.row_scale.defined()) some.row_scale = all.row_scale.index_select(0, chosen);
  some.column_scale = all.column_scale;
  some = finished(std::move(some));
  Csr transpose = finished(flipped(some));
  return to_device({std::move(some), std::move(transpose), chosen}, a.matrix.device());
}

int64_t bytes_of(const Adjacency& a) {
  std::set<const void*> seen;
  int64_t bytes = a.targets.defined() ? static_cast<int64_t>(a.targets.nbytes()) : 0;
  for (const Csr* m : {&a.matrix, &a.transpose}) {
    for (const at::Tensor* t : {&m->start, &m->column, &m->value, &m->row_scale, &m->column_scale, &m->long_row, &m->long_start,
                                &m->group_row, &m->group_order}) {
      if (!t->defined() || !seen.insert(t->storage().unsafeGetStorageImpl()).second) continue;
      bytes += static_cast<int64_t>(t->storage().nbytes());
    }
  }
  return bytes;
}

}  // namespace satchel
