// The steps that random programs are made of.
#pragma once

#include <initializer_list>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/autograd/fuzz_program.h"

namespace satchel::test {

/// The same numbers from a seed everywhere.
class FuzzDice {
 public:
  explicit FuzzDice(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < p; }
  template <class T = int64_t>
  T of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }
  uint64_t word() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

/// What steps are written in: values by their numbers, a step or none, its weights.
using Values = std::vector<at::Tensor>;
using Step = std::optional<FuzzStep>;
using W = const at::Tensor*;

inline std::string name(size_t value) { return "v" + std::to_string(value); }
/// The newest value most of the time.
inline size_t pick(FuzzDice& dice, const Values& values) {
  if (dice.chance(0.7)) return values.size() - 1;
  return static_cast<size_t>(dice.below(static_cast<int64_t>(values.size())));
}
/// A value as the functions take it: torch's run has the same.
inline at::Tensor at(const FuzzRun& r, size_t value) { return r.values[value]; }

/// torch's own functions between ours, and changes in place, hooks and questions, which make no value (fuzz_torch_steps.cpp).
Step torch_step(FuzzDice& dice, const Values& values);
Step side_step(FuzzDice& dice, const Values& values);

/// A step on some of these values; none where the one drawn does not fit them.
Step random_step(FuzzDice& dice, const Values& values);

}  // namespace satchel::test
