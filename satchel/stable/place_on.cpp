// Built where CUDA was found; place_off.cpp stands in elsewhere.
#define USE_CUDA  // the shim's header declares the stream's function only then
#include "satchel/stable/place.h"

namespace satchel::stable {

cuda::StreamHandle current_stream(int32_t device, const char*) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace satchel::stable
