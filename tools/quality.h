// What packing did to a tensor, and the few tensor helpers the commands share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "satchel/tensor/packed.h"

namespace satchel::tool {

/// Errors are over the pairs (x, unpacked) that are both finite.
struct Quality {
  int64_t compared = 0;    // such pairs
  double relative = 0;     // ‖unpacked − x‖ / ‖x‖
  double on_relative = 0;  // the same over x > 0
  double bias = 0;         // mean of unpacked − x, over the root mean square of x
  double bias_spread = 0;  // its standard error, errors taken as independent
  int64_t bad_values = 0;  // NaN or infinity in x
  int64_t bad_blocks = 0;  // blocks that unpack to NaN
  int64_t blocks = 0;
  std::vector<int64_t> codes;  // how often each code stands; empty where nothing is quantised
};

Quality quality_of(const at::Tensor& x, const Packed& packed, const at::Tensor& unpacked);

/// A tensor over memory that `release` frees.
at::Tensor tensor_over(void* data, at::IntArrayRef shape, at::IntArrayRef strides, at::ScalarType type,
                       const std::function<void(void*)>& release);

/// x on "cpu", "cuda" or "cuda:N"; `[op] …` where there is no such GPU or no CUDA kernel.
at::Tensor to_device(const at::Tensor& x, const std::string& device, const char* op);

/// The device of that name, which becomes this thread's current one for the rest of the command where it is a GPU. `[op] …` where there
/// is none.
at::Device use_device(const std::string& name, const char* op);

/// Waits until the device has done all that was asked of it.
void wait_for(const std::string& device);

}  // namespace satchel::tool
