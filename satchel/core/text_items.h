// Texts of items between separators, as specs and methods are written. Private to this room.
#pragma once

#include <string_view>
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

}  // namespace satchel
