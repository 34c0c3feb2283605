// What a thread remembers between the functions that it records: the norm that defers its packing, inputs that stand packed, ranges passed
// on, seeds, bytes on their way to the host. All of it is in one place, so that a program can keep two models' steps apart in one thread.
// Private to the rooms that define functions.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace satchel {

/// Parts by their types, each made when it is first asked for: a part is a struct of the file that uses it.
class StepContext {
 public:
  template <class Part>
  Part& part() {
    static const size_t slot = next_slot();
    if (parts_.size() <= slot) parts_.resize(slot + 1);
    if (parts_[slot] == nullptr) parts_[slot] = std::make_shared<Part>();
    return *static_cast<Part*>(parts_[slot].get());
  }

 private:
  static size_t next_slot() {
    static std::atomic<size_t> slots{0};
    return slots++;
  }
  std::vector<std::shared_ptr<void>> parts_;
};

/// Of the innermost StepScope of this thread, else the thread's own.
StepContext& step_context();

/// While it lives, this thread's functions remember things in a context of their own, given or fresh.
class StepScope {
 public:
  explicit StepScope(std::shared_ptr<StepContext> context = std::make_shared<StepContext>());
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

 private:
  std::shared_ptr<StepContext> outer_;
};

}  // namespace satchel
