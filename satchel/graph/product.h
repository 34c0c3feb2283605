// The product of a graph layer, A·x·W: its rules, and A·x by stretches of rows; csr.h has A·x as a whole. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"

namespace satchel {

/// x: nodes × columns of the weight, float32, float16 or bfloat16; weight and bias float32; all on the adjacency's device; bias one
/// number a row of the weight, or undefined.
void check_layer(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op);
void check_layer(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op);

/// Which of A·(x·W) and (A·x)·W moves fewer values? The narrower side where every node has a row, and where some have, what their rows and
/// entries make of it.
bool aggregates_first(const Adjacency& a, int64_t in, int64_t out);

/// Σ over g's rows; 0 where a norm of the batch's own statistics follows (SavePolicy): it takes off what a bias adds to all rows alike.
at::Tensor bias_gradient(const at::Tensor& g, bool norm_follows);

/// A·x as what comes next reads it: a stretch of rows at a time, never whole beside its result. The CPU computes a stretch when it is asked
/// for, while it is in the cache. On CUDA a product by parts takes twice the time of the whole (docs/results.md), so the whole is made
/// first, in memory that the result then writes over, a stretch behind the reader:
///
///   memory   | stretch | A·x … … … … |          back
///            | result … … … … |                 front: rows that were read are free
///
/// Where the writer may write a row over itself and both are as wide, they are one.
class ProductRows {
 public:
  /// `width`: of the result, of x's type; 0: there is none. `in_place`: may the writer of a row write over A·x's?
  ProductRows(const Csr& a, const at::Tensor& x, int64_t width, bool in_place);

  /// Rows [first, last) of A·x in x's type, good until the next call, and until rows from `first` on of the result are written.
  at::Tensor read(int64_t first, int64_t last);

  using Write = std::function<void(int64_t first, int64_t last, const at::Tensor& product, at::Tensor& result)>;
  /// Calls write(first, last, A·x's rows, the result's rows) for stretches of rows [first, last), which were read before. Both may be the
  /// same memory, where the writer works in place.
  void write(int64_t first, int64_t last, const Write& write);
  /// read() and write() for all rows.
  void write_all(const Write& write);

  /// On CUDA it keeps the memory of both alive.
  const at::Tensor& result() const { return result_; }

 private:
  const Csr& a_;
  at::ScalarType type_;
  int64_t stretch_;
  at::Tensor x_, product_, result_;  // the CPU's x and product: float32
};

}  // namespace satchel
