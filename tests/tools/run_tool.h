// Runs the tool as a shell would.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace satchel::test {

struct Outcome {
  int code = -1;
  std::string out;  // stderr too
};

inline Outcome run_tool(const std::string& arguments) {
  FILE* pipe = popen(("'" SATCHEL_TOOL "' " + arguments + " 2>&1").c_str(), "r");
  Outcome result;
  std::array<char, 4096> buffer;
  for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) result.out.append(buffer.data(), n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace satchel::test
