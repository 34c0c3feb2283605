// Seconds of one call of what a benchmark runs.
#pragma once

#include <c10/core/Device.h>
#include <torch/cuda.h>

#include <chrono>
#include <vector>

#include "satchel/core/median.h"

namespace satchel::tool {

/// The median of `repeat` runs after two that do not count; on CUDA many calls stand in the queue at a time.
template <class F>
double time_of(const F& run, at::Device device, int repeat) {
  const int each = device.is_cuda() ? 20 : 1;
  const auto finish = [&] {
    if (device.is_cuda()) torch::cuda::synchronize();
  };
  std::vector<double> seconds;
  for (int i = -2; i < repeat; ++i) {
    finish();
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < each; ++k) run();
    finish();
    if (i >= 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / each);
  }
  return median(seconds);
}

}  // namespace satchel::tool
