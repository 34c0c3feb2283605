// `satchel bench chain`: a norm and an activation, forward and backward, beside torch's own: time and saved bytes.
#pragma once

#include <CLI/App.hpp>

namespace satchel::tool {

void add_bench_chain(CLI::App& bench);

}  // namespace satchel::tool
