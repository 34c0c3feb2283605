// Ranges of a run's options. Private to this room.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "satchel/core/error.h"

namespace satchel {

inline void check_between(const char* what, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail("train", std::string(what) + " must be " + std::to_string(least) + " to " + std::to_string(most), value);
}

inline void check_at_least(const char* what, int64_t value, int64_t least) {
  if (value < least) fail("train", std::string(what) + " must be at least " + std::to_string(least), value);
}

inline void check_finite_above(const char* what, double value, int least) {
  if (!std::isfinite(value) || value <= least)
    fail("train", std::string(what) + " must be finite and above " + std::to_string(least), value);
}

inline void check_finite_at_least(const char* what, double value, int least) {
  if (!std::isfinite(value) || value < least)
    fail("train", std::string(what) + " must be finite and at least " + std::to_string(least), value);
}

}  // namespace satchel
