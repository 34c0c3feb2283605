// torch's setting against fragmentation: segments of device memory that grow in place (`expandable_segments`). Private to this room.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace satchel {

/// While it lives, the CUDA allocator's new segments grow in place; then as before. The process's other allocator settings
/// (PYTORCH_ALLOC_CONF) stay. Segments with something in them stay as they were made: for all of them to grow it has to come before the
/// process's first allocation on the device; those with nothing in them are given back here. All threads': torch has one setting.
class ExpandableSegments {
 public:
  explicit ExpandableSegments(c10::Device device);
  ~ExpandableSegments();
  ExpandableSegments(const ExpandableSegments&) = delete;
  ExpandableSegments& operator=(const ExpandableSegments&) = delete;

 private:
  c10::Device device_;
  bool before_;
  std::string settings_;  // that stood before
};

}  // namespace satchel
