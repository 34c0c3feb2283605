// Built where CUDA was found; memory_cuda_off.cpp stands in elsewhere.
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "satchel/core/error.h"
#include "satchel/train/memory_parts.h"

// Of ATen/cuda/CUDAContextLight.h, which wants the headers of cuBLAS and cuSPARSE, that a toolkit of nvcc alone does not have.
namespace at::cuda {
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}

namespace satchel {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

/// The device's number. Torch's allocator answers only once CUDA has been started.
c10::DeviceIndex started(c10::Device device) {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  if (index >= c10::cuda::device_count()) fail("memory", "device must be one that is there", device);
  return index;
}

const c10::CachingAllocator::Stat& total(const c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

struct DeviceMemory {
  int64_t free = 0, total = 0;
};

DeviceMemory memory_of(c10::DeviceIndex index) {
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::CUDA, index));
  size_t free = 0, all = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  return {static_cast<int64_t>(free), static_cast<int64_t>(all)};
}

}  // namespace

CudaMemory cuda_memory(c10::Device device) {
  const auto stats = allocator::getDeviceStats(started(device));
  const int64_t allocated = total(stats.allocated_bytes).current, requested = total(stats.requested_bytes).current;
  // Blocks that another stream may still use count as requested, though their tensors are gone; their own sizes must do for them.
  const int64_t waiting = total(stats.active_bytes).current - allocated;
  // An allocator that counts no requests (cudaMallocAsync) says 0.
  return {allocated, total(stats.allocated_bytes).peak, requested > 0 ? requested - waiting : allocated};
}

void reset_cuda_peak(c10::Device device) { allocator::resetPeakStats(started(device)); }

int64_t cuda_free_memory(c10::Device device) {
  const c10::DeviceIndex index = started(device);
  const DeviceMemory memory = memory_of(index);
  const auto stats = allocator::getDeviceStats(index);
  const int64_t reserved = total(stats.reserved_bytes).current, used = total(stats.allocated_bytes).current;
  const auto allowed = static_cast<int64_t>(allocator::getMemoryFraction(index) * static_cast<double>(memory.total));
  return std::max<int64_t>(0, std::min(memory.free + reserved, allowed) - used);
}

void cuda_empty_cache(c10::Device device) {
  started(device);
  allocator::emptyCache();
}

void cuda_release_workspaces(c10::Device device) {
  started(device);
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  at::cuda::clearCublasWorkspaces();
}

double cuda_fraction(c10::Device device) { return allocator::getMemoryFraction(started(device)); }

void set_cuda_fraction(c10::Device device, double fraction) { allocator::setMemoryFraction(fraction, started(device)); }

int64_t cuda_total_memory(c10::Device device) { return memory_of(started(device)).total; }

}  // namespace satchel
