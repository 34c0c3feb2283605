// What memory.cpp asks for. Private to this room.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace satchel {

struct CudaMemory {
  int64_t allocated = 0, peak = 0;  // bytes of blocks with a tensor, now and the most since the last reset
  int64_t requested = 0;            // bytes that those tensors asked for, now
};

/// memory_cuda_on.cpp asks torch's allocator, memory_cuda_off.cpp throws "[memory] built without CUDA".
CudaMemory cuda_memory(c10::Device device);
void reset_cuda_peak(c10::Device device);
int64_t cuda_free_memory(c10::Device device);
void cuda_empty_cache(c10::Device device);
void cuda_release_workspaces(c10::Device device);
/// The share of a device's memory that torch's allocator may take.
double cuda_fraction(c10::Device device);
void set_cuda_fraction(c10::Device device, double fraction);
/// All memory of a device, in bytes.
int64_t cuda_total_memory(c10::Device device);

/// Free memory as /proc and /sys under `root` say; `root` is empty but in tests.
int64_t host_free_memory(const std::string& root);

}  // namespace satchel
