// `satchel bench batch`: the largest batch a method trains under a limit of memory, found by trying.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <functional>

#include "tools/bench_images.h"

namespace satchel::tool {

/// The largest multiple of `step` up to `most` that fits; 0 where none does. Starts near `guess`, doubles or halves away from it and then
/// halves the interval; `fits` is asked about a number once, and only about multiples of `step`.
int64_t largest_that_fits(int64_t guess, int64_t step, int64_t most, const std::function<bool(int64_t)>& fits);

struct BenchBatchCommand {
  BenchImagesCommand images;  // its batch is unused
  int64_t multiple = 8, most = 65536;
};

void add_bench_batch(CLI::App& bench);
void run_bench_batch(const BenchBatchCommand& command);

}  // namespace satchel::tool
