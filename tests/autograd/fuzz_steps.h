// The steps that random programs are made of.
#pragma once

#include <initializer_list>
#include <optional>
#include <random>
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

/// A step on some of these values; none where the one drawn does not fit them.
std::optional<FuzzStep> random_step(FuzzDice& dice, const std::vector<at::Tensor>& values);

}  // namespace satchel::test
