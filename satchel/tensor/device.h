// Where kernels run: the CPU, or a CUDA device and its current stream. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "satchel/kernels/cuda/cuda.h"

namespace satchel {

/// The current stream of a CUDA device: cuda_on.cpp asks torch, cuda_off.cpp throws "[op] built without CUDA".
cuda::StreamHandle current_stream(at::Device device, const char* op);

/// Makes a device the current one for as long as it lives.
class Place {
 public:
  Place(at::Device device, const char* op) : guard_(device), cuda_(device.is_cuda()) {
    if (cuda_) stream_ = current_stream(device, op);
  }

  bool cuda() const { return cuda_; }
  cuda::StreamHandle stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  bool cuda_;
  cuda::StreamHandle stream_ = nullptr;
};

}  // namespace satchel
