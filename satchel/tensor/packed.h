// Packed: a tensor in one or two bits a value, with all that unpack() needs. A value: no global state, no generator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/core/spec.h"

namespace satchel {

struct Packed {
  at::Tensor bytes;              // uint8, laid out as core/layout.h draws it, on the device of the tensor it was made from
  at::Tensor seed;               // int64[1] on that device; defined only where unpack() redraws a projection
  std::vector<int64_t> shape;    // of the tensor
  std::vector<int64_t> strides;  // that unpack() restores: x's own; contiguous where blocks or a projection follow the shape
  at::ScalarType dtype = at::kFloat;
  CodecSpec spec;
  int64_t channels = 0;  // side codes with a threshold a channel: how many, and
  int64_t inner = 1;     // how many neighbouring values share one
  int64_t budget = 0;    // bits per sample (per_sample.h): Σ b_n, and the spec's bits are the mean, rounded; 0: all have the spec's
};

/// Every byte it keeps alive: packed bytes and, where there is one, the seed.
int64_t saved_bytes(const Packed& packed);

/// The bytes pack() would take, without packing: the same function that pack() allocates by.
int64_t packed_bytes(at::IntArrayRef shape, at::ScalarType dtype, const CodecSpec& spec, int64_t channels = 0);

}  // namespace satchel
