// `satchel report`: one HTML page, complete in itself, from the JSON that other commands write.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

namespace satchel::tool {

struct ReportCommand {
  std::vector<std::string> inputs;
  std::string output;
  bool overwrite = false;
};

void add_report(CLI::App& app);
void run_report(const ReportCommand& command);

}  // namespace satchel::tool
