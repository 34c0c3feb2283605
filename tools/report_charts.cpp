#include "tools/report_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace satchel::tool {
namespace {

constexpr double kWidth = 360, kHeight = 230, kLeft = 56, kRight = 14, kTop = 30, kBottom = 40;
constexpr size_t kLongestName = 26;  // letters of a bar's name

/// Where values of an axis lie between two pixels.
struct Scale {
  double low, high, from, to;
  bool log;
  double operator()(double v) const {
    const double a = log ? std::log(low) : low, b = log ? std::log(high) : high, x = log ? std::log(v) : v;
    return b == a ? (from + to) / 2 : from + (x - a) / (b - a) * (to - from);
  }
};

bool fits(double v, bool log) { return std::isfinite(v) && (!log || v > 0); }

double nice_step(double range, int about) {
  const double rough = range / about, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

std::vector<double> ticks_of(const ChartAxis& axis, double low, double high, int about) {
  if (!axis.ticks.empty()) return axis.ticks;
  std::vector<double> ticks;
  if (axis.log && axis.unit == Unit::bytes) {
    for (double whole = 1; whole <= high; whole *= 1024) {
      for (const double factor : {1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0}) {
        if (factor * whole >= low && factor * whole <= high) ticks.push_back(factor * whole);
      }
    }
    while (ticks.size() > 6) std::erase_if(ticks, [&, n = 0](double) mutable { return ++n % 2 == 0; });
    return ticks;
  }
  if (axis.log) {
    const double decades = std::log10(high / low);
    for (double power = std::pow(10, std::floor(std::log10(low))); power <= high * 1.0001; power *= 10) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        if (factor != 1 && decades > 2) continue;
        const double v = factor * power;
        if (v >= low * .9999 && v <= high * 1.0001) ticks.push_back(v);
      }
    }
    while (ticks.size() > 8) {  // many decades: every other
      std::vector<double> fewer;
      for (size_t i = 0; i < ticks.size(); i += 2) fewer.push_back(ticks[i]);
      ticks = fewer;
    }
    return ticks;
  }
  if (high == low) return {low};
  double whole = 1;  // bytes have round numbers in their own unit
  while (axis.unit == Unit::bytes && high / whole >= 1024 && whole < 0x1p30) whole *= 1024;
  const double step = std::max(nice_step((high - low) / whole, about) * whole, axis.whole ? 1.0 : 0.0);
  for (double v = std::ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step)
    ticks.push_back(std::abs(v) < step * 1e-9 ? 0 : v);
  return ticks;
}

/// The range of an axis with some room, so that no point lies on the frame.
std::pair<double, double> range_with_room(double low, double high, const ChartAxis& axis) {
  if (axis.log) return {low / 1.15, high * 1.15};
  if (axis.from_zero && low >= 0) return {0, high == 0 ? 1 : high * 1.08};
  const double room = high > low ? .06 * (high - low) : std::max(std::abs(high) * .1, 1e-9);
  return {low - room, high + room};
}

std::string head(const std::string& title, double height) {
  return fmt::format("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\"><text class=\"title\" x=\"4\" y=\"15\">{}</text>\n",
                     kWidth, height, escaped(title), escaped(title));
}

std::string text_at(double x, double y, const char* cls, const std::string& text) {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", cls, x, y, escaped(text));
}

