// What every fuzz target is made of. A target is a program of libFuzzer's: it hands arbitrary bytes to one parser, under ASan and UBSan.
// Refusing them is fine where the error is ours, `[op] rule, got value`; anything else that is thrown, and whatever a sanitizer sees, is
// a finding.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace satchel::fuzz {

/// Each target defines these two.
void run(std::string_view input);
std::vector<std::string> seeds();  // valid inputs to start from

/// Ends the program where what a parser gave back breaks its own promise.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

inline std::span<const uint8_t> bytes_of(std::string_view text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

/// A folder in memory (/dev/shm) that goes when the program ends.
const std::string& scratch();
/// Writes a file of that folder and gives its path.
std::string spill(const std::string& name, std::string_view content);
void remove(const std::string& name);
void make_folder(const std::string& name);

/// Several files in one input, in a fixed order: | length: u16 | bytes |, the last one to the end. A file whose length is 0xffff is not
/// there.
struct Parts {
  explicit Parts(std::string_view input) : rest(input) {}
  /// False where the file is not there.
  bool next(std::string_view& part);
  std::string_view rest;
};
/// Writes the next parts as files of `folder`; those that are not there are removed.
void spill_folder(Parts& parts, const std::string& folder, const std::vector<std::string>& names);
std::string joined(const std::vector<std::string>& parts);

}  // namespace satchel::fuzz
