#include "tools/bench_graph.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "satchel/train/step.h"
#include "tools/progress.h"
#include "tools/tool.h"
#include "tools/torch_model.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kCheckNodes = 2000;
constexpr int64_t kWarmUps = 2;  // the second one's memory is watched

/// A model that trains: torch's own functions, or a method of this library.
struct Entry {
  std::string name;
  GraphModel model = nullptr;
  std::unique_ptr<ParameterStep> optimizer;
  StepParts parts;
  StepCost cost;
  int64_t cached_bytes = 0;
  std::vector<double> seconds;

  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

GraphModel seeded_model(const TrainOptions& options) {
  at::manual_seed(options.seed);
  GraphModel model(GraphModelOptions{options.shape, options.method});
  model->to(device_of(options.device));
  return model;
}

/// The data set with what plain steps read and what the methods read.
struct Bench {
  TrainOptions options;
  GraphTask task;
  TorchAdjacency torch;
  GraphInput cached;  // with A·X where the methods would make it

  Bench(const GraphData& data, const TrainOptions& asked) : options(asked) {
    options.shape = shape_for(data, options.shape);
    options.method = parse_method("fp32");
    if (data.features.sparse()) fail("bench", "features must be dense", "sparse ones");
    task = make_task(data, options);
    torch = {torch_csr(task.a.matrix), torch_csr(task.a.transpose)};
    TrainOptions packed = options;
    packed.method = parse_method("satchel");
    cached = caches_aggregate(task, packed) ? with_aggregated(task.input, task.a) : task.input;
  }

  Entry plain_torch() const {
    Entry e{"torch", seeded_model(options), nullptr, {}, {}, 0, {}};
    e.optimizer = std::make_unique<ParameterStep>(options, e.model->parameters());
    e.parts = {[this, model = e.model] { return torch_forward(model, task.input.x, torch); },
               [this](const at::Tensor& logits) { return loss_of(task, logits, true); }};
    return e;
  }

