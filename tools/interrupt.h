// Ctrl-C of long commands: the first is noted, so that what is at work can end well; the next one kills.
#pragma once

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace satchel::tool {

inline volatile std::sig_atomic_t stop_asked = 0;

/// The first SIGINT sets stop_asked, for as long as this lives.
class StopOnInterrupt {
 public:
  StopOnInterrupt() {
    stop_asked = 0;
    struct sigaction action {};
    action.sa_handler = [](int) { stop_asked = 1; };
    action.sa_flags = SA_RESETHAND | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &before_);
  }
  ~StopOnInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

/// Calls run(method, s) for all methods of seed s, then of the next: pairs stay together. Then report(interrupted), also of
/// those that ended before one that throws. True where SIGINT came on the way.
template <class Method, class Run, class Report>
bool run_pairs(int64_t seeds, const std::vector<Method>& methods, const Run& run, const Report& report) {
  const StopOnInterrupt guard;
  bool any = false;
  try {
    for (int64_t s = 0; s < seeds && stop_asked == 0; ++s) {
      for (size_t i = 0; i < methods.size() && stop_asked == 0; ++i) {
        run(methods[i], static_cast<uint64_t>(s));
        any = true;
      }
    }
  } catch (...) {
    if (any) report(false);
    throw;
  }
  const bool interrupted = stop_asked != 0;
  report(interrupted);
  return interrupted;
}

}  // namespace satchel::tool
