// Sparse matrices by rows, and a graph's adjacency with its transpose.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace satchel {

/// A row of many entries and the number of its first stretch.
struct LongRow {
  int64_t row, stretch;
};

/// Entry (i, j) is row_scale[i]·value·column_scale[j]; what is undefined is all ones. Made by the functions below, which check
/// every index; tensors are on one device.
struct Csr {
  int64_t rows = 0, columns = 0;
  at::Tensor start;                    // int64[rows + 1]
  at::Tensor column;                   // int32[entries]
  at::Tensor value;                    // float32[entries]
  at::Tensor row_scale, column_scale;  // float32
  at::Tensor long_row, long_start;     // rows of many entries, see kernels/sparse.h: int32, int64
  int64_t long_stretches = 0;          // long_start's last number, known without asking a GPU
  at::Tensor group_row, group_order;   // rows that go together, see kernels/sparse.h: int32
  int64_t large_groups = 0;            // at the front of group_order

  // The same on the host, for parts of the matrix.
  std::shared_ptr<const std::vector<LongRow>> long_list;
  std::shared_ptr<const std::vector<int32_t>> group_list;

  int64_t entries() const { return column.numel(); }
  at::Device device() const { return start.device(); }
};

/// From pairs (row, column) in any order; equal pairs are merged, their values added. Indices are int32 or int64 on the CPU.
Csr csr_from_coo(const at::Tensor& row, const at::Tensor& column, int64_t rows, int64_t columns, const at::Tensor& value = {});
/// From CSR arrays as they are: order and repeats within a row are kept.
Csr csr_from_csr(const at::Tensor& start, const at::Tensor& column, int64_t columns, const at::Tensor& value = {});

Csr transposed(const Csr& a);
/// A with every edge in both directions, once each, all ones. Values and scales are dropped.
Csr made_symmetric(const Csr& a);
/// A with every edge in both directions, once each, and its value: of an edge that is given in both directions the mean of the two, of
/// one that is given in one direction its own. Repeats in one direction are added first.
Csr made_symmetric_weighted(const Csr& a);
/// With exactly one (all ones) or no entry on the diagonal.
Csr with_self_loops(const Csr& a);
Csr without_self_loops(const Csr& a);
/// On CUDA column scales are multiplied into the values, which saves an indirect read an entry: the same products.
Csr to_device(const Csr& a, at::Device device);

/// The fixed matrix A of a graph layer and its transpose, made once. A symmetric structure is stored once for both.
struct Adjacency {
  Csr matrix, transpose;
  at::Tensor targets = {};                          // int64: the nodes whose rows A has; undefined: all
  int64_t nodes() const { return matrix.columns; }  // whose x a layer reads
  int64_t outputs() const { return matrix.rows; }   // that it gives
};
/// Any matrix as it is.
Adjacency adjacency(const Csr& a);
/// Rows that average: D⁻¹·A. Rows without entries stay zero.
Adjacency mean_adjacency(const Csr& a);
/// Kipf and Welling's D^−½·(A + I)·D^−½.
Adjacency gcn_adjacency(const Csr& a);
/// The rows of these nodes alone (int32 or int64, each once, in any order), for a layer that reads every node's x and gives the outputs of
/// these. A row's sum is the same to the bit.
Adjacency rows_for(const Adjacency& a, const at::Tensor& nodes);
Adjacency to_device(const Adjacency& a, at::Device device);

/// Bytes it holds in memory; shared arrays once.
int64_t bytes_of(const Adjacency& a);

/// A·x without gradients; x is float32, float16 or bfloat16 (summed in float32), columns × any width, on A's device.
at::Tensor multiply(const Csr& a, const at::Tensor& x);
/// Its rows [first, last) alone, into `out`: (last − first) × x's width, rows without gaps in them, any distance apart. The same bits.
void multiply_rows(const Csr& a, const at::Tensor& x, int64_t first, int64_t last, const at::Tensor& out);
/// plus + A·x. Rows of both may be those of a wider matrix.
at::Tensor multiply_plus(const Csr& a, const at::Tensor& x, const at::Tensor& plus);

}  // namespace satchel
