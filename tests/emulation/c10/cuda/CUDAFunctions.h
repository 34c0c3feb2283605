// What tests/cuda uses of torch's CUDA headers, for the emulated device (torch_device.cpp): one device, one stream, and no waiting.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>

#include "satchel/train/memory_parts.h"

namespace c10::cuda {

/// L_ERROR: what would wait for the GPU throws, as in torch.
enum class SyncDebugMode { L_DISABLED, L_WARN, L_ERROR };
class WarningState {
 public:
  void set_sync_debug_mode(SyncDebugMode mode) { mode_ = mode; }
  SyncDebugMode get_sync_debug_mode() const { return mode_; }

 private:
  SyncDebugMode mode_ = SyncDebugMode::L_DISABLED;
};
inline WarningState& warning_state() {
  static WarningState state;
  return state;
}

inline DeviceIndex device_count() { return 1; }
inline void device_synchronize() {}

struct CUDAGuard {
  explicit CUDAGuard(DeviceIndex) {}
};

namespace CUDACachingAllocator {

struct Stat {
  int64_t current, peak;
};
struct DeviceStats {
  std::array<Stat, 1> allocated_bytes;
};
inline DeviceStats getDeviceStats(DeviceIndex index) {
  const satchel::CudaMemory now = satchel::cuda_memory(Device(kCUDA, index));
  return {{{{now.allocated, now.peak}}}};
}
inline void resetPeakStats(DeviceIndex index) { satchel::reset_cuda_peak(Device(kCUDA, index)); }
inline void emptyCache() {}

}  // namespace CUDACachingAllocator
}  // namespace c10::cuda
