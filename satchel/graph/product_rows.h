// A·x as what comes next reads it: a stretch of rows at a time, never whole beside its result. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/graph/csr.h"

namespace satchel {

/// The CPU computes a stretch when it is asked for, while it is in the cache. On CUDA a product by parts takes twice the time of the
/// whole (docs/results.md), so the whole is made first, in memory that the result then writes over, a stretch behind the reader:
///
///   memory   | stretch | A·x … … … … |          back
///            | result … … … … |                 front: rows that were read are free
class ProductRows {
 public:
  /// `width`: of the result, of x's type; 0: there is none. Stretches have at most `stretch` rows and are read from first to last.
  ProductRows(const Csr& a, const at::Tensor& x, int64_t width, int64_t stretch);

  /// Rows [first, last) of A·x, good until the next call, and until rows of the result past `last` are written.
  at::Tensor read(int64_t first, int64_t last);
  /// All rows. Those that have been read may be written.
  const at::Tensor& result() const { return result_; }

 private:
  const Csr& a_;
  at::Tensor x_, product_, result_;
};

}  // namespace satchel
