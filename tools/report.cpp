#include "tools/report.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "satchel/train/replacement.h"
#include "tools/arguments.h"
#include "tools/report_page.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

std::string content_of(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0)
    fail("report", std::string("input must be a file that can be read (") + std::strerror(errno) + ")", path);
  if (S_ISDIR(about.st_mode)) fail("report", "input must be a file, not a folder", path);
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad() || !file.is_open())
    fail("report", std::string("input must be a file that can be read (") + std::strerror(errno) + ")", path);
  return text;
}

/// "line 3, column 7" of a byte, from 1 on.
std::string place_of(const std::string& text, size_t byte) {
  const size_t at = std::min(byte > 0 ? byte - 1 : 0, text.size());
  const auto line = std::count(text.begin(), text.begin() + static_cast<int64_t>(at), '\n') + 1;
  const size_t start = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  return fmt::format("line {}, column {}", line, at - (start == std::string::npos ? 0 : start + 1) + 1);
}

ordered_json parsed(const std::string& path) {
  const std::string text = content_of(path);
  try {
    return ordered_json::parse(text);
  } catch (const ordered_json::parse_error& e) {
    const size_t at = std::min(e.byte > 0 ? e.byte - 1 : 0, text.size());
    const std::string there = text.empty()        ? "an empty file"
                              : at >= text.size() ? "the end of the file"
                                                  : fmt::format("'{}'", text.substr(at, 12));
    fail("report", fmt::format("{}: input must be JSON up to its end, {}", path, place_of(text, e.byte)), there);
  }
}

}  // namespace

void run_report(const ReportCommand& c) {
  if (c.output != "-") {
    for (const std::string& input : c.inputs) check_apart("report", "--output", c.output, "an input", input);
    if (!c.overwrite && ::access(c.output.c_str(), F_OK) == 0)
      throw UsageError(fmt::format("[report] --output must be a new file, unless --overwrite replaces it, got {}", c.output));
    check_output(c.output, "report");
  }
  std::vector<std::string> sections;
  for (const std::string& input : c.inputs) {
    const ordered_json content = parsed(input);
    sections.push_back(report_section({content, input}));
  }
  const std::string page = report_page(sections);
  if (c.output == "-") {
    fmt::print("{}", page);
    return;
  }
  Replacement file(c.output, "report");
  file.write(page.data(), page.size());
  file.finish();
  fmt::print("{}: {} {} of {}\n", c.output, c.inputs.size(), c.inputs.size() == 1 ? "section" : "sections",
             c.inputs.size() == 1 ? c.inputs.front() : fmt::format("{} files", c.inputs.size()));
}

void add_report(CLI::App& app) {
  const auto c = std::make_shared<ReportCommand>();
  CLI::App* report = app.add_subcommand("report", "One HTML page with pictures from the JSON of analyse, train and bench");
  report->add_option("FILE", c->inputs, "What --json of `satchel analyse`, `train`, `bench graph` or `bench images` wrote; several")
      ->required()
      ->transform(file_name());
  report->add_option("-o,--output", c->output, "The page, an .html file; - writes it to stdout")->required()->transform(file_name());
  report->add_flag("--overwrite", c->overwrite, "Replace the file that --output names, where there is one");
  report->footer(
      "\nThe page is complete in itself: pictures, colours and text are in the one file, without scripts. It follows the reader's light "
      "or\n"
      "dark setting and fits a phone. From\n"
      "  train    training curves, what is kept over a step, bytes by layer before and after, peak against time\n"
      "  bench    peak against time, bytes; with --axis: accuracy, bytes and time by block size, bits, width, depth or nodes\n"
      "  analyse  histograms of normalised activations with both models, rounding variances, and each weight's gradient\n"
      "\nExamples:\n  satchel analyse --data synthetic:arxiv,scale=0.1 --epochs 20 --json a.json\n"
      "  satchel train --data synthetic:arxiv,scale=0.1 --method fp32,satchel --epochs 20 --json t.json\n"
      "  satchel report a.json t.json -o page.html");
  report->callback([c] { run_report(*c); });
}

}  // namespace satchel::tool
