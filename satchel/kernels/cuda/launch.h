// What every launch needs of the host. Out of line, and without the standard library's strings: they cost nvcc a second and a half a file.
#pragma once

#include <cstdint>

#include "satchel/kernels/cuda/gpu.h"

namespace satchel::cuda {

/// fail() of core/error.h.
[[noreturn]] void fail(const char* op, const char* rule);
[[noreturn]] void fail(const char* op, const char* rule, int64_t value);
[[noreturn]] void fail(const char* op, const char* rule, const char* value);

/// Throws if the launch just made was refused.
void check_launch(const char* op);

/// Throws unless thread blocks of a kernel may have so many bytes of shared memory beside what it declares.
void allow_shared(const void* kernel, int64_t bytes, const char* op);

/// The current device. Asked once; where there is none, what every GPU has. SATCHEL_GPU, a name of kGpus, lays launches out as on that
/// GPU, for tests.
const Gpu& this_gpu();

/// A grid's size in thread blocks, checked: CUDA takes less than 2^31 of them.
inline unsigned grid_size(int64_t blocks) {
  if (blocks >= int64_t{1} << 31) fail("cuda", "a launch must have less than 2^31 thread blocks", blocks);
  return static_cast<unsigned>(blocks);
}

}  // namespace satchel::cuda
