// `satchel bench product`: products of a SAGE training step in float32, on tensor cores, beside torch's own (cuBLAS), with the errors of
// both.
#pragma once

#include <CLI/App.hpp>

namespace satchel::tool {

void add_bench_product(CLI::App& bench);

}  // namespace satchel::tool
