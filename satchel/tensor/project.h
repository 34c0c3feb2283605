// Random projection of rows (theory.md 4) and the product that never leaves the reduced space.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/core/projection.h"
#include "satchel/core/spec.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// The projection of a matrix with these sizes.
Projection projection_of(int64_t rows, int64_t columns, const RandomProjection& transform);

/// Z = H·P, fp32.
at::Tensor apply_projection(const at::Tensor& h, const RandomProjection& transform, const at::Tensor& seed);
/// Ĥ = Z·Pᵀ, fp32.
at::Tensor undo_projection(const at::Tensor& z, int64_t columns, const RandomProjection& transform, const at::Tensor& seed);

/// Ĥᵀ·g (columns × columns of g, fp32) for a packed H, as P·(Zᵀ·g) where it was projected: D/R fewer operations. Rows are
/// decoded a stretch at a time; only an H packed in another order than its shape's is decoded whole.
at::Tensor transposed_product(const Packed& packed, const at::Tensor& g);

}  // namespace satchel
