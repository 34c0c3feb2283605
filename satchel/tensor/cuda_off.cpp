// Built where CUDA was not found; cuda_on.cpp stands in elsewhere.
#include "satchel/core/error.h"
#include "satchel/tensor/device.h"

namespace satchel {

cuda::StreamHandle current_stream(at::Device, const char* op) { fail(op, "built without CUDA"); }

}  // namespace satchel
