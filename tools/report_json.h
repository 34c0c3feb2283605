// A value of a JSON file together with its place, so that an error names both.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/error.h"

namespace satchel::tool {

class JsonPlace {
 public:
  JsonPlace(const nlohmann::ordered_json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  /// Throws `[report] FILE: PATH must be RULE, got VALUE`.
  [[noreturn]] void refuse(const std::string& rule) const {
    std::string text = value_->dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    if (text.size() > kShown) text = text.substr(0, kShown) + "…";
    fail("report", fmt::format("{}: {} must be {}", file_, path_.empty() ? "the file" : path_, rule), text);
  }

  bool is_null() const { return value_->is_null(); }
  bool has(const char* key) const { return value_->is_object() && value_->contains(key) && !(*value_)[key].is_null(); }
  JsonPlace at(const char* key) const {
    if (!value_->is_object()) refuse("an object");
    if (!value_->contains(key)) refuse(fmt::format("an object with \"{}\"", key));
    return {(*value_)[key], file_, path_.empty() ? key : path_ + "." + key};
  }
  std::vector<JsonPlace> items() const {
    if (!value_->is_array()) refuse("a list");
    std::vector<JsonPlace> all;
    for (size_t i = 0; i < value_->size(); ++i) all.emplace_back((*value_)[i], file_, fmt::format("{}[{}]", path_, i));
    return all;
  }
  double number() const {
    if (!value_->is_number()) refuse("a number");
    return value_->get<double>();
  }
  double number_at_least(double least) const {
    const double n = number();
    if (!(n >= least)) refuse(fmt::format("{} or more", least));
    return n;
  }
  std::string text() const {
    if (!value_->is_string()) refuse("text");
    return value_->get<std::string>();
  }
  bool yes() const {
    if (!value_->is_boolean()) refuse("true or false");
    return value_->get<bool>();
  }
  /// … of a key that may be missing or null.
  std::optional<double> maybe_number(const char* key) const { return has(key) ? std::optional(at(key).number()) : std::nullopt; }
  std::string maybe_text(const char* key) const { return has(key) ? at(key).text() : ""; }
  const std::string& file() const { return file_; }

 private:
  static constexpr size_t kShown = 60;
  const nlohmann::ordered_json* value_;
  std::string file_, path_;
};

}  // namespace satchel::tool
