// Side codes in which some samples have 3 bits and the others 2 (ExtraBitView of kernels/codec.h): a Packed of 2 bits, whose codes hold
// bits 0 and 1, and beside it a plane of extra bits for the chosen samples. Private to the library.
//
//   Packed   codes & 3 of all values, headers, channels           as if every sample had 2 bits
//   slots    | int32 | int32 | …                                   a sample each: its place in the plane, −1: it has 2 bits
//   plane    | code >> 2 of 8 values | …                           values / 8 bytes a chosen sample
//
// Bits per value: 2 + the share of chosen samples + 32/256 of headers + 32 a sample.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/kernels/codec.h"
#include "satchel/tensor/packed.h"

namespace satchel {

struct ExtraBit {
  at::Tensor slots, plane;  // undefined: all samples have the code's own bits
  bool defined() const { return slots.defined(); }
  int64_t bytes() const { return defined() ? static_cast<int64_t>(slots.nbytes() + plane.nbytes()) : 0; }
};

/// Can samples of so many values have bits of their own? One-sided and ReLU codes of 2 bits in blocks of 256 that fill a sample.
bool takes_extra_bit(const CodecSpec& spec, int64_t sample_values);

/// Room for the extra bits of `count` of the samples in `slots`, int32[samples] on the device of what is coded.
ExtraBit extra_bit_plane(const at::Tensor& slots, int64_t count, int64_t sample_values);

/// For the kernels. `code` is of 2 bits and of whole samples.
ExtraBitView extra_bit_view(const Packed& code, const ExtraBit& extra);

/// pack_side() of rows x with γ and β, or pack() without. Where `extra` is defined the chosen samples have 3 bits, and their extra bits go
/// there: CPU.
Packed pack_extra_bit(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta,
                      const ExtraBit& extra);

/// Rows [first, last) of the code's rows × channels as `type`. On CUDA of ReLU codes alone.
at::Tensor extra_bit_rows(const Packed& code, const ExtraBit& extra, int64_t first, int64_t last, at::ScalarType type);

/// One bit a value, as on_bits() of a Packed. CPU.
at::Tensor extra_bit_on(const Packed& code, const ExtraBit& extra);

/// Σ over each sample's blocks of the squared length of their ranges: float64[samples], on the code's device; shared alike by all samples
/// where blocks do not fill one. NaN where a block held something not finite.
at::Tensor squared_ranges(const Packed& code, int64_t samples);

}  // namespace satchel
