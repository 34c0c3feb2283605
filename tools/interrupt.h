// Signals that ask a long command to stop: the first is noted and answered at once, so that what is at work can end well.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <string>

namespace satchel::tool {

inline volatile std::sig_atomic_t stop_asked = 0;  // the signal that did

/// For as long as this lives, the first SIGINT (Ctrl-C), SIGTERM or SIGHUP sets stop_asked and writes a line to stderr. Ctrl-C after it
/// kills; the other two do no more: a terminal that closes sends SIGHUP twice. What nohup has turned off stays so.
class StopSignals {
 public:
  /// `answer`: the line. `outlives_readers`: neither a closed pipe nor a limit on the size of files kills; writes fail instead.
  StopSignals(const std::string& answer, bool outlives_readers) {
    stop_asked = 0;
    const std::string line = "\nsatchel: " + answer + "\n";
    length_ = std::min(line.size(), answer_.size());
    std::copy_n(line.begin(), length_, answer_.begin());
    for (size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      const bool stops = i < kStopping, off = before_[i].sa_handler == SIG_IGN && kSignals[i] == SIGHUP;
      if (off || (!stops && !outlives_readers)) continue;
      set(kSignals[i], stops ? note : SIG_IGN);
    }
  }
  ~StopSignals() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ};
  static constexpr size_t kStopping = 3;

  static void set(int signal, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
  }
  static void note(int signal) {
    if (stop_asked != 0) return;
    stop_asked = signal;
    set(SIGINT, SIG_DFL);
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, answer_.data(), length_);
  }

  static inline std::array<char, 1024> answer_{};
  static inline size_t length_ = 0;
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace satchel::tool
