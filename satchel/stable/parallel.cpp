#include "satchel/kernels/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace satchel {

void parallel_for(int64_t first, int64_t last, int64_t grain, const RangeFunction& run) {
  torch::stable::parallel_for(first, last, grain, run);
}

int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace satchel
