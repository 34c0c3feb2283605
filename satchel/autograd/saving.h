// What every layer is told about saving: the method, and the name its saves go by in reports.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "satchel/core/method.h"

namespace satchel {

struct Saving {
  Method method = parse_method("satchel");
  std::string name = {};
};

/// A seed of its own for one save: 64 bits from torch's default generator, so that torch::manual_seed fixes a run. An int64[1]
/// tensor on `device`; no host synchronisation.
at::Tensor fresh_seed(at::Device device);

/// Throws `[op] rule, got value` unless 0 ≤ p < 1 − 2^−17: it is rounded to a multiple of 2^−16.
void check_dropout(double p, const char* op);
/// What kept values are multiplied with: 1/(1 − p), p rounded.
double dropout_scale(double p);

}  // namespace satchel
