// Bytes of a tensor whose samples have bits of their own (core/mixed.h), from sizes alone. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <variant>

#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/core/mixed.h"
#include "satchel/tensor/plan.h"

namespace satchel {

/// Does the method give the samples of what this spec packs bits of their own? 32 bits are kept as they are.
inline bool has_sample_bits(const Method& method, const CodecSpec& spec) { return method.adaptive && spec.bits <= kMostMixed; }

/// The bytes that pack_mixed() takes of `shape`, samples first (rows, where a graph's layer packs), with spec.bits in the mean. Throws what
/// training would throw.
inline int64_t bytes_by_sample(std::span<const int64_t> shape, const CodecSpec& spec, const char* op) {
  const bool fits = spec.levels == Levels::even && spec.block > 0 && spec.block % kGroup == 0 && spec.side == Side::none &&
                    std::holds_alternative<Identity>(spec.transform);
  if (!fits) {
    fail(op, "bits by sample take even levels, blocks of a multiple of 8 values and no transform (adaptive=no takes others)",
         to_string(spec));
  }
  if (shape[0] > kMostMixedSamples) fail(op, "bits by sample take at most 2^25 samples (adaptive=no takes more)", shape[0]);
  const int64_t values = count_of(shape, op) / shape[0];
  return MixedCode{shape[0], values, spec.block, mixed_budget(shape[0], spec.bits), spec.header}.total();
}

}  // namespace satchel
