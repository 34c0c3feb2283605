#pragma once

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "CUDAFunctions.h"

namespace c10::cuda {

inline Stream getStreamFromPool() { return impl::VirtualGuardImpl(kCUDA).getStreamFromGlobalPool(Device(kCUDA, 0)); }
using CUDAStreamGuard = StreamGuard;

}  // namespace c10::cuda
