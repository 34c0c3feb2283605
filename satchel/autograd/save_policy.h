// What every layer is told about saving: the method, and the name its saves go by in reports.
#pragma once

#include <memory>
#include <string>

#include "satchel/autograd/seeds.h"
#include "satchel/core/keep.h"

namespace satchel {

class BitAllocator;

/// Of who names none: `satchel`, parsed once.
const Method& default_method();

struct SavePolicy {
  Method method = default_method();
  std::string name = {};
  std::shared_ptr<BitAllocator> allocator = {};  // methods with bits per sample: who allocates them; none: by the step's own ranges
  /// Graph layers: a norm of the batch's own statistics reads the output, so that a bias cancels out and its gradient is 0.
  bool norm_follows = false;
};
using Saving [[deprecated("it is called SavePolicy")]] = SavePolicy;

/// Throws `[op] rule, got value` unless 0 ≤ p < 1 − 2^−17: it is rounded to a multiple of 2^−16.
void check_dropout(double p, const char* op);
/// What kept values are multiplied with: 1/(1 − p), p rounded.
double dropout_scale(double p);

}  // namespace satchel
