#include "tools/bench_axis.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "satchel/core/keep.h"
#include "satchel/core/text_items.h"
#include "satchel/data/graph_data.h"
#include "satchel/plan/graph_plan.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/bench_graph_entries.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr double kArxivNodes = 169343;

/// What one method does at one point.
struct AxisResult {
  std::string method, text;  // as it is called, and with the point's value
  BenchResult cost;
  int64_t planned = 0;           // by plan_graph()
  std::optional<int64_t> paper;  // by the byte model of the papers' programs, labels in
  std::vector<double> tests;     // percent, one a seed
};

struct Mean {
  double mean = 0, deviation = 0;
};

Mean mean_of(const std::vector<double>& values) {
  Mean m;
  const auto count = static_cast<double>(values.size());
  for (const double v : values) m.mean += v / count;
  for (const double v : values) m.deviation += (v - m.mean) * (v - m.mean);
  m.deviation = values.size() > 1 ? std::sqrt(m.deviation / (count - 1)) : 0;
  return m;
}

[[noreturn]] void refuse_value(const std::string& axis, const std::string& rule, const std::string& value) {
  throw UsageError(fmt::format("[bench] --values of --axis {} must be {}, got '{}'", axis, rule, value));
}

int64_t whole(const std::string& axis, const std::string& value, int64_t most) {
  int64_t n = 0;
  const char* end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, n);
  if (value.empty() || code != std::errc() || stop != end || n < 1 || n > most)
    refuse_value(axis, fmt::format("whole numbers from 1 to {}", most), value);
  return n;
}

/// Blocks and bits are the method's: those of torch's own functions have neither.
std::vector<Method> methods_at(const std::vector<Method>& methods, const std::string& axis, const std::string& value) {
  if (axis != "block" && axis != "bits") return methods;
  std::vector<Method> changed;
  for (const Method& m : methods) {
    if (is_baseline(m)) {
      changed.push_back(m);
      continue;
    }
    try {
      changed.push_back(parse_method(fmt::format("{},{}={}", m.name, axis, value)));
      validate_for_graph(changed.back(), "bench");
    } catch (const Error& e) {
      throw UsageError(e.what());
    }
  }
  return changed;
}

/// G/R of a block in rows, for the byte model of the papers.
std::optional<int64_t> rows_of(const Method& method) {
  if (is_baseline(method)) return 0;
  const int64_t block = method.input.block;
  const bool published = method.name.starts_with("exact") || method.name.starts_with("blockwise");
  return published && method.input.bits == 2 && block < 0 && block != kMap ? std::optional(-block) : std::nullopt;
}

double accuracy_of(const GraphData& data, TrainOptions options, const Method& method, uint64_t seed) {
  options.method = method;
  options.seed = seed;
  return train_graph(data, options).test;
}

AxisResult result_of(const GraphData& data, const AxisPoint& point, size_t i, const BenchResult& cost, const GraphShape& shape,
                     int64_t seeds) {
  const Method& method = point.with_value[i];
  AxisResult r{point.methods[i].name, method.name, cost, 0, std::nullopt, {}};
  r.planned = total_bytes(plan_graph(shape, data.nodes, method, data.features.sparse()));
  if (const auto rows = rows_of(method); rows && shape.conv == "sage") {
    const auto training = static_cast<int64_t>(split_of(data, point.options.seed, point.options.split).train.size());
    r.paper = total_bytes(paper_saves(shape, data.nodes, training, *rows));
  }
  for (int64_t s = 0; s < seeds; ++s) r.tests.push_back(accuracy_of(data, point.options, method, static_cast<uint64_t>(s)));
  return r;
}

/// On the axes of methods alone torch's own functions have no value to change: they run once.
std::vector<AxisResult> results_at(const BenchGraphCommand& c, const AxisPoint& point, const std::vector<AxisResult>& before) {
  const bool of_method = c.axis == "block" || c.axis == "bits";
  const GraphData data = load_graph(point.data);
  const GraphBench bench(data, point.options);
  const GraphShape shape = shape_for(data, point.options.shape);
  std::vector<AxisResult> results;
  for (size_t i = 0; i < point.methods.size(); ++i) {
    if (of_method && is_baseline(point.methods[i]) && i < before.size()) {
      results.push_back(before[i]);
      continue;
    }
    const BenchResult cost = bench.run({point.with_value[i]}, false, c.steps).front();
    results.push_back(result_of(data, point, i, cost, shape, c.seeds));
  }
  return results;
}

ordered_json json_of(const AxisResult& r) {
  const bool fits = r.cost.fits;
  const auto put = [&](const auto& value) { return fits ? ordered_json(value) : ordered_json(nullptr); };
  ordered_json j{{"method", r.method},
                 {"spec", r.text},
                 {"fits", fits},
                 {"epoch_seconds", put(fits ? r.cost.median() : 0)},
                 {"saved_bytes", put(r.cost.cost.saved_bytes)},
                 {"loss_bytes", put(r.cost.cost.loss_bytes)},
                 {"peak_bytes", put(r.cost.peak_bytes())},
                 {"planned_bytes", r.planned},
                 {"paper_bytes", r.paper ? ordered_json(*r.paper) : ordered_json(nullptr)}};
  if (!r.tests.empty()) {
    const Mean m = mean_of(r.tests);
    j.update({{"test", m.mean}, {"test_deviation", m.deviation}, {"tests", r.tests}});
  }
  return j;
}

