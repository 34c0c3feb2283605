// Parts that csr.cpp and adjacency.cpp share. Matrices here are on the CPU. Private to this room.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "satchel/graph/csr.h"

namespace satchel::csr_parts {

constexpr int64_t kGrain = int64_t{1} << 13;  // rows or entries that are worth a thread

/// Read-only view of a matrix; `value` is null where all are one.
struct Entries {
  explicit Entries(const Csr& a)
      : start(a.start.const_data_ptr<int64_t>()),
        column(a.column.const_data_ptr<int32_t>()),
        value(a.value.defined() ? a.value.const_data_ptr<float>() : nullptr) {}
  float at(int64_t e) const { return value == nullptr ? 1.0f : value[e]; }

  const int64_t* start;
  const int32_t* column;
  const float* value;
};

inline Csr made(int64_t rows, int64_t columns, at::Tensor start, at::Tensor column, at::Tensor value = {}) {
  Csr out;
  out.rows = rows;
  out.columns = columns;
  out.start = std::move(start);
  out.column = std::move(column);
  out.value = std::move(value);
  return out;
}

/// First place of 0 … count − 1 where `bad` holds, or count.
template <class Bad>
int64_t first_where(int64_t count, const Bad& bad) {
  const auto search = [&](int64_t begin, int64_t end, int64_t none) {
    for (int64_t i = begin; i < end; ++i) {
      if (bad(i)) return i;
    }
    return none;
  };
  return at::parallel_reduce(0, count, kGrain, count, search, [](int64_t a, int64_t b) { return std::min(a, b); });
}

/// A counting sort: entries by key, in each key in the order they came. `visit(f)` calls f(key, other, place) for every entry, twice
/// the same way; values are those of the places.
template <class Visit>
Csr grouped(int64_t keys, int64_t others, const at::Tensor& value, int64_t entries, const Visit& visit) {
  Csr out = made(keys, others, at::zeros({keys + 1}, at::kLong), at::empty({entries}, at::kInt));
  int64_t* start = out.start.mutable_data_ptr<int64_t>();
  visit([&](int64_t key, int64_t, int64_t) { ++start[key + 1]; });
  std::partial_sum(start, start + keys + 1, start);
  std::vector<int64_t> next(start, start + keys);
  int32_t* column = out.column.mutable_data_ptr<int32_t>();
  if (!value.defined()) {
    visit([&](int64_t key, int64_t other, int64_t) { column[next[static_cast<size_t>(key)]++] = static_cast<int32_t>(other); });
    return out;
  }
  out.value = at::empty({entries}, at::kFloat);
  const float* from = value.const_data_ptr<float>();
  float* to = out.value.mutable_data_ptr<float>();
  visit([&](int64_t key, int64_t other, int64_t place) {
    const int64_t e = next[static_cast<size_t>(key)]++;
    column[e] = static_cast<int32_t>(other);
    to[e] = from[place];
  });
  return out;
}

/// A matrix row by row, in parallel: `emit(i, put)` calls put(column, value) for the entries of row i, twice the same way.
template <class Emit>
Csr by_rows(int64_t rows, int64_t columns, bool valued, const Emit& emit) {
  Csr out = made(rows, columns, at::zeros({rows + 1}, at::kLong), {});
  int64_t* start = out.start.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) emit(i, [&](int32_t, float) { ++start[i + 1]; });
  });
  std::partial_sum(start, start + rows + 1, start);
  out.column = at::empty({start[rows]}, at::kInt);
  if (valued) out.value = at::empty({start[rows]}, at::kFloat);
  int32_t* column = out.column.mutable_data_ptr<int32_t>();
  float* value = valued ? out.value.mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t e = start[i];
      emit(i, [&](int32_t to, float v) {
        column[e] = to;
        if (value != nullptr) value[e] = v;
        ++e;
      });
    }
  });
  return out;
}

/// Indices of 0 to size − 1, none of them twice, as int64 on the CPU; throws `[csr] rule, got value`.
at::Tensor distinct_indices(const at::Tensor& given, int64_t size, const char* name);
/// `a` on the CPU; throws `[csr] rule, got value` unless every array and index fits.
Csr checked(const Csr& a);
/// Throws unless as many rows as columns.
void check_square(const Csr& a);
/// Aᵀ without its list of long rows; columns rise in every row.
Csr flipped(const Csr& a);
/// Do columns rise in every row? Equal ones may follow each other.
bool rises(const Csr& a);
/// Scales multiplied into the values.
Csr unscaled(const Csr& a);
/// Adds the list of long rows.
Csr finished(Csr a);
/// Exactly one (value 1) or no entry on the diagonal, without its list of long rows.
Csr with_diagonal(const Csr& a, bool present);

}  // namespace satchel::csr_parts
