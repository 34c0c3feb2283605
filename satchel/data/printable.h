// Untrusted text in errors. Private.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace satchel {

/// Bytes made fit for a terminal, in quotes: at most 24, odd ones as \xNN.
inline std::string printable(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 24)) {
    const auto byte = static_cast<unsigned char>(c);
    char hex[5];
    std::snprintf(hex, sizeof hex, "\\x%02x", byte);
    out += byte >= 32 && byte < 127 ? std::string(1, c) : std::string(hex);
  }
  return out + (text.size() > 24 ? "…'" : "'");
}

}  // namespace satchel
