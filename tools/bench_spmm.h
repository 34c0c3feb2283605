// `satchel bench spmm`: A·x beside torch's own product of a sparse CSR matrix (cuSPARSE on CUDA, MKL on the CPU).
#pragma once

#include <CLI/App.hpp>

namespace satchel::tool {

void add_bench_spmm(CLI::App& bench);

}  // namespace satchel::tool
