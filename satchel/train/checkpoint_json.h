// JSON in checkpoints. Private to this room.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "satchel/core/error.h"

namespace satchel {

/// JSON has no NaN: a metric that is undefined is null.
inline double number(const nlohmann::ordered_json& j) { return j.is_null() ? std::numeric_limits<double>::quiet_NaN() : j.get<double>(); }

/// Runs `read`, which parses JSON from a file: what it throws names the file.
template <class Read>
auto in_checkpoint_words(const std::string& where, const Read& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception&) {
    fail("checkpoint", where + " must be as satchel train writes it", "JSON of another kind");
  }
}

}  // namespace satchel
