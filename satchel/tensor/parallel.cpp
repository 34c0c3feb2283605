#include "satchel/kernels/parallel.h"

#include <ATen/Parallel.h>

namespace satchel {

void parallel_for(int64_t first, int64_t last, int64_t grain, const RangeFunction& run) { at::parallel_for(first, last, grain, run); }

int thread_count() { return at::get_num_threads(); }

}  // namespace satchel
