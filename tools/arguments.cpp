#include "tools/arguments.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <optional>
#include <system_error>

#include "satchel/core/text_items.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 62;
constexpr int64_t kLeastWithoutUnit = int64_t{1} << 20;
constexpr const char* kSizeRule = "must be 1 to 2^62 bytes as in 12GB, 11.5GiB or 12000000000";

/// All of a text as a number in decimal digits.
template <class Number>
std::errc read_all(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, number);
  return code == std::errc() && stop != end ? std::errc::invalid_argument : code;
}

/// What is wrong with the text of a size; empty: nothing.
std::string size_error(const std::string& text) {
  const std::optional<int64_t> bytes = byte_count(text, kMostBytes);
  if (!bytes) return kSizeRule;
  if (*bytes >= kLeastWithoutUnit || !leading_number(text).second.empty()) return "";
  return fmt::format("must have a unit below 1 MiB: write {0}GB or {0}GiB, or {0}B for bytes", text);
}

}  // namespace

CLI::Validator real_number() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        char* end = nullptr;
        std::strtod(text.c_str(), &end);
        return text.empty() || *end != 0 ? fmt::format("must be a number, got '{}'", text) : "";
      },
      "", "number");
}

CLI::Validator file_name() {
  return CLI::Validator([](std::string& text) -> std::string { return text.empty() ? "must name a file, got ''" : ""; }, "", "file name");
}

int64_t parse_bytes(const std::string& text, const char* op) {
  if (const std::string wrong = size_error(text); !wrong.empty()) fail(op, "size " + wrong, "'" + text + "'");
  return *byte_count(text, kMostBytes);
}

CLI::Validator byte_size() {
  return CLI::Validator(
      [](std::string& text) {
        const std::string wrong = size_error(text);
        return wrong.empty() ? wrong : fmt::format("{}, got '{}'", wrong, text);
      },
      "", "size");
}

CLI::Validator device_name(const std::string& more) {
  const std::string names = more.empty() ? "cpu, cuda or cuda:N" : "cpu, cuda, cuda:N or " + more;
  const std::string list = more.empty() ? "{cpu,cuda,cuda:N}" : "{cpu,cuda,cuda:N," + more + "}";
  return CLI::Validator(
      [more, names](std::string& text) -> std::string {
        int number = 0;
        const bool numbered = text.starts_with("cuda:") && read_all(text.substr(5), number) == std::errc() && number >= 0 && number < 128;
        return text == "cpu" || text == "cuda" || numbered || (!more.empty() && text == more)
                   ? ""
                   : fmt::format("must be {}, got '{}'", names, text);
      },
      list, "device");
}

CLI::Validator whole_number(uint64_t least, uint64_t most) {
  return CLI::Validator(
      [least, most](std::string& text) -> std::string {
        uint64_t number = 0;
        if (read_all(text, number) != std::errc() || number < least || number > most) {
          const std::string end = most == UINT64_MAX ? "2^64 - 1" : most == INT64_MAX ? "2^63 - 1" : std::to_string(most);
          return fmt::format("must be a whole number from {} to {}, got '{}'", least, end, text);
        }
        text = std::to_string(number);  // CLI11 itself reads 010 as 8
        return "";
      },
      "", "whole number");
}

CLI::Validator any_whole_number() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        int64_t number = 0;
        const std::errc code = read_all(text, number);
        if (code == std::errc::result_out_of_range) return fmt::format("must be a whole number below 2^63, got '{}'", text);
        if (code != std::errc()) return fmt::format("must be a whole number, got '{}'", text);
        text = std::to_string(number);  // CLI11 itself reads 010 as 8
        return "";
      },
      "", "count");
}

std::vector<Method> methods_from(const std::string& text, void (*check)(const Method&, const char*)) {
  try {
    const std::vector<Method> methods = parse_methods(text);
    for (size_t i = 0; i < methods.size(); ++i) {
      check(methods[i], "method");
      for (size_t j = 0; j < i; ++j) {
        if (methods[i].name == methods[j].name) fail("method", "every method must be named once", methods[i].name);
      }
    }
    return methods;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

}  // namespace satchel::tool
