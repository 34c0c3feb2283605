// Texts of items between separators and of sizes, as specs, methods and the tool's options are written. Private to this room and tools.
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace satchel {

inline std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == text.npos ? std::string_view{} : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// Trimmed; one at least.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> items;
  for (size_t at = text.find(separator); at != text.npos; at = text.find(separator)) {
    items.push_back(trim(text.substr(0, at)));
    text.remove_prefix(at + 1);
  }
  items.push_back(trim(text));
  return items;
}

/// The number that a text starts with, and what stands behind it; NaN where there is none.
inline std::pair<double, std::string_view> leading_number(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc()) return {std::nan(""), text};
  return {number, text.substr(static_cast<size_t>(end - text.data()))};
}

/// "12GB" (10⁹ bytes), "12GiB" (2³⁰), also of K, M and T, "1.5GB", or a plain number of bytes; nothing unless it is 1 to `most` bytes.
inline std::optional<int64_t> byte_count(std::string_view text, int64_t most) {
  constexpr std::array<std::pair<std::string_view, double>, 10> kUnits = {{{"", 1},
                                                                           {"B", 1},
                                                                           {"KB", 1e3},
                                                                           {"MB", 1e6},
                                                                           {"GB", 1e9},
                                                                           {"TB", 1e12},
                                                                           {"KiB", 0x1p10},
                                                                           {"MiB", 0x1p20},
                                                                           {"GiB", 0x1p30},
                                                                           {"TiB", 0x1p40}}};
  const auto [number, unit] = leading_number(text);
  for (const auto& [name, scale] : kUnits) {
    if (name != unit) continue;
    const double bytes = number * scale;
    if (bytes >= 1 && bytes <= static_cast<double>(most)) return static_cast<int64_t>(bytes);
  }
  return std::nullopt;
}

}  // namespace satchel
