#include "tools/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

namespace satchel::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWidestBar = 24, kNarrowestBar = 6;
constexpr auto kBetweenDraws = std::chrono::milliseconds(100);

std::string bar_of(double share, int width) {
  const int full = std::clamp(static_cast<int>(share * width + 0.5), 0, width);
  std::string bar;
  for (int i = 0; i < width; ++i) bar += i < full ? "█" : "░";
  return bar;
}

/// Characters of UTF-8 text.
int width_of(const std::string& text) {
  return static_cast<int>(std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

/// Cuts UTF-8 text to `width` characters.
std::string cut(const std::string& text, int width) {
  int shown = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool starts = (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (starts && shown++ == width) return text.substr(0, i);
  }
  return text;
}

}  // namespace

std::string percent_text(double percent) { return std::isnan(percent) ? "     -  " : fmt::format("{:6.2f} %", percent); }

int terminal_width() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string fitting(const std::vector<std::string>& parts, int width) {
  std::string text = parts.empty() ? "" : cut(parts.front(), std::max(0, width));
  for (size_t i = 1; i < parts.size() && width_of(text) + width_of(parts[i]) <= width; ++i) text += parts[i];
  return text;
}

std::string bytes_text(int64_t bytes) {
  const double size = static_cast<double>(bytes);
  if (bytes < int64_t{1} << 10) return fmt::format("{} B", bytes);
  if (bytes < int64_t{1} << 20) return fmt::format("{:.1f} KiB", size * 0x1p-10);
  if (bytes < int64_t{1} << 30) return fmt::format("{:.2f} MiB", size * 0x1p-20);
  return fmt::format("{:.2f} GiB", size * 0x1p-30);
}

ProgressView::Style ProgressView::best_style() { return ::isatty(STDOUT_FILENO) == 1 ? Style::bar : Style::lines; }

std::string ProgressView::speed(const Progress& p) {
  if (batch_ > 0) return fmt::format("{:.0f} images/s", p.step_seconds > 0 ? static_cast<double>(batch_) / p.step_seconds : 0);
  const auto now = Clock::now();
  double seconds = p.step_seconds, epochs = 1;
  if (first_ == Clock::time_point{}) {  // the first epoch warms up: the count starts after it
    first_ = now;
    first_epoch_ = p.epoch;
  } else {
    seconds = std::chrono::duration<double>(now - first_).count();
    epochs = static_cast<double>(p.epoch - first_epoch_);
  }
  return fmt::format("{:.1f} epochs/s", seconds > 0 ? epochs / seconds : 0);
}

std::vector<std::string> ProgressView::parts(const Progress& p) {
  return {fmt::format(" epoch {:>3}/{}", p.epoch, p.epochs),
          p.step > 0 ? fmt::format(" step {}/{}", p.step, p.steps) : "",
          fmt::format("  loss {:.4f}", p.loss),
          batch_ > 0 ? "  test " + percent_text(p.test) : "  valid " + percent_text(p.valid),
          "  " + speed(p),
          fmt::format("  saved {}", bytes_text(p.saved_bytes)),
          fmt::format("  peak {}", bytes_text(p.peak_bytes))};
}

void ProgressView::draw(const Progress& p) {
  const std::string head = fmt::format("{} ", title_);
  const int width = terminal_width() - 1, beside_bar = std::max(0, width - kNarrowestBar - width_of(head));
  const std::string tail = fitting(parts(p), beside_bar);
  const double done = static_cast<double>(p.epoch) + (p.steps > 0 ? static_cast<double>(p.step) / static_cast<double>(p.steps) : 0);
  const int room = width - width_of(head) - width_of(tail);
  const std::string bar = bar_of(done / static_cast<double>(p.epochs), std::clamp(room, kNarrowestBar, kWidestBar));
  fmt::print("\r\x1b[2K{}", cut(head + bar + tail, width));
  open_ = true;
}

void ProgressView::show(const Progress& p) {
  if (style_ == Style::silent) return;
  if (style_ == Style::bar) {
    const auto now = Clock::now();
    if (p.epoch < p.epochs && now - drawn_ < kBetweenDraws) return;
    drawn_ = now;
    draw(p);
  } else {
    const std::string line = fmt::format("{:<16}", title_) + fitting(parts(p), kNoLimit);
    const bool due = p.epochs <= 20 || p.epoch == p.epochs || p.epoch * 10 / p.epochs != (p.epoch - 1) * 10 / p.epochs;
    if (p.step > 0 || !due) return;
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void ProgressView::end() {
  if (!std::exchange(open_, false)) return;
  std::fputs("\n", stdout);
  std::fflush(stdout);
}

}  // namespace satchel::tool
