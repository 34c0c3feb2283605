// `satchel bench graph`: the whole training step beside plain torch's.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "satchel/plan/graph_plan.h"

namespace satchel::tool {

struct BenchGraphCommand {
  std::string data = "synthetic:arxiv,scale=0.1";
  std::string model = "sage", norm = "batch", activation = "relu", methods = "fp32,exact,blockwise,satchel", amp = "auto",
              last_layer = "all";
  GraphShape shape;
  int64_t steps = 15;
  std::string device = "cpu";
  int64_t threads = 0;
  bool tf32 = false, no_cache = false, no_torch = false;
  std::optional<bool> cuda_graph;  // as TrainOptions has it
  std::string cache;               // most bytes of A·X that are kept; empty: all
  std::string memory_cap;          // bytes of torch's allocator, as parse_bytes() reads them; empty: none
  std::string json;
  // With an axis: one size changes, and models are trained for their accuracy.
  std::string axis, values;  // values empty: those of tools/bench_axis.h
  int64_t seeds = 1, epochs = 100;
  double clip = 0;
};

void add_bench_graph(CLI::App& bench);
void run_bench_graph(const BenchGraphCommand& command);

}  // namespace satchel::tool