std::string axis_lines(const ChartAxis& x, const ChartAxis& y, const Scale& sx, const Scale& sy) {
  std::string svg;
  const auto name = [](const ChartAxis& a, size_t i, double v) { return i < a.tick_names.size() ? a.tick_names[i] : shown(v, a.unit); };
  const std::vector<double> ys = ticks_of(y, sy.low, sy.high, 5), xs = ticks_of(x, sx.low, sx.high, 5);
  for (size_t i = 0; i < ys.size(); ++i) {
    const double at = sy(ys[i]);
    svg += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft, kWidth - kRight, at, at);
    svg += text_at(kLeft - 5, at + 3.5, "tick end", name(y, i, ys[i]));
  }
  for (size_t i = 0; i < xs.size(); ++i) svg += text_at(sx(xs[i]), kHeight - kBottom + 14, "tick middle", name(x, i, xs[i]));
  svg += fmt::format("<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>", kLeft, kWidth - kRight, kHeight - kBottom,
                     kHeight - kBottom);
  svg += text_at((kLeft + kWidth - kRight) / 2, kHeight - 8, "tick middle", x.title);
  if (!y.title.empty()) svg += text_at(kLeft, kTop - 5, "tick", y.title);
  return svg + "\n";
}

std::string short_name(const std::string& name) {
  return name.size() <= kLongestName ? name : "…" + name.substr(name.size() - kLongestName + 1);
}

/// Labels of points, each beside its point or, where that covers another point or label, above or below.
std::string labels_svg(const std::vector<ChartSeries>& series, const ChartAxis& x, const ChartAxis& y, const Scale& sx, const Scale& sy) {
  struct Box {
    double left, right, y;
  };
  constexpr double kLetter = 6.2, kLine = 11.5, kDot = 4, kBeside = 7, kDown = 3.5;
  constexpr int kTries = 12;
  const auto is_shown = [&](const ChartPoint& p) { return !p.label.empty() && fits(p.x, x.log) && fits(p.y, y.log); };
  std::vector<Box> taken;
  for (const ChartSeries& s : series) {
    for (const ChartPoint& p : s.points) {
      if (is_shown(p)) taken.push_back({sx(p.x) - kDot, sx(p.x) + kDot, sy(p.y) + kDown});
    }
  }
  std::string svg;
  for (const ChartSeries& s : series) {
    for (const ChartPoint& p : s.points) {
      if (!is_shown(p)) continue;
      const double px = sx(p.x), length = kLetter * static_cast<double>(p.label.size());
      const bool first_left = px > kWidth * .62;
      Box box{};
      bool left = first_left, free = false;
      for (int i = 0; i < 2 * kTries && !free; ++i) {
        left = first_left != (i % 2 == 1);
        const int rows = i / 2;  // 0, 1 down, 1 up, 2 down …
        const double move = (rows + 1) / 2 * kLine / 2 * (rows % 2 == 1 ? 1 : -1);
        box = {left ? px - kBeside - length : px + kBeside, left ? px - kBeside : px + kBeside + length, sy(p.y) + kDown + move};
        const bool inside = box.left >= kLeft && box.right <= kWidth && box.y >= kTop && box.y <= kHeight - kBottom;
        free = inside && std::ranges::none_of(taken, [&](const Box& b) {
                 return b.left < box.right && box.left < b.right && std::abs(b.y - box.y) < kLine;
               });
      }
      taken.push_back(box);
      svg += text_at(left ? px - kBeside : px + kBeside, box.y, left ? "tick end" : "tick", p.label);
    }
  }
  return svg;
}

std::string series_svg(const ChartSeries& s, const ChartAxis& x, const ChartAxis& y, const Scale& sx, const Scale& sy) {
  std::string path, dots;
  for (const ChartPoint& p : s.points) {
    if (!fits(p.x, x.log) || !fits(p.y, y.log)) continue;
    const double px = sx(p.x), py = sy(p.y);
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px, py);
    const std::string what = fmt::format("<title>{}: {}</title>", escaped(s.name), escaped(shown(p.y, y.unit)));
    if (p.spread > 0) {
      const double low = y.log ? std::max(p.y - p.spread, sy.low) : p.y - p.spread;
      dots += fmt::format("<line class=\"s c{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", s.colour % kColours, px, px,
                          sy(low), sy(p.y + p.spread));
    }
    if (s.dots)
      dots += fmt::format("<circle class=\"f c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\">{}</circle>", s.colour % kColours, px, py, what);
  }
  if (s.line && !path.empty()) {
    path = fmt::format("<path class=\"s c{}{}\" d=\"{}\"><title>{}</title></path>", s.colour % kColours, s.dashed ? " dashed" : "", path,
                       escaped(s.name));
    return path + dots + "\n";
  }
  return dots + "\n";
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&': safe += "&amp;"; break;
      case '<': safe += "&lt;"; break;
      case '>': safe += "&gt;"; break;
      case '"': safe += "&quot;"; break;
      case '\'': safe += "&#39;"; break;
      default: safe += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
    }
  }
  return safe;
}

