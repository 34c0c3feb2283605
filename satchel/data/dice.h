// Chance for data: a pure function of seed, purpose and place, the same on every machine (no std:: distributions). Private.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "satchel/core/noise.h"

namespace satchel {

/// One number never serves two purposes.
enum class Purpose : uint32_t { split_class = 1, groups, drifts, degrees, edges, means, features, labels, parts };

/// Four words for each (a, b).
class Dice {
 public:
  Dice(uint64_t seed, Purpose purpose) : seed_(seed), purpose_(static_cast<uint32_t>(purpose)) {}
  Words operator()(uint32_t a, uint32_t b = 0) const { return philox(seed_, {a, b, purpose_, kData}); }

 private:
  static constexpr uint32_t kData = 0x61746164u;  // "data": no other noise has this in its counter
  uint64_t seed_;
  uint32_t purpose_;
};

/// 0 … n − 1 from 32 random bits.
constexpr uint32_t below(uint32_t n, uint32_t word) { return static_cast<uint32_t>((static_cast<uint64_t>(word) * n) >> 32); }

/// Fisher and Yates; `b` tells shuffles of one purpose apart.
template <class Value>
void shuffle(std::span<Value> values, const Dice& dice, uint32_t b = 0) {
  for (size_t i = values.size(); i > 1; --i) {
    const auto n = static_cast<uint32_t>(i);
    std::swap(values[i - 1], values[below(n, dice(n, b).w[0])]);
  }
}

}  // namespace satchel
