// `satchel bench bias`: are a method's weight gradients right on average? Nets of many kinds, with plain torch as the truth.
#pragma once

#include <CLI/App.hpp>

namespace satchel::tool {

void add_bench_bias(CLI::App& bench);

}  // namespace satchel::tool
