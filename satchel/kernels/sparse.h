// A sparse matrix by rows, as raw pointers, and the order in which every backend sums a row.
//
//   entry (i, j) = row_scale[i] · value · column_scale[j]       a null pointer stands for all ones
//   y[i] = row_scale[i] · (stretch 0 + stretch 1 + …)           stretches of kStretch entries, added in their order
//   stretch = Σ w·x[column], w = value · column_scale, as fmaf(w, x, sum) from 0 in the entries' order; x alone where w is 1
#pragma once

#include <cstdint>

namespace satchel {

/// Entries of a row that are summed in one go. A longer row's stretches are summed apart, so that a GPU can share a hub out.
constexpr int64_t kStretch = 256;

/// Neighbouring rows that a GPU's team of lanes sums one after the other: as many as have this many entries together, so that teams of
/// a warp end together; a row of more has a group of its own.
constexpr int64_t kGroupEntries = 64, kGroupRows = 32;

/// Groups that are ordered by their entries among themselves: a GPU works on those of a window at about the same time, so that neighbouring
/// rows, which often read the same rows of x, find them in its cache.
constexpr int64_t kGroupWindow = 4096;

struct Sparse {
  int64_t rows = 0, columns = 0;
  const int64_t* start = nullptr;   // rows + 1
  const int32_t* column = nullptr;  // start[rows]
  const float* value = nullptr;
  const float* row_scale = nullptr;
  const float* column_scale = nullptr;
  // Rows of more than kStretch entries, and where each one's stretches begin in a list of all of them; for the GPU.
  int64_t long_rows = 0, long_stretches = 0;
  const int32_t* long_row = nullptr;    // long_rows
  const int64_t* long_start = nullptr;  // long_rows + 1
  int64_t groups = 0;
  const int32_t* group_row = nullptr;  // first row of every group, and where the last one ends: groups + 1
  // Groups of at most kStretch entries, so that those of about as many follow each other: first the rows of more than kGroupEntries. Null:
  // in the order of rows, none of them large.
  int64_t ordered_groups = 0, large_groups = 0;
  const int32_t* group_order = nullptr;  // ordered_groups
  // A part of a matrix: its rows count from 0, the lists' numbers from these. Groups may begin before it and end after it.
  int64_t first_row = 0, first_stretch = 0;
};

}  // namespace satchel
