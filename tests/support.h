// What tests of many rooms share: folders and files, the text of an error, names of cases, lines of reports. No torch: torch_support.h.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/saved.h"

namespace satchel::test {

/// A folder of its own, gone at the end with all that is in it.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string make_folder(const std::string& name) const;

 private:
  std::string folder_;
};

/// A file's bytes; "" where there is none.
std::string slurp(const std::string& path);
void spill(const std::string& path, std::string_view bytes);

bool holds(std::string_view text, std::string_view part);

/// What a call throws; "accepted" where it throws nothing.
template <std::invocable Call>
std::string error_of(const Call& call) {
  try {
    std::invoke(call);
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

/// `text` as the name of a googletest case: letters and digits, "with" for +, "minus" before a number, and one _ for anything else.
std::string case_name(std::string_view text);
/// For INSTANTIATE_TEST_SUITE_P, of parameters that are texts or have one in `name`.
constexpr auto kCaseName = [](const auto& info) {
  if constexpr (requires { info.param.name; }) {
    return case_name(info.param.name);
  } else {
    return case_name(info.param);
  }
};

/// A line of a report or a plan, and several, each on a line of its own.
std::string text_of(const SavedTensor& line);
std::string text_of(const std::vector<SavedTensor>& lines);

}  // namespace satchel::test
