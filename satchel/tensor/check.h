// The rules that public functions check, each once, as `[op] rule, got value`. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Defined, strided, on the CPU or on CUDA (or on meta where `meta` is set).
void check_tensor(const at::Tensor& x, const char* op, bool meta = false);
/// All that, and float32, float16 or bfloat16.
void check_float(const at::Tensor& x, const char* op, bool meta = false);
/// int64, one value, on `device`.
void check_seed(const at::Tensor& seed, at::Device device, const char* op);

/// γ and β of pack_side: floats on x's device, one value a channel. Gives `dim` back counted from 0.
int64_t check_affine(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& gamma, const at::Tensor& beta, int64_t dim,
                     const char* op);

/// g of transposed_product: floats on `device`, the packed tensor's sizes but for the last.
void check_product(at::IntArrayRef shape, const at::Tensor& g, at::Device device, const char* op);

/// How the bytes of what is packed lie; throws unless bytes, seed, shape, strides and spec fit each other.
CodecLayout check_packed(const Packed& packed, const char* op, bool meta = false);

}  // namespace satchel
