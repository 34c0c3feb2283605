// The codings of a layout over raw memory: values in coding order (gapless) to packed bytes and back, on either device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "satchel/kernels/coding.h"
#include "satchel/stable/place.h"

namespace satchel::stable {

using torch::stable::Tensor;

/// Zeros between the parts, so that equal tensors have equal bytes; encoders set bits of the off plane.
void zero_gaps(const CodecLayout& layout, const Tensor& bytes);

/// All values at `x`, of layout.type, into `bytes` (uint8, layout.at.total of them). A side code's channels stand there already, and so do
/// the zeros between the parts. `seed` is int64[1] on the same device. `rows`: how x lies where it has gaps; for block codes.
void encode(const CodecLayout& layout, const void* x, const Tensor& seed, const Tensor& bytes, const Place& place, RowsWithGaps rows = {});

/// All values into `x`, as layout.type.
void decode(const CodecLayout& layout, const Tensor& bytes, void* x, const Place& place);

/// Values [first, last) of a block or side code, of any type, to `x` on, as decode_stretch() gives them.
void decode_part(const CodecLayout& layout, const Tensor& bytes, void* x, DType type, int64_t first, int64_t last, const Place& place);

/// A block code of exp(x), and log() of what it decodes to; float32.
void encode_exp(const CodecLayout& layout, const float* x, const Tensor& seed, const Tensor& bytes, const Place& place);
void decode_log(const CodecLayout& layout, const Tensor& bytes, float* x, const Place& place);

/// `values` values of a table of 2^bits, by their codes.
void decode_table(const Tensor& codes, const Tensor& table, int bits, int64_t values, void* x, DType type, const Place& place);

}  // namespace satchel::stable
