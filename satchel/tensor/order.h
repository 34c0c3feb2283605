// The order in which values are coded: that of memory where the blocks do not mind, else that of the shape. The low-pass codes in
// the shape's order and reads channels_last maps as they lie. Private.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/core/spec.h"

namespace satchel {

/// Maps (3 to 5 dimensions) whose channels are neighbours in memory: samples × space × channels, without gaps.
bool is_channels_last(const at::Tensor& x);

/// Do the values of each row of a matrix stand side by side, rows any distance apart?
bool has_plain_rows(const at::Tensor& x);
/// x itself where it has plain rows, else a contiguous copy.
at::Tensor with_plain_rows(const at::Tensor& x);

/// Is x's memory gapless and in an order that serves the spec?
bool keeps_order(const at::Tensor& x, const CodecSpec& spec);

/// x itself where it keeps its order, else a contiguous copy.
at::Tensor ordered(const at::Tensor& x, const CodecSpec& spec);

/// The strides that unpack() restores for what ordered() gave.
std::vector<int64_t> strides_of(const at::Tensor& in_order);

/// Neighbouring values in memory that share a channel, where dimension `dim` holds the channels. In gapless memory value
/// i belongs to channel i / stride % size, whatever the order of the dimensions.
int64_t inner_of(at::IntArrayRef shape, at::IntArrayRef strides, int64_t dim);

}  // namespace satchel
