// What a RunningBitAllocator holds of its layers. Private to its sources.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "satchel/plan/bit_allocator.h"

namespace satchel {

struct RunningBitAllocator::Layer {
  std::string name;
  double base = 2, mean = 2;
  int64_t values = 0;       // a sample, so far in this step
  int64_t last_values = 0;  // … in the step before
  at::Tensor squares;       // of this step's gradient, float32[n]
  at::Tensor sensitivity;   // C_n of this step, float64[n]
  bool map = false;
};

/// Sensitivities on their way to the host.
struct RunningBitAllocator::Arriving {
  at::Tensor host;
  std::optional<c10::Event> copied;  // none: they are here
  struct Piece {
    size_t layer;
    int64_t values, first, count;
  };
  std::vector<Piece> pieces;
};

}  // namespace satchel
