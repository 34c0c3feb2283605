// Products of activations and weights: torch's own; of float32, on Hopper where torch's may not use TF32, on tensor cores with the errors
// of fp32 (kernels/cuda/split_product.h has the bound). Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace satchel {

/// May torch's products of float32 matrices on CUDA use TF32?
bool allows_tf32();
/// Do tensor cores multiply so many rows by a factor (depth × columns)? `depth`: of all factors.
bool splits_product(const at::Tensor& factor, int64_t depth, int64_t rows);

/// Weights that rows are multiplied by, a stretch of rows after the other: Σ rows[i]·factors[i] (+ bias), all of one type. Made and
/// used on one stream.
class RowProduct {
 public:
  /// One or two factors, depth × columns each, in any order of memory, and as many rows as there will be in all; bias: columns, or
  /// undefined.
  RowProduct(std::vector<at::Tensor> factors, at::Tensor bias, int64_t rows);

  /// to = Σ rows[i]·factors[i] + bias. `to` shares no memory with the rows but, where writes_in_place(), may be one of them.
  void write(at::Tensor& to, const std::vector<at::Tensor>& rows) const;
  /// The same into memory of its own.
  at::Tensor operator()(const std::vector<at::Tensor>& rows) const;

  /// Do tensor cores multiply?
  bool is_split() const { return pieces_.defined(); }
  /// May a row's result stand where one of its factors stood?
  bool writes_in_place() const;

 private:
  std::vector<at::Tensor> factors_;
  at::Tensor bias_, pieces_;
};

/// Do tensor cores multiply a·b? Float32, a the transpose of a tall matrix and b a tall matrix, as in the gradient of weights.
bool splits_gradient(const at::Tensor& a, const at::Tensor& b);
/// sums = a·b, or, with `add`, += a·b. `sums` is float32 in one piece. The order of the sums depends on the sizes alone.
void split_gradient_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b, bool add);

}  // namespace satchel
