// What the nets of `satchel bench bias` call: torch's own functions, or Satchel's with a method.
#pragma once

#include <memory>

#include "satchel/core/method.h"
#include "tools/bench_bias_nets.h"

namespace satchel::tool {

/// torch's own. `pass` numbers the pass whose dropout masks are drawn.
std::unique_ptr<NetFunctions> torch_functions(uint64_t pass, at::Device device);

/// Satchel's. Rounding noise is that of `pass`, for forward and backward as long as the functions live; one at a time in a thread.
std::unique_ptr<NetFunctions> satchel_functions(const Method& method, uint64_t pass, at::Device device);

}  // namespace satchel::tool
