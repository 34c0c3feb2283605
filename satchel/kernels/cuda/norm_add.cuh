// What the fused passes of BatchNorm + residual sum + ReLU share. As in norm_act.cuh a warp takes 256 values a step, eight a lane, and a
// thread block takes steps b, b + grid, …, where 256·grid is a multiple of the channels: a lane always meets the same eight channels.
#pragma once

#include "satchel/kernels/cuda/norm_act.cuh"
#include "satchel/kernels/cuda/norm_add.h"

namespace satchel::cuda::norm_add {

using norm_act::channel_of;
using norm_act::Codes;
using norm_act::kBlock;
using norm_act::Table;
using norm_act::Wide;

constexpr int kWarps = 8;
constexpr int64_t kFewBlocks = 132 * 3;   // thread blocks of the encoder and of the sums, all resident at once on an H200
constexpr int64_t kManyBlocks = 132 * 4;  // of the last pass

/// Thread blocks for `values`, so that lanes keep their channels; 0 where `most` are too few for that.
inline int64_t walk_blocks(int64_t values, int64_t channels, int64_t most) {
  const int64_t unit = channels / side::common_divisor(kBlock, channels), whole = most / unit * unit;
  const int64_t wanted = ceil_div(ceil_div(ceil_div(values, kBlock), kWarps), unit) * unit;
  return wanted < whole ? wanted : whole;
}

inline bool is_straight_256(const Grid& g) { return g.block == kBlock && g.is_straight(); }

inline void check_fit(const NormAddCode& code, const char* op) {
  if (!norm_add_fits(code)) fail(op, "norm_add_fits must be true of the codes");
  if (code.extra.slots != nullptr) norm_act::check_extra_bit(code.sum, code.extra, op);
  for (const CodeParts& at : {code.norm_at, code.sum_at}) {
    if (!is_aligned(at.codes) || !is_aligned(at.headers)) fail(op, "codes and headers must start at a multiple of 16");
  }
}

inline void check_values(const void* x, const char* op) {
  if (!is_aligned(x)) fail(op, "activations must start at a multiple of 16");
}

/// Calls f with the bits of both codes as integral constants; 3 of the sum: `wide`, samples of 2 bits may be among them.
template <class F>
void with_both_bits(const NormAddCode& code, F&& f) {
  const auto with_sum = [&](auto bits) {
    if (code.sum.table.bits == 2 && code.extra.slots == nullptr) return f(bits, std::integral_constant<int, 2>());
    return f(bits, std::integral_constant<int, 3>());
  };
  switch (code.norm.levels.bits) {
    case 1: return with_sum(std::integral_constant<int, 1>());
    case 2: return with_sum(std::integral_constant<int, 2>());
    case 3: return with_sum(std::integral_constant<int, 3>());
    default: return with_sum(std::integral_constant<int, 4>());
  }
}

}  // namespace satchel::cuda::norm_add
