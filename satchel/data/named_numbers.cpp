#include "satchel/data/named_numbers.h"

#include <algorithm>
#include <charconv>

#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

template <class Number>
void read_number(const std::string& scheme, std::string_view key, std::string_view text, Number& to) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), to);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse(scheme + ": " + std::string(key), "must be a whole number", printable(text));
  }
}

}  // namespace

std::set<std::string_view> read_named_numbers(std::string_view text, const std::string& scheme, std::span<const NamedNumber> numbers,
                                              uint64_t& seed) {
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const std::string_view option = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), option.size() + 1));
    const size_t equals = option.find('=');
    if (equals == std::string_view::npos) refuse(scheme + ": option", "must be name=value", printable(option));
    const std::string_view key = option.substr(0, equals), value = option.substr(equals + 1);
    if (!seen.insert(key).second) refuse(scheme + ": option", "must stand once", printable(option));
    const auto found = std::ranges::find(numbers, key, &NamedNumber::name);
    if (found != numbers.end()) {
      read_number(scheme, key, value, *found->to);
    } else if (key == "seed") {
      read_number(scheme, key, value, seed);
    } else {
      std::string names;
      for (const NamedNumber& number : numbers) names += (names.empty() ? "" : ", ") + std::string(number.name);
      refuse(scheme + ": option", "must be " + names + " or seed", printable(key));
    }
  }
  return seen;
}

void check_named(const std::string& scheme, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(scheme + ": " + name, "must be " + std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
}

}  // namespace satchel
