#include "satchel/autograd/saving.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <mutex>

#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"

namespace satchel {

at::Tensor fresh_seed(at::Device device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return seed_tensor(at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), device);
}

void check_dropout(double p, const char* op) {
  if (!(p >= 0) || std::round(p * 65536) >= 65536) fail(op, "dropout must be at least 0 and less than 1", p);
}

double dropout_scale(double p) { return 65536 / (65536 - std::round(p * 65536)); }

}  // namespace satchel