void add_rows(const std::string& value, const std::vector<AxisResult>& results, std::vector<std::vector<std::string>>& rows) {
  for (const AxisResult& r : results) {
    const Mean m = mean_of(r.tests);
    const std::string test = r.tests.empty()       ? "-"
                             : r.tests.size() == 1 ? fmt::format("{:.2f}", m.mean)
                                                   : fmt::format("{:.2f} ± {:.2f}", m.mean, m.deviation);
    const std::string paper = r.paper ? fmt::format("{:.2f} MiB", static_cast<double>(*r.paper) / (1 << 20)) : "-";
    if (!r.cost.fits) {
      rows.push_back({value, r.method, test, "does not fit", bytes_text(r.planned), paper, "-", "-"});
      continue;
    }
    rows.push_back({value, r.method, test, bytes_text(r.cost.cost.saved_bytes), bytes_text(r.planned), paper,
                    bytes_text(r.cost.peak_bytes()), fmt::format("{:.2f} ms", r.cost.median() * 1e3)});
  }
}

}  // namespace

std::string default_values(const std::string& axis) {
  if (axis == "block") return "row,2rows,4rows,8rows,16rows,32rows,64rows";
  if (axis == "bits") return "2,3";  // what every method takes
  if (axis == "hidden") return "64,128,256";
  if (axis == "layers") return "2,3,4";
  return "5000,10000,20000";
}

std::vector<AxisPoint> axis_points(const BenchGraphCommand& c, const TrainOptions& options) {
  const std::vector<Method> methods = methods_from(c.methods);
  const std::string values = c.values.empty() ? default_values(c.axis) : c.values;
  std::vector<AxisPoint> points;
  for (const std::string_view part : split(values, ',')) {
    const std::string value(part);
    AxisPoint p{value, c.data, methods, methods_at(methods, c.axis, value), options};
    if (c.axis == "bits") whole(c.axis, value, 8);
    if (c.axis == "hidden") p.options.shape.hidden = whole(c.axis, value, 1 << 20);
    if (c.axis == "layers") p.options.shape.layers = whole(c.axis, value, 1000);
    if (c.axis == "nodes") {
      if (!c.data.starts_with("synthetic:arxiv"))
        throw UsageError(fmt::format("[bench] --axis nodes needs --data synthetic:arxiv, whose size it changes, got {}", c.data));
      p.data = fmt::format("synthetic:arxiv,scale={}", static_cast<double>(whole(c.axis, value, int64_t{1} << 31)) / kArxivNodes);
    }
    points.push_back(std::move(p));
  }
  return points;
}

void run_bench_axis(const BenchGraphCommand& c, const TrainOptions& given) {
  TrainOptions options = given;
  options.epochs = c.epochs;
  options.clip = c.clip;
  options.eval_every = std::max<int64_t>(1, c.epochs / 40);
  const std::vector<AxisPoint> points = axis_points(c, options);
  const at::Device device = use_device(c.device, "bench");
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const double error = check_gradients(options);
  const Tf32Guard tf32(options);
  const std::string model = fmt::format("{}, {} layers × {}", c.model, c.shape.layers, c.shape.hidden);
  const bool silent = c.json == "-";
  if (!silent) {
    fmt::print("{} on {} by {}; {}; gradients at 32 bits are torch's within {:.1e}\n\n", model, c.data, c.axis,
               c.seeds == 0 ? "nothing is trained" : fmt::format("{} epochs, {} {}", c.epochs, c.seeds, c.seeds == 1 ? "seed" : "seeds"),
               error);
    std::fflush(stdout);
  }
  std::vector<std::vector<std::string>> rows{{c.axis, "method", "test %", "saved", "planned", "paper's model", "peak", "epoch"}};
  ordered_json list = ordered_json::array();
  std::vector<AxisResult> before;
  for (const AxisPoint& point : points) {
    before = results_at(c, point, before);
    release_cached_memory(device);
    add_rows(point.value, before, rows);
    ordered_json results = ordered_json::array();
    for (const AxisResult& r : before) results.push_back(json_of(r));
    list.push_back({{"value", point.value}, {"results", std::move(results)}});
    // After every point: what is there stays, whatever comes.
    if (!c.json.empty() && (!silent || &point == &points.back())) {
      write_json(c.json,
                 {{"kind", "bench axis"},
                  {"version", SATCHEL_VERSION},
                  {"axis", c.axis},
                  {"data", c.data},
                  {"model", model},
                  {"device", c.device},
                  {"epochs", c.epochs},
                  {"seeds", c.seeds},
                  {"steps", c.steps},
                  {"tf32", c.tf32},
                  {"amp", c.amp},
                  {"gradient_error", error},
                  {"machine", machine_json(c.device)},
                  {"points", list}},
                 "bench");
    }
  }
  if (silent) return;
  print_table(rows);
  fmt::print(
      "\nsaved: measured, in bytes that tensors asked for; planned: from sizes; paper's model: what the papers' own programs keep, labels "
      "in (EXACT and block-wise, sage)\n");
}

}  // namespace satchel::tool
