// Stands in for slope.cu where CMake found no CUDA.
#include "satchel/core/error.h"
#include "satchel/kernels/slope.h"

namespace satchel::cuda {

void slope_encode(SlopeOf, const void*, DType, int64_t, const float*, int, const uint64_t*, uint8_t*, void*) {
  fail("slope_encode", "built without CUDA");
}
void table_decode(const uint8_t*, int64_t, int, const float*, void*, DType, void*) { fail("table_decode", "built without CUDA"); }

}  // namespace satchel::cuda
