// torch in, mixed bits out: samples (the first dimension) with 1 to 8 bits each, shared out under a mean (theory.md 5).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/core/mixed.h"
#include "satchel/core/spec.h"

namespace satchel {

constexpr int64_t kRangeBlock = 256;  // of ranges that fused passes take

struct MixedPacked {
  at::Tensor bytes;              // uint8, laid out as core/mixed.h draws it, on the device of the tensor it was made from
  std::vector<int64_t> shape;    // of the tensor
  std::vector<int64_t> strides;  // that unpack_mixed() restores: x's own where samples are stretches of memory, else contiguous
  at::ScalarType dtype = at::kFloat;
  CodecSpec spec;      // its bits are the mean, rounded
  int64_t budget = 0;  // bits a value of all samples together: Σ b_n
};

/// May this spec have mixed bits? Even levels, no side, no transform, 1 to 8 bits, and blocks of a multiple of 8 values.
bool takes_mixed_bits(const CodecSpec& spec);

/// Packs a float32, float16 or bfloat16 tensor in blocks of a sample each. Bits minimise Σ C_n/(2^b_n − 1)² under Σ b_n = ⌊mean·n⌋ with
/// C_n = weight_n·‖R_n‖², R_n the ranges of sample n's blocks; `weights` float32[n] on x's device, undefined: ones. The bytes are the same
/// on every device; their number depends on sizes and mean alone, and the host waits for nothing. `range_squares`, where not null,
/// becomes ‖R_n‖², float64[n] on x's device. `ranges`: least and most of every block, float32[blocks, 2] on x's device, where somebody
/// has taken them already (CUDA, blocks of kRangeBlock values that fill the samples); they are believed.
MixedPacked pack_mixed(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, double mean_bits, const at::Tensor& weights = {},
                       at::Tensor* range_squares = nullptr, const at::Tensor& ranges = {});
MixedPacked pack_mixed(const at::Tensor& x, const CodecSpec& spec, uint64_t seed, double mean_bits, const at::Tensor& weights = {});

/// Room for the bytes of `in_order`, whose memory is as it will be coded; everything but the bytes' contents stands.
MixedPacked room_for_mixed(const at::Tensor& in_order, at::ScalarType dtype, const CodecSpec& spec, double mean_bits);
/// Sizes and places of its parts; throws unless they fit each other.
MixedCode code_of(const MixedPacked& packed, const char* op);

/// The tensor again, and samples [first, last) of it, with its dtype and order of dimensions.
at::Tensor unpack_mixed(const MixedPacked& packed);
at::Tensor unpack_mixed(const MixedPacked& packed, int64_t first, int64_t last);

/// The samples' bits, uint8[n] on the device.
at::Tensor bits_of(const MixedPacked& packed);

/// The bytes pack_mixed() takes, without packing.
int64_t mixed_bytes(at::IntArrayRef shape, const CodecSpec& spec, double mean_bits);

}  // namespace satchel
