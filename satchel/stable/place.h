// Where kernels run: the CPU, or a CUDA device and torch's current stream of it.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::stable {

/// place_on.cpp asks torch, place_off.cpp throws "[op] built without CUDA".
cuda::StreamHandle current_stream(int32_t device, const char* op);

/// Makes the tensor's device the current one for as long as it lives.
class Place {
 public:
  Place(const torch::stable::Tensor& x, const char* op) {
    if (!x.is_cuda()) return;
    stream_ = current_stream(x.get_device_index(), op);
    guard_.emplace(x.get_device_index());
  }

  bool cuda() const { return guard_.has_value(); }
  cuda::StreamHandle stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cuda::StreamHandle stream_ = nullptr;
};

}  // namespace satchel::stable