std::string shown(double value, Unit unit) {
  const auto plain = [](double v) {
    if (v != 0 && (std::abs(v) < 1e-3 || std::abs(v) >= 1e6)) return fmt::format("{:.2g}", v);
    std::string text = fmt::format("{:.4g}", v);
    return text;
  };
  const auto scaled = [&](std::array<const char*, 4> units, double factor, double v) {
    size_t i = 0;
    for (; i + 1 < units.size() && std::abs(v) >= factor; ++i) v /= factor;
    return fmt::format("{:.3g} {}", v, units[i]);
  };
  if (!std::isfinite(value)) return "–";
  if (value == 0 && unit != Unit::percent) return "0";
  switch (unit) {
    case Unit::number: return plain(value);
    case Unit::percent: return plain(value) + " %";
    case Unit::seconds:
      return value < 1e-3 ? fmt::format("{:.3g} µs", value * 1e6)
             : value < 1  ? fmt::format("{:.3g} ms", value * 1e3)
                          : fmt::format("{:.3g} s", value);
    case Unit::bytes: return scaled({"B", "KiB", "MiB", "GiB"}, 1024, value);
  }
  return "";
}

std::string line_chart(const std::string& title, const ChartAxis& x, const ChartAxis& y, const std::vector<ChartSeries>& series) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double lx = kNone, hx = -kNone, ly = kNone, hy = -kNone;
  for (const ChartSeries& s : series) {
    for (const ChartPoint& p : s.points) {
      if (!fits(p.x, x.log) || !fits(p.y, y.log)) continue;
      lx = std::min(lx, p.x), hx = std::max(hx, p.x);
      ly = std::min(ly, y.log ? p.y : p.y - p.spread), hy = std::max(hy, p.y + p.spread);
    }
  }
  if (lx > hx) return "";
  const auto [x0, x1] = range_with_room(lx, hx, x);
  const auto [y0, y1] = range_with_room(ly, hy, y);
  const Scale sx{x0, x1, kLeft, kWidth - kRight, x.log}, sy{y0, y1, kHeight - kBottom, kTop, y.log};
  std::string svg = head(title, kHeight) + axis_lines(x, y, sx, sy);
  for (const ChartSeries& s : series) svg += series_svg(s, x, y, sx, sy);
  return svg + labels_svg(series, x, y, sx, sy) + "</svg>\n";
}

