// The old name of bit_allocator.h. It goes with the next release.
#pragma once

#include "satchel/plan/bit_allocator.h"

namespace satchel {
using ShareOut [[deprecated("it is called RunningBitAllocator")]] = RunningBitAllocator;
using ShareOutOptions [[deprecated("they are called BitAllocatorOptions")]] = BitAllocatorOptions;
}  // namespace satchel
