#include "tools/arguments.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <charconv>
#include <cstdlib>
#include <optional>
#include <system_error>

#include "satchel/core/text_items.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 62;
constexpr const char* kSizeRule = "must be 1 to 2^62 bytes as in 12GB, 11.5GiB or 1000";

/// All of a text as a number in decimal digits.
template <class Number>
std::errc read_all(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, number);
  return code == std::errc() && stop != end ? std::errc::invalid_argument : code;
}

/// Two names of one file, which may not be there yet.
bool same_file(const std::string& a, const std::string& b) {
  struct stat first {
  }, second{};
  if (::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0)
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
  const auto folder = [](const std::string& path) { return path.find('/') == path.npos ? "." : path.substr(0, path.rfind('/') + 1); };
  const auto name = [](const std::string& path) { return path.substr(path.rfind('/') + 1); };
  return name(a) == name(b) && ::stat(folder(a).c_str(), &first) == 0 && ::stat(folder(b).c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
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

void check_apart(const char* op, const char* name, const std::string& path, const char* other_name, const std::string& other) {
  if (!path.empty() && !other.empty() && same_file(path, other))
    throw UsageError(fmt::format("[{}] {} must be another file than {}, got {}", op, name, other_name, path));
}

CLI::Validator file_name() {
  return CLI::Validator([](std::string& text) -> std::string { return text.empty() ? "must name a file, got ''" : ""; }, "", "file name");
}

int64_t parse_bytes(const std::string& text, const char* op) {
  const std::optional<int64_t> bytes = byte_count(text, kMostBytes);
  if (!bytes) fail(op, std::string("size ") + kSizeRule, "'" + text + "'");
  return *bytes;
}

CLI::Validator byte_size() {
  return CLI::Validator(
      [](std::string& text) { return byte_count(text, kMostBytes) ? std::string() : fmt::format("{}, got '{}'", kSizeRule, text); }, "",
      "size");
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
