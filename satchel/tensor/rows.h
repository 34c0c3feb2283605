// Packed rows, a stretch at a time, so that no decoded copy of the whole tensor need exist. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Decodes rows of the coded matrix (H, or Z where it was projected).
class Rows {
 public:
  Rows(const CodecLayout& layout, const at::Tensor& bytes, const Place& place);

  /// Rows [first, last), (last − first) × plan.row. The caller's own: it may be written over.
  at::Tensor read(int64_t first, int64_t last, at::ScalarType type = at::kFloat);

 private:
  const CodecLayout& layout_;
  at::Tensor bytes_;
  const Place& place_;
  int64_t step_;      // values at whose multiples decoding may start
  at::Tensor whole_;  // everything, where step_ is too long for a stretch
};

/// Values of fp32 that a stretch of rows or a group of matrices may hold: 4 MiB on the CPU, 64 MiB on CUDA.
int64_t stretch_values(bool cuda);

/// The bytes themselves, or a copy where they do not start at a multiple of 16.
at::Tensor aligned(const at::Tensor& bytes);

/// Z = H·P of rows × columns, fp32.
at::Tensor project(const Projection& p, const at::Tensor& h, const at::Tensor& seed, const Place& place);

/// The codes of Z = H·P into `bytes`; on CUDA Z itself stands in memory only where no fused kernel serves.
void encode_projected(const CodecLayout& layout, const at::Tensor& h, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);

/// Ĥ = Z·Pᵀ of a projected plan into `out`, rows × columns of any of the three types.
void unpack_projected(const CodecLayout& layout, const Packed& packed, const at::Tensor& out, const Place& place);

}  // namespace satchel
