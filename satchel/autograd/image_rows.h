// Images as rows: N×C×spatial in channels_last order is rows × channels with rows = N·∏spatial, and everything that serves rows serves
// images. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/tensor/order.h"

namespace satchel {

/// 3 to 5 dimensions: N×C×spatial.
inline bool is_image(const at::Tensor& x) { return x.dim() >= 3 && x.dim() <= 5; }

/// rows × channels of an image: a view where it lies in channels_last order, else a copy that does. Rows come back as they are, contiguous.
at::Tensor rows_of_image(const at::Tensor& x);

/// rows × channels as N×C×spatial of these sizes in channels_last order: the same memory, no view to autograd. No sizes: the rows.
at::Tensor image_of_rows(const at::Tensor& rows, at::IntArrayRef sizes);

/// The sizes that image_of_rows() takes back: those of an image, none of rows.
std::vector<int64_t> image_sizes(const at::Tensor& x);

/// N×C×spatial in channels_last order, strides of sizes 1 included, which torch's own `contiguous` leaves as they are; x itself where it
/// is.
at::Tensor in_channels_last(const at::Tensor& x);
/// Memory of these sizes in that order.
at::Tensor empty_channels_last(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The gradient of an image as rows to work in: its own memory where nobody else holds it and it lies so, else a copy.
at::Tensor take_or_clone_rows(at::Tensor&& g);

}  // namespace satchel