std::string bar_chart(const std::string& title, Unit unit, const std::vector<std::string>& series, const std::vector<int>& colours,
                      const std::vector<BarGroup>& groups) {
  if (groups.empty() || series.empty()) return "";
  constexpr double kBar = 9, kGap = 16, kRoom = 62;  // room: for the number behind the longest bar
  double most = 0;
  for (const BarGroup& g : groups) {
    for (const double v : g.values) most = std::max(most, std::isfinite(v) ? v : 0);
  }
  if (most == 0) most = 1;
  const double each = kGap + 3 + kBar * static_cast<double>(series.size()), first = series.size() > 1 ? kTop + 12 : kTop - 4;
  std::string svg = head(title, first + each * static_cast<double>(groups.size()) + 8);
  double across = 4;
  for (size_t i = 0; i < series.size() && series.size() > 1; ++i) {
    svg += fmt::format("<rect class=\"f c{}\" x=\"{:.1f}\" y=\"24\" width=\"9\" height=\"9\"/>", colours[i] % kColours, across);
    svg += text_at(across + 13, 32, "tick", series[i]);
    across += 24 + 6.4 * static_cast<double>(series[i].size());
  }
  double at = first;
  for (const BarGroup& g : groups) {
    svg += text_at(4, at + 11, "tick", short_name(g.name));
    for (size_t i = 0; i < series.size() && i < g.values.size(); ++i) {
      const double value = g.values[i], length = std::isfinite(value) && value > 0 ? std::max(value / most * (kWidth - kRoom - 4), .8) : 0;
      const double y = at + kGap - 1 + kBar * static_cast<double>(i);
      svg += fmt::format("<rect class=\"f c{}\" x=\"4\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\"><title>{} {}: {}</title></rect>",
                         colours[i] % kColours, y, length, kBar - 1.5, escaped(g.name), escaped(series[i]), escaped(shown(value, unit)));
      svg += text_at(8 + length, y + kBar - 2, "small", shown(value, unit));
    }
    svg += "\n";
    at += each;
  }
  return svg + "</svg>\n";
}

std::string histogram_chart(const std::string& title, const std::string& below, const std::vector<double>& shares,
                            const std::vector<ChartSeries>& models) {
  if (shares.empty()) return "";
  constexpr double kSize = 190, kFloor = kSize - 36;
  const auto bins = static_cast<double>(shares.size());
  // A clipped normal's ends may stand far above all else: they are cut where they are more than three times the rest.
  double middle = 0;
  for (size_t i = 1; i + 1 < shares.size(); ++i) middle = std::max(middle, shares[i]);
  for (const ChartSeries& m : models) {
    for (size_t i = 1; i + 1 < m.points.size(); ++i) middle = std::max(middle, m.points[i].y);
  }
  const double ends = std::max(shares.front(), shares.back());
  const double most = std::max(middle > 0 ? std::min(ends, 3 * middle) : ends, middle) * 1.06;
  const Scale sx{0, 1, 10, kWidth - 10, false}, sy{0, most, kFloor, kTop - 6, false};
  std::string svg = head(title, kSize);
  const double width = (kWidth - 20) / bins;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double top = sy(std::min(shares[i], most)), x = sx(static_cast<double>(i) / bins);
    svg += fmt::format("<rect class=\"f bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"><title>{:.2f} %</title></rect>",
                       x, top, std::max(width - .6, .4), kFloor - top, 100 * shares[i]);
  }
  for (const double end : {0.0, bins - 1}) {
    const double share = shares[static_cast<size_t>(end)];
    if (share <= most) continue;
    svg += text_at(end == 0 ? 10 + width + 3 : kWidth - 13 - width, kTop + 3, end == 0 ? "small" : "small end",
                   fmt::format("{:.1f} %", 100 * share));
  }
  for (const ChartSeries& m : models) {
    std::string path;
    for (const ChartPoint& p : m.points) path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", sx(p.x), sy(std::min(p.y, most)));
    svg += fmt::format("<path class=\"s c{}{}\" d=\"{}\"><title>{}</title></path>", m.colour % kColours, m.dashed ? " dashed" : "", path,
                       escaped(m.name));
  }
  svg += fmt::format("<line class=\"axis\" x1=\"10\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>", kWidth - 10, kFloor, kFloor);
  svg += text_at(10, kFloor + 13, "tick", "min") + text_at(kWidth - 10, kFloor + 13, "tick end", "max");
  svg += text_at(kWidth / 2, kFloor + 29, "tick middle", below);
  return svg + "</svg>\n";
}

std::string legend(const std::vector<std::pair<std::string, int>>& names) {
  std::string html = "<p class=\"legend\">";
  for (const auto& [name, colour] : names) html += fmt::format("<span><i class=\"b c{}\"></i>{}</span> ", colour % kColours, escaped(name));
  return html + "</p>\n";
}

}  // namespace satchel::tool
