// `satchel bench graph --axis`: accuracy, bytes and time as one size changes: the block, the bits, the width, the depth or the nodes.
#pragma once

#include <string>
#include <vector>

#include "satchel/core/method.h"
#include "satchel/train/train.h"
#include "tools/bench_graph.h"

namespace satchel::tool {

inline const std::vector<std::string> kAxes = {"block", "bits", "hidden", "layers", "nodes"};

/// The values of an axis where none are given.
std::string default_values(const std::string& axis);

/// The methods, options and data of a point; `command` has the axis. Throws UsageError for a value that does not fit.
struct AxisPoint {
  std::string value, data;
  std::vector<Method> methods;     // as they are called, without the value
  std::vector<Method> with_value;  // what runs
  TrainOptions options;
};
std::vector<AxisPoint> axis_points(const BenchGraphCommand& command, const TrainOptions& options);

void run_bench_axis(const BenchGraphCommand& command, const TrainOptions& options);

}  // namespace satchel::tool
