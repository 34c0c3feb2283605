// What the fused passes of a map's norm share. As in norm_block.cuh a warp takes a step of 256 values, eight a lane, which here is a whole
// block of one sample, and a lane always meets the same eight channels.
#pragma once

#include "satchel/kernels/cuda/norm_block.cuh"
#include "satchel/kernels/cuda/norm_image.h"

namespace satchel::cuda::norm_image {

using norm_block::channel_of;
using norm_block::kFewBlocks;
using norm_block::kManyBlocks;
using norm_block::kStep;
using norm_block::kWarps;
using norm_block::Table;
using norm_block::Walk;

/// Where each step's codes stand. A bit of all values of a sample is 32 bytes a step.
struct Codes {
  uint8_t* first;
  const uint32_t* entries;
  FastDivisor each;  // steps a sample
  int bits;

  explicit Codes(const NormImageCode& c)
      : first(c.codes), entries(c.entries), each(static_cast<uint32_t>(c.values / kStep)), bits(c.bits) {}

  struct Step {
    uint8_t* codes;
    int bits;
  };
  __device__ inline Step of(uint32_t step) const {
    if (entries == nullptr) return {first + static_cast<int64_t>(step) * (32 * bits), bits};
    const uint32_t n = each.divide(step), entry = __ldg(entries + n);
    const int own = entry_bits(entry);
    return {first + (entry_before(entry) * each.divisor + static_cast<int64_t>(step - n * each.divisor) * own) * 32, own};
  }
};

inline int64_t values_of(const NormImageCode& c) { return c.samples * c.values; }

inline unsigned grid_of(const NormImageCode& c, int64_t most) {
  return grid_size(norm_block::walk_blocks(values_of(c), c.channels, kStep, most));
}

inline void check_fit(const NormImageCode& c, const char* op) {
  if (!norm_image_fits(c)) fail(op, "norm_image_fits must be true of the code");
  if (!is_aligned(c.codes) || !is_aligned(c.headers)) fail(op, "codes and headers must start at a multiple of 16");
  if ((c.bits == 0) != (c.entries != nullptr)) fail(op, "bits or shares must be given");
}

inline void check_values(const void* x, const char* op) {
  if (!is_aligned(x)) fail(op, "activations must start at a multiple of 16");
}

}  // namespace satchel::cuda::norm_image
