// How a run goes: a bar on a terminal; elsewhere a line an epoch, or ten in all where there are more than twenty.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "satchel/train/run.h"

namespace satchel::tool {

/// 11.73 MiB.
std::string bytes_text(int64_t bytes);

/// " 71.30 %", and as wide a "-" where there is no number.
std::string percent_text(double percent);

/// Columns of the terminal that stdout is; 80 where it is none.
int terminal_width();

constexpr int kNoLimit = 1 << 20;  // columns

/// As many of the parts, from the first on, as fit into `width` columns together: a figure without its unit would mislead. The first one
/// is cut where it does not fit.
std::string fitting(const std::vector<std::string>& parts, int width);

class ProgressView {
 public:
  enum class Style { silent, lines, bar };
  /// A bar where stdout is a terminal.
  static Style best_style();

  /// `title` names the run: "satchel seed 3". `batch`: images a step; 0: a graph.
  ProgressView(std::string title, Style style, int64_t batch = 0) : title_(std::move(title)), style_(style), batch_(batch) {}
  ~ProgressView() { end(); }
  ProgressView(const ProgressView&) = delete;
  ProgressView& operator=(const ProgressView&) = delete;

  void show(const Progress& progress);
  /// Leaves the bar where it stands and goes to a new line.
  void end();

 private:
  void draw(const Progress& progress);
  std::string speed(const Progress& progress);
  std::vector<std::string> parts(const Progress& progress);

  std::string title_;
  Style style_;
  int64_t batch_;
  std::chrono::steady_clock::time_point first_{}, drawn_{};
  int64_t first_epoch_ = 0;
  bool open_ = false;  // a bar stands on the current line
};

}  // namespace satchel::tool
