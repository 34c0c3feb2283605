// `satchel report` as a user runs it.
#include "tests/tools/train_command.h"

namespace satchel::train_command {
namespace {

class ReportCommand : public TrainCommand {
 protected:
  void TearDown() override {
    for (const char* name : {"page.html", "c.json"}) ::unlink(path(name).c_str());
    TrainCommand::TearDown();
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }
  static size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
    return n;
  }
};

constexpr const char* kBench = R"({"model": "sage", "data": "a <b> & c", "results": [
  {"method": "torch", "fits": true, "epoch_seconds": 0.004, "ratio": 1.0, "saved_bytes": 1048576, "loss_bytes": 10, "peak_bytes": 2097152},
  {"method": "fp32", "fits": false, "epoch_seconds": null, "ratio": null, "saved_bytes": null, "loss_bytes": null, "peak_bytes": null},
  {"method": "satchel", "fits": true, "epoch_seconds": 0.002, "ratio": 0.5,
   "saved_bytes": 1024, "loss_bytes": 10, "peak_bytes": 524288}]})";

TEST_F(ReportCommand, OnePageOfAll) {
  ASSERT_FALSE(trained({"--method", "fp32,satchel", "--epochs", "3"}, "a.json").is_discarded());
  write("b.json", kBench);
  write("c.json", R"({"axis": "block", "model": "sage", "data": "d", "points": [
    {"value": "row", "results": [{"method": "exact", "epoch_seconds": 1, "saved_bytes": 4096,
      "planned_bytes": 4000, "peak_bytes": 9999, "test": 70.5, "test_deviation": 0.2}]},
    {"value": "2rows", "results": [{"method": "exact", "epoch_seconds": 2, "saved_bytes": 3000,
      "planned_bytes": 3000, "peak_bytes": 9000, "test": 70.1, "test_deviation": 0.3}]}]})");
  const Outcome r = run({"report", "a.json", "b.json", "c.json", "-o", "page.html"});
  ASSERT_EQ(r.code, 0) << r.err;
  const std::string page = slurp(path("page.html"));
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(count(page, "<section>"), 3u);
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
  EXPECT_GE(count(page, "<svg"), 10u);
  for (const char* part :
       {"Training: sage", "kept over a step", "satchel: bytes by layer", "peak of a step against its time", "a &lt;b&gt; &amp; c",
        "does not fit", "by block", "70.50 ± 0.20", "prefers-color-scheme: dark", "width=device-width"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  for (const char* part : {"<script", "http://", "https://", "src=", "@import", "url(", "<link", "a <b>", "nan", "inf"})
    EXPECT_EQ(page.find(part), std::string::npos) << part;

  expect_errors({{{"report", "b.json", "-o", "page.html"}, 2, "--output must be a new file, unless --overwrite replaces it, got page.html"},
                 {{"report", "b.json", "-o", "b.json", "--overwrite"}, 2, "--output must be another file than an input, got b.json"}});
  EXPECT_EQ(slurp(path("page.html")), page);
  const Outcome again = run({"report", "b.json", "-o", "page.html", "--overwrite"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(count(slurp(path("page.html")), "<section>"), 1u);
  EXPECT_EQ(run({"report", "b.json", "-o", "-"}).out.rfind("<!doctype html>", 0), 0u);
}

TEST_F(ReportCommand, BadInputNamesFileAndPlace) {
  const std::pair<const char*, const char*> bad[] = {
      {"", ": input must be JSON up to its end, line 1, column 1, got an empty file"},
      {"{\n  \"runs\": [1, }", ": input must be JSON up to its end, line 2, column 15, got '}'"},
      {"{\"runs\": [", "got the end of the file"},
      {"[1, 2]", ": the file must be what `satchel analyse`, `train`, `bench graph` or `bench images` write with --json, got [1,2]"},
      {"{\"runs\": 3}", ": runs must be a list, got 3"},
      {"{\"runs\": [{\"metric\": 5}]}", ": runs[0].metric must be text, got 5"},
      {"{\"runs\": [{\"metric\": \"accuracy\"}]}", ": runs[0] must be an object with \"method\""},
      {R"({"results": [{"method": "x", "fits": true, "epoch_seconds": "soon"}], "model": "m"})",
       ": results[0].epoch_seconds must be a number, got \"soon\""},
      {R"({"results": [{"method": "x", "fits": true, "epoch_seconds": 1, "saved_bytes": -1, "peak_bytes": 1}], "model": "m"})",
       ": results[0].saved_bytes must be 0 or more, got -1"},
      {R"({"saves": [{"name": "a", "kind": "input", "projected": "no"}]})", ": saves[0].projected must be true or false"}};
  std::vector<Refusal> wanted = {
      {{"report", "none.json", "-o", "page.html"}, 1, "input must be a file that can be read (No such file or directory), got none.json"},
      {{"report", ".", "-o", "page.html"}, 1, "[report] input must be a file, not a folder, got ."},
      {{"report", "a.json", "-o", "no/page.html"}, 1, "output must lie in an existing folder, got no/page.html"}};
  std::vector<std::string> files;
  for (const auto& [text, part] : bad) {
    files.push_back("bad" + std::to_string(files.size()) + ".json");
    write(files.back(), text);
    wanted.push_back({{"report", files.back(), "-o", "page.html"}, 1, (*part == ':' ? "[report] " + files.back() : "") + part});
  }
  expect_errors(wanted);
  EXPECT_FALSE(exists(path("page.html")));
  for (const std::string& file : files) ::unlink(path(file).c_str());
}

}  // namespace
}  // namespace satchel::train_command
