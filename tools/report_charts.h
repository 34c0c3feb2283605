// Charts as SVG text, 360 units wide: a page puts as many side by side as fit. Colours are classes of the page's style sheet, so that they
// follow light and dark.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace satchel::tool {

constexpr int kColours = 8;  // series have classes c0 … c7, then again

/// Text for HTML and SVG: markup and control characters taken out.
std::string escaped(const std::string& text);

/// How numbers of an axis are written.
enum class Unit { number, bytes, seconds, percent };
std::string shown(double value, Unit unit);

struct ChartPoint {
  double x = 0, y = 0;
  double spread = 0;       // a bar of so much up and down
  std::string label = {};  // beside the point
};
struct ChartSeries {
  std::string name = {};
  int colour = 0;
  std::vector<ChartPoint> points = {};
  bool line = true, dots = false, dashed = false;
};
struct ChartAxis {
  std::string title = {};
  Unit unit = Unit::number;
  bool log = false;
  bool from_zero = false;
  bool whole = false;                        // ticks are whole numbers
  std::vector<double> ticks = {};            // these, or none: chosen
  std::vector<std::string> tick_names = {};  // of those
};

/// Lines, dots or both. Points that are not finite (or with a log axis not positive) are left out; a chart without any is empty text.
std::string line_chart(const std::string& title, const ChartAxis& x, const ChartAxis& y, const std::vector<ChartSeries>& series);

/// Bars to the right, groups of them under each other.
struct BarGroup {
  std::string name;
  std::vector<double> values;  // one a series
};
std::string bar_chart(const std::string& title, Unit unit, const std::vector<std::string>& series, const std::vector<int>& colours,
                      const std::vector<BarGroup>& groups);

/// Shares of equal bins of 0 … 1 as columns, and models of them as lines.
std::string histogram_chart(const std::string& title, const std::string& below, const std::vector<double>& shares,
                            const std::vector<ChartSeries>& models);

/// Names beside their colours, for all charts of a section.
std::string legend(const std::vector<std::pair<std::string, int>>& names);

}  // namespace satchel::tool
