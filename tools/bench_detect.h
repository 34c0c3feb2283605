// `satchel bench detection`: a whole training step of a detector, method by method.
#pragma once

#include <CLI/App.hpp>

namespace satchel::tool {

void add_bench_detection(CLI::App& bench);

}  // namespace satchel::tool
