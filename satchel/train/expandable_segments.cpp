#include "satchel/train/expandable_segments.h"

#include <c10/core/AllocatorConfig.h>

#include "satchel/train/memory.h"

namespace satchel {
namespace {

/// torch resets what a text of settings does not name: the old ones come first, and of two the last counts.
void set_growing(const std::string& settings, bool on) {
  c10::CachingAllocator::setAllocatorSettings(settings + (settings.empty() ? "" : ",") + "expandable_segments:" + (on ? "True" : "False"));
}

}  // namespace

ExpandableSegments::ExpandableSegments(c10::Device device)
    : device_(device),
      before_(c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()),
      settings_(c10::CachingAllocator::getAllocatorSettings()) {
  if (before_) return;
  release_cached_memory(device_);
  set_growing(settings_, true);
}

ExpandableSegments::~ExpandableSegments() {
  if (before_) return;
  try {
    set_growing(settings_, false);
    release_cached_memory(device_);
  } catch (...) {  // a device that failed: the setting goes with the process
  }
}

}  // namespace satchel
