// What a thread remembers between the functions that it records: the norm that defers its packing, inputs that stand packed, ranges passed
// on, seeds, bytes on their way to the host. All of it is in one place. Private to the rooms that define functions.
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

/// This thread's.
StepContext& step_context();

}  // namespace satchel
