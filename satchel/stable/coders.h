// The codings of a layout over raw memory: values in coding order (gapless) to packed bytes and back, on either device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "satchel/stable/place.h"
#include "satchel/tensor/codec_layout.h"

namespace satchel::stable {

using torch::stable::Tensor;

/// All values at `x`, of layout.type, into `bytes` (uint8, layout.at.total of them). A side code's channels stand there already, and so do
/// the zeros between the parts. `seed` is int64[1] on the same device.
void encode(const CodecLayout& layout, const void* x, const Tensor& seed, const Tensor& bytes, const Place& place);

/// All values into `x`, as layout.type.
void decode(const CodecLayout& layout, const Tensor& bytes, void* x, const Place& place);

/// The same of a block code whose codes and headers stand apart.
void decode_blocks(const CodecLayout& layout, const uint8_t* codes, const void* headers, void* x, const Place& place);

}  // namespace satchel::stable
