// torch in, per-sample bits out: samples (the first dimension) with 1 to 8 bits each, allocated under a mean (docs/theory.md 5).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/core/per_sample.h"
#include "satchel/core/spec.h"
#include "satchel/tensor/packed.h"

namespace satchel {

constexpr int64_t kRangeBlock = 256;  // of ranges that fused passes take

/// May this spec have per-sample bits? Even levels, no side, no transform, 1 to 8 bits, and blocks of a multiple of 8 values.
bool takes_per_sample_bits(const CodecSpec& spec);

/// Packs a float32, float16 or bfloat16 tensor in blocks of a sample each. Bits minimise Σ C_n/(2^b_n − 1)² under Σ b_n = ⌊mean·n⌋ with
/// C_n = weight_n·‖R_n‖², R_n the ranges of sample n's blocks; `weights` float32[n] on x's device, undefined: ones. The bytes are the same
/// on every device; their number depends on sizes and mean alone, and the host waits for nothing. `range_squares`, where not null,
/// becomes ‖R_n‖², float64[n] on x's device. `ranges`: least and most of every block, float32[blocks, 2] on x's device, where somebody
/// has taken them already (CUDA, blocks of kRangeBlock values that fill the samples); they are believed.
Packed pack_per_sample(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, double mean_bits, const at::Tensor& weights = {},
                       at::Tensor* range_squares = nullptr, const at::Tensor& ranges = {});
Packed pack_per_sample(const at::Tensor& x, const CodecSpec& spec, uint64_t seed, double mean_bits, const at::Tensor& weights = {});

/// Room for the bytes of `in_order`, whose memory is as it will be coded; everything but the bytes' contents stands.
Packed room_for_per_sample(const at::Tensor& in_order, at::ScalarType dtype, const CodecSpec& spec, double mean_bits);
/// Sizes and places of its parts; throws unless they fit each other.
PerSampleCode per_sample_code(const Packed& packed, const char* op);

/// The tensor again, and samples [first, last) of it, with its dtype and order of dimensions.
at::Tensor unpack_per_sample(const Packed& packed);
at::Tensor unpack_per_sample(const Packed& packed, int64_t first, int64_t last);

/// The samples' bits, uint8[n] on the device.
at::Tensor bits_of(const Packed& packed);

/// The bytes pack_per_sample() takes, without packing.
int64_t per_sample_bytes(at::IntArrayRef shape, const CodecSpec& spec, double mean_bits);

}  // namespace satchel
