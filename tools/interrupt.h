// Ctrl-C of long commands: the first is noted, so that what is at work can end well; the next one kills.
#pragma once

#include <csignal>

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

}  // namespace satchel::tool
