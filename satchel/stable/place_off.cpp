// Built where CUDA was not found; place_on.cpp stands in elsewhere.
#include "satchel/core/error.h"
#include "satchel/stable/place.h"

namespace satchel::stable {

cuda::StreamHandle current_stream(int32_t, const char* op) { fail(op, "built without CUDA"); }

}  // namespace satchel::stable
