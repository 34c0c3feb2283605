// Built where CUDA was not found; memory_cuda_on.cpp stands in elsewhere.
#include "satchel/core/error.h"
#include "satchel/train/memory_parts.h"

namespace satchel {

CudaMemory cuda_memory(c10::Device) { fail("memory", "built without CUDA"); }

void reset_cuda_peak(c10::Device) { fail("memory", "built without CUDA"); }

int64_t cuda_free_memory(c10::Device) { fail("memory", "built without CUDA"); }

void cuda_empty_cache(c10::Device) { fail("memory", "built without CUDA"); }

void cuda_release_workspaces(c10::Device) { fail("memory", "built without CUDA"); }

double cuda_fraction(c10::Device) { fail("memory", "built without CUDA"); }

void set_cuda_fraction(c10::Device, double) { fail("memory", "built without CUDA"); }

int64_t cuda_total_memory(c10::Device) { fail("memory", "built without CUDA"); }

}  // namespace satchel
