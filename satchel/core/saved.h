// One thing that a layer keeps from forward to backward: the line of a report, and of a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace satchel {

struct SavedTensor {
  std::string name;  // of the layer: "layers.0.conv"
  std::string kind;  // shared, extra bit, input, aggregate, norm, activation, mask, dropout, statistics, affine, seed, loss; torch: a
                     // function of torch's own
  std::vector<int64_t> shape;  // of what it stands for
  int bits = 32;               // a value, headers not counted
  int64_t bytes = 0;           // kept
  int64_t fp32_bytes = 0;      // what the same values take in float32 (masks: a byte a value, as torch keeps them)
  bool operator==(const SavedTensor&) const = default;
};

inline int64_t total_bytes(const std::vector<SavedTensor>& saved) {
  int64_t bytes = 0;
  for (const SavedTensor& s : saved) bytes += s.bytes;
  return bytes;
}

}  // namespace satchel
