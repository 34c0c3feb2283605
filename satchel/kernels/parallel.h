// The threads of the torch in this process, without its headers: satchel/tensor/parallel.cpp asks ATen, satchel/stable/parallel.cpp the
// stable ABI.
#pragma once

#include <cstdint>
#include <functional>

namespace satchel {

using RangeFunction = std::function<void(int64_t first, int64_t last)>;

/// Calls run for parts of [first, last), none shorter than `grain` but the last, on all threads.
void parallel_for(int64_t first, int64_t last, int64_t grain, const RangeFunction& run);

int thread_count();

}  // namespace satchel
