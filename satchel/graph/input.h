// A data set's features as the first layer reads them. They stand before a step and after it: layers keep references.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "satchel/graph/csr.h"

namespace satchel {

/// What A·X was computed from: it counts for this memory alone, unchanged.
class AggregateSource {
 public:
  AggregateSource() = default;
  AggregateSource(const Csr& a, const at::Tensor& x);

  bool defined() const { return x_.tensor.defined(); }
  bool is_matrix(const Csr& a) const;
  bool is_features(const at::Tensor& x) const { return x_.is(x); }
  /// `to` has taken the place of `from`, with the same values in another type.
  void moved(const at::Tensor& from, const at::Tensor& to) {
    if (is_features(from)) x_ = Part(to);
  }

 private:
  struct Part {
    at::Tensor tensor;
    int64_t version = 0;

    Part() = default;
    explicit Part(const at::Tensor& t);
    bool is(const at::Tensor& t) const;
  };
  static std::vector<at::Tensor> tensors_of(const Csr& a);

  std::vector<Part> matrix_;
  Part x_;
};

struct GraphInput {
  at::Tensor x = {};           // nodes × features; undefined where they are sparse
  Adjacency sparse = {};       // X and Xᵀ, where they are sparse
  at::Tensor aggregated = {};  // A·X's first rows, computed once: all, or as many as memory is given to; undefined: none

  AggregateSource aggregated_by = {};  // which adjacency and features that was

  bool is_sparse() const { return !x.defined(); }
  int64_t nodes() const { return is_sparse() ? sparse.matrix.rows : x.size(0); }
  int64_t features() const { return is_sparse() ? sparse.matrix.columns : x.size(1); }
};

/// X·Wᵀ, sparse or dense, with a gradient.
at::Tensor times_transposed(const GraphInput& input, const at::Tensor& weight);

/// Adds the first `rows` rows of A·X to dense features; all by default. With all of them x may be a copy that stands beside A·X in one
/// matrix, so that a layer reads both in one product.
GraphInput with_aggregated(GraphInput input, const Adjacency& a);
GraphInput with_aggregated(GraphInput input, const Adjacency& a, int64_t rows);

/// [x | A·X], where the two stand side by side in memory; else undefined.
at::Tensor side_by_side(const at::Tensor& x, const at::Tensor& aggregated);

/// Calls run(first, last, rows of A·X) for the rows that are kept, and then for the others, computed anew.
void for_aggregated(const at::Tensor& aggregated, const at::Tensor& x, const Csr& a,
                    const std::function<void(int64_t first, int64_t last, const at::Tensor& rows)>& run);
/// gᵀ·(A·X) in float32, of the same rows.
at::Tensor aggregated_product(const at::Tensor& g, const at::Tensor& aggregated, const at::Tensor& x, const Csr& a);

}  // namespace satchel
