// The line of a report for something that a method keeps, from sizes alone. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/core/keep.h"
#include "satchel/core/layout.h"
#include "satchel/core/saved.h"

namespace satchel {

/// What is kept of.
struct KeptSizes {
  std::vector<int64_t> coded;   // the tensor as it is coded: rows × channels, or samples first
  std::vector<int64_t> masked;  // … and as its mask is reported
  int64_t statistics = 0;       // channels, rows or groups that have their own mean and deviation
  DType computed = DType::f32;  // the type that layers compute in: that of inputs and outputs, where they are kept as they are
};

SavedTensor kept_line(const std::string& layer, const Keep& keep, const KeptSizes& sizes);

/// Bytes of a tensor whose samples have bits of their own (core/per_sample.h): what pack_per_sample() takes of `shape`, samples first
/// (rows, where a graph's layer packs), with spec.bits in the mean. Throws what training would throw.
int64_t per_sample_bytes(const std::vector<int64_t>& shape, const CodecSpec& spec);
/// Does the code of a keep have them? 32 bits are kept as they are.
bool has_per_sample_bits(const Keep& keep);

}  // namespace satchel
