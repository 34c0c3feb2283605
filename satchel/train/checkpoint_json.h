// JSON in checkpoints. Private to this room.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>

#include "satchel/core/error.h"
#include "satchel/train/image_options.h"
#include "satchel/train/names.h"

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

/// One option as JSON: enums and methods by their text.
template <class T>
nlohmann::ordered_json to_field(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return name_of(value);
  } else if constexpr (std::is_same_v<T, Method>) {
    return value.name;
  } else if constexpr (std::is_same_v<T, LossScale>) {
    return {value.initial, value.growth, value.backoff, value.interval};
  } else {
    return value;
  }
}

/// … and back. Throws where it is of another kind.
template <class T>
void from_field(const nlohmann::ordered_json& j, T& value) {
  if constexpr (std::is_enum_v<T>) {
    value = from_name<T>(j.get<std::string>(), "checkpoint");
  } else if constexpr (std::is_same_v<T, Method>) {
    value = parse_method(j.get<std::string>());
  } else if constexpr (std::is_same_v<T, LossScale>) {
    value = {number(j.at(0)), number(j.at(1)), number(j.at(2)), j.at(3).get<int64_t>()};
  } else if constexpr (std::is_floating_point_v<T>) {
    value = number(j);
  } else {
    j.get_to(value);
  }
}

/// Whichever GPU: they give the same results.
inline std::string kind_of_device(const std::string& device) { return device.substr(0, device.find(':')); }

}  // namespace satchel
