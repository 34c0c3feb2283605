// Errors name op, rule and value: `[pack] bits must be 1 to 8, got 9`. The library throws, the tool prints.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace satchel {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws `[op] rule, got value`.
template <class Value>
[[noreturn]] void fail(const char* op, const std::string& rule, const Value& value) {
  std::ostringstream text;
  text << '[' << op << "] " << rule << ", got " << value;
  throw Error(text.str());
}

/// Throws `[op] rule`, for the rules that no single value breaks.
[[noreturn]] inline void fail(const char* op, const std::string& rule) { throw Error(std::string("[") + op + "] " + rule); }

}  // namespace satchel
