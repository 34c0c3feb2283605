// Stands in for bench_device_on.cpp where the build has no CUDA.
#include "satchel/core/error.h"
#include "tools/bench.h"
#include "tools/tool.h"

namespace satchel::tool {

void bench_device(const Setup&, const Report&) { fail("bench", "--device cuda needs a build with CUDA", "a build without"); }

std::string gpu_name() { return ""; }

}  // namespace satchel::tool
