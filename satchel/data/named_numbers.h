// Texts of options as in `synthetic-images:classes=10,size=32`. Private.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>

namespace satchel {

struct NamedNumber {
  std::string_view name;
  int64_t* to = nullptr;
};

/// Reads `name=value,…` into the numbers and, of the name "seed", into `seed`; returns the names that are there. Throws
/// `[load] scheme: option must be …, got 'x'`.
std::set<std::string_view> read_named_numbers(std::string_view text, const std::string& scheme, std::span<const NamedNumber> numbers,
                                              uint64_t& seed);

/// Throws `[load] scheme: name must be low to high, got value`.
void check_named(const std::string& scheme, const char* name, int64_t value, int64_t low, int64_t high);

}  // namespace satchel