  Entry method(const Method& method) const {
    TrainOptions own = options;
    own.method = method;
    Entry e{method.name, seeded_model(own), nullptr, {}, {}, 0, {}};
    e.optimizer = std::make_unique<ParameterStep>(own, e.model->parameters());
    const GraphInput& input = method.plain || method.packs_data ? task.input : cached;
    e.cached_bytes = input.aggregated.defined() ? static_cast<int64_t>(input.aggregated.nbytes()) : 0;
    e.parts = {[this, &input, model = e.model]() mutable { return model->forward(input, task.a); },
               [this, plain = method.plain](const at::Tensor& logits) { return loss_of(task, logits, plain); }};
    return e;
  }
};

/// ‖own − reference‖ / ‖reference‖ over the gradients of all parameters together: a bias before a BatchNorm has none of its own.
double gradient_error(const Entry& own, const Entry& reference) {
  for (const Entry* e : {&own, &reference}) {
    at::manual_seed(1);
    e->parts.loss(e->parts.forward()).backward();
  }
  const auto expected = reference.model->named_parameters();
  double difference = 0, norm = 0;
  for (const auto& item : own.model->named_parameters()) {
    const at::Tensor e = expected[item.key()].grad().to(at::kDouble), g = item.value().grad().to(at::kDouble);
    difference += (g - e).square().sum().item<double>();
    norm += e.square().sum().item<double>();
  }
  return std::sqrt(difference / norm);
}

/// At 32 bits a method's gradients are plain torch's. Without dropout, which draws other masks.
double check_gradients(TrainOptions options) {
  options.shape.dropout = 0;
  const GraphData small = load_graph(fmt::format("synthetic:nodes={},edges={},features=64,classes=8", kCheckNodes, 7 * kCheckNodes));
  const Bench bench(small, options);
  const double error = gradient_error(bench.method(parse_method("bits=32")), bench.plain_torch());
  // A gradient sums over all nodes, layer by layer: each sum of n float32 terms is off by at most n·2^−24 of their size.
  const double most = static_cast<double>(kCheckNodes * options.shape.layers) * 0x1p-24;
  if (!(error <= most)) fail("bench", fmt::format("gradients at 32 bits must be plain torch's within {:.1e}", most), error);
  return error;
}

void time_steps(std::vector<Entry>& entries, at::Device device, int64_t steps) {
  for (int64_t round = -kWarmUps; round < steps; ++round) {
    for (Entry& e : entries) {
      const auto start = std::chrono::steady_clock::now();
      train_step(e.parts, *e.optimizer, device, derive_seed(1, static_cast<uint64_t>(round + kWarmUps), 0, 0),
                 round == -1 ? &e.cost : nullptr)
          .item<float>();
      if (round >= 0) e.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
}

void print_results(const std::vector<Entry>& entries) {
  const Entry& torch = entries.front();
  std::vector<std::vector<std::string>> rows{{"method", "epoch", "of torch", "saved", "loss", "peak"}};
  for (const Entry& e : entries) {
    const auto beside = [&](int64_t own, int64_t base) {
      return bytes_text(own) + (&e == &torch ? "" : " " + less_text(static_cast<double>(base), static_cast<double>(own)));
    };
    rows.push_back({e.name, fmt::format("{:.2f} ms", e.median() * 1e3), fmt::format("{:.2f}x", e.median() / torch.median()),
                    beside(e.cost.saved_bytes, torch.cost.saved_bytes), beside(e.cost.loss_bytes, torch.cost.loss_bytes),
                    beside(e.cost.peak_bytes + e.cached_bytes, torch.cost.peak_bytes)});
  }
  print_table(rows);
}

ordered_json results_json(const std::vector<Entry>& entries, const BenchGraphCommand& c, double gradient_error) {
  ordered_json list = ordered_json::array();
  for (const Entry& e : entries) {
    list.push_back({{"method", e.name},
                    {"epoch_seconds", e.median()},
                    {"ratio", e.median() / entries.front().median()},
                    {"saved_bytes", e.cost.saved_bytes},
                    {"loss_bytes", e.cost.loss_bytes},
                    {"peak_bytes", e.cost.peak_bytes + e.cached_bytes},
                    {"cached_bytes", e.cached_bytes},
                    {"steps", e.seconds.size()}});
  }
  return {{"data", c.data},
          {"model", c.model},
          {"layers", c.shape.layers},
          {"hidden", c.shape.hidden},
          {"device", c.device},
          {"gradient_error", gradient_error},
          {"machine", machine_json(c.device)},
          {"results", list}};
}

TrainOptions options_of(const BenchGraphCommand& c) {
  TrainOptions o;
  o.shape = c.shape;
  o.shape.conv = from_name<Conv>(c.model, "bench");
  o.shape.norm = from_name<Norm>(c.norm, "bench");
  o.shape.activation = from_name<Activation>(c.activation, "bench");
  o.device = c.device;
  o.method = parse_method("fp32");
  try {
    validate(o);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  return o;
}

}  // namespace

void run_bench_graph(const BenchGraphCommand& c) {
  const std::vector<Method> methods = methods_from(c.methods);
  const TrainOptions options = options_of(c);
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  const at::Device device = device_of(c.device);
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const bool silent = c.json == "-";
  const double error = check_gradients(options);

  const GraphData data = load_graph(c.data);
  const Bench bench(data, options);
  std::vector<Entry> entries;
  entries.push_back(bench.plain_torch());
  for (const Method& m : methods) entries.push_back(bench.method(m));
  if (!silent) {
    fmt::print("{}: {} nodes, {} entries of A; {} {} layers × {}; {}\n", data.name, grouped(data.nodes),
               grouped(bench.task.a.matrix.entries()), c.model, c.shape.layers, c.shape.hidden,
               c.device == "cuda" ? gpu_name() : fmt::format("{} CPU threads", at::get_num_threads()));
    fmt::print("gradients at 32 bits are torch's within {:.1e}\n\n", error);
    std::fflush(stdout);
  }
  time_steps(entries, device, c.steps);
  if (!silent) print_results(entries);
  if (!c.json.empty()) write_json(c.json, results_json(entries, c, error), "bench");
}

void add_bench_graph(CLI::App& bench) {
  const auto c = std::make_shared<BenchGraphCommand>();
  CLI::App* graph = bench.add_subcommand("graph", "A whole training step beside the same model in plain torch");
  graph->add_option("--data", c->data, "The graph, as for train; dense features")->capture_default_str();
  graph->add_option("--model", c->model, "Graph layer")->check(members<Conv>())->capture_default_str();
  graph->add_option("--layers", c->shape.layers, "Graph layers")->transform(whole_number(1, 1000))->capture_default_str();
  graph->add_option("--hidden", c->shape.hidden, "Width between layers")->transform(whole_number(1, 1 << 20))->capture_default_str();
  graph->add_option("--norm", c->norm, "Norm between layers")->check(members<Norm>())->capture_default_str();
  graph->add_option("--activation", c->activation, "Activation between layers")->check(members<Activation>())->capture_default_str();
  graph->add_option("--dropout", c->shape.dropout, "Dropout between layers")->check(CLI::Number)->capture_default_str();
  graph->add_option("--steps", c->steps, "Timed steps of which the median counts")
      ->transform(whole_number(1, 1000000))
      ->capture_default_str();
  graph->add_option("--methods", c->methods, "As train's --method")->capture_default_str();
  graph->add_option("--device", c->device, "Where to train")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  graph->add_option("--threads", c->threads, "CPU threads (default: torch's choice)")->transform(whole_number(1, 4096));
  graph->add_option("--json", c->json, "Write the results to this file too; - prints them instead of the table");
  graph->footer(
      "\nChecked first: at 32 bits the gradients of all weights equal plain torch's within rounding, on a small graph.\n"
      "Then one step each in turn, round by round: forward, loss, backward, Adam.\n"
      "  torch  the same model in torch's own functions: sparse CSR matmul with the transpose kept ready, linear, batch_norm,\n"
      "         relu, dropout, cross_entropy\n"
      "  fp32   this library's layers with torch's saves\n"
      "\nExamples:\n  satchel bench graph\n  satchel bench graph --data synthetic:arxiv --device cuda --steps 100 --json graph.json");
  graph->callback([c] { run_bench_graph(*c); });
}

}  // namespace satchel::tool
