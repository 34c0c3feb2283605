// Errors name op, rule and value: `[pack] bits must be 1 to 8, got 9`. The library throws, the tool prints.
#pragma once

#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>

namespace satchel {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An error made fit for a terminal and a log: control characters, which names of files and texts of options may hold, as \xNN.
inline std::string without_controls(const std::string& text) {
  std::string out;
  for (const char c : text) {
    char hex[5];
    const auto byte = static_cast<unsigned char>(c);
    std::snprintf(hex, sizeof hex, "\\x%02x", byte);
    out += byte < 32 || byte == 127 ? std::string(hex) : std::string(1, c);
  }
  return out;
}

/// Throws `[op] rule, got value`.
template <class Value>
[[noreturn]] void fail(const char* op, const std::string& rule, const Value& value) {
  std::ostringstream text;
  text << '[' << op << "] " << rule << ", got " << value;
  throw Error(without_controls(text.str()));
}

/// Throws `[op] rule`, for the rules that no single value breaks.
[[noreturn]] inline void fail(const char* op, const std::string& rule) {
  throw Error(without_controls(std::string("[") + op + "] " + rule));
}

}  // namespace satchel
