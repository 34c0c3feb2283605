// Tests that repeat a pass over small tensors hundreds of times: waiting for a second thread costs more than it helps.
#pragma once

#include <ATen/Parallel.h>

namespace satchel::test {

/// While it lives, torch and Satchel work in the calling thread alone.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace satchel::test
