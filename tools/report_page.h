// The parts of a page: one section a file, and the frame around them.
#pragma once

#include <string>
#include <vector>

#include "tools/report_json.h"

namespace satchel::tool {

/// HTML of one file's content. Throws `[report] FILE: PATH must be RULE, got VALUE` where it is not what a command writes.
std::string report_section(const JsonPlace& file);

std::string analyse_section(const JsonPlace& file);
std::string train_section(const JsonPlace& file);
std::string bench_section(const JsonPlace& file);
std::string axis_section(const JsonPlace& file);

/// A table that scrolls by itself where it is too wide; the first row is its head. Cells are text.
std::string html_table(const std::vector<std::vector<std::string>>& rows);
/// Charts side by side, as many as fit.
std::string html_charts(const std::vector<std::string>& charts);

/// The whole page: no script, no font and no style from elsewhere.
std::string report_page(const std::vector<std::string>& sections);

}  // namespace satchel::tool
