// Ctrl-C of long commands: the first is noted, so that what is at work can end well; the next one kills.
#pragma once

#include <csignal>
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

/// Calls run(method, s) for all methods of seed s, then of the next: pairs stay together. True where it was stopped on the way.
template <class Method, class Run>
bool for_pairs(int64_t seeds, const std::vector<Method>& methods, const Run& run) {
  for (int64_t s = 0; s < seeds; ++s) {
    for (const Method& method : methods) {
      run(method, static_cast<uint64_t>(s));
      if (stop_asked != 0) return true;
    }
  }
  return false;
}

}  // namespace satchel::tool
