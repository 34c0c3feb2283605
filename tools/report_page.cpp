#include "tools/report_page.h"

#include <fmt/format.h>

#include "tools/report_charts.h"

namespace satchel::tool {
namespace {

constexpr const char* kStyle = R"(
:root { --back: #ffffff; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --card: #f6f8fa; --bar: #b9c3cd;
  --c0: #5f6b7a; --c1: #00796b; --c2: #d95f02; --c3: #7b3fa0; --c4: #1f6fd0; --c5: #b3261e; --c6: #8a6d00; --c7: #c2185b; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --ink: #e6eaee; --soft: #9aa6b2; --line: #2c343d; --card: #1a2027; --bar: #465361;
  --c0: #9aa7b5; --c1: #4db6a5; --c2: #ff9a4d; --c3: #c08be0; --c4: #6fb0ff; --c5: #ff8a80; --c6: #d9bd4a; --c7: #ff80ab; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 12px 14px 40px; }
h1 { font-size: 1.5rem; margin: .6rem 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; padding-top: .8rem; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0 .6rem; max-width: 75ch; overflow-wrap: anywhere; }
p.note { color: var(--soft); font-size: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; align-items: start; }
.charts > div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 6px; min-width: 0; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text { fill: var(--soft); }
svg text.title { fill: var(--ink); font-size: 12.5px; font-weight: 600; }
svg text.small { font-size: 9.5px; }
svg text.middle { text-anchor: middle; }
svg text.end { text-anchor: end; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .s { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .dashed { stroke-dasharray: 5 4; }
svg .bar { fill: var(--bar); }
)";

std::string colour_rules() {
  std::string css;
  for (int i = 0; i < kColours; ++i)
    css += fmt::format(
        "svg .s.c{0} {{ stroke: var(--c{0}); }} svg .f.c{0} {{ fill: var(--c{0}); }} i.c{0} {{ background: var(--c{0}); }}\n", i);
  return css;
}

constexpr const char* kTables = R"(.legend span { display: inline-block; margin-right: 14px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
.wide { overflow-x: auto; margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
details > summary { cursor: pointer; color: var(--soft); margin: .4rem 0; }
@media (max-width: 480px) { body { font-size: 14px; } main { padding: 8px 10px 30px; } }
)";

}  // namespace

std::string html_table(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"wide\"><table>\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* cell = i == 0 ? "th" : "td";
    html += "<tr>";
    for (const std::string& text : rows[i]) html += fmt::format("<{0}>{1}</{0}>", cell, escaped(text));
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string html_charts(const std::vector<std::string>& charts) {
  std::string html;
  for (const std::string& chart : charts) {
    if (!chart.empty()) html += "<div>" + chart + "</div>\n";
  }
  return html.empty() ? "" : "<div class=\"charts\">\n" + html + "</div>\n";
}

std::string report_page(const std::vector<std::string>& sections) {
  std::string html =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n"
      "<title>Satchel report</title>\n<style>";
  html += kStyle + colour_rules() + kTables + "</style>\n</head>\n<body>\n<main>\n<h1>Satchel report</h1>\n";
  html += fmt::format("<p class=\"note\">Written by <code>satchel report</code> {}.</p>\n", SATCHEL_VERSION);
  for (const std::string& section : sections) html += section;
  return html + "</main>\n</body>\n</html>\n";
}

}  // namespace satchel::tool
