#include "tools/bench_graph.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "satchel/train/memory.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "tools/arguments.h"
#include "tools/bench_axis.h"
#include "tools/bench_graph_entries.h"
#include "tools/progress.h"
#include "tools/quality.h"
#include "tools/tool.h"
#include "tools/train_commands.h"
#include "tools/train_report.h"

namespace satchel::tool {
namespace {

using nlohmann::ordered_json;

TrainOptions options_of(const BenchGraphCommand& c) {
  TrainOptions o;
  o.shape = c.shape;
  o.shape.conv = c.model;
  o.shape.norm = from_name<Norm>(c.norm, "bench");
  o.shape.activation = from_name<Activation>(c.activation, "bench");
  o.device = c.device;
  o.method = parse_method("fp32");
  o.tf32 = c.tf32;
  o.amp = from_name<Amp>(c.amp, "bench");
  o.cuda_graph = c.cuda_graph;
  o.cache_aggregate = !c.no_cache;
  o.last_layer = from_name<LastLayer>(c.last_layer, "bench");
  if (!c.cache.empty()) o.cache_bytes = parse_bytes(c.cache, "bench");
  return o;
}

/// What the results were measured on.
struct Setting {
  std::string data_name;
  int64_t nodes = 0, entries = 0;
  int64_t cap = 0;  // 0: none
  double gradient_error = 0;
  std::string types;  // of activations, where they are not float32: "fp16 (exact, satchel)"
};

/// What ratios are to: plain torch, where it was run and fits.
const BenchResult* base_of(const std::vector<BenchResult>& results) {
  return !results.empty() && results.front().plain_torch && results.front().fits ? &results.front() : nullptr;
}

std::vector<std::string> row_of(const BenchResult& r, const BenchResult* base) {
  if (!r.fits) return {r.name, "does not fit", "-", "-", "-", "-"};
  const auto beside = [&](int64_t own, int64_t of_base) {
    return bytes_text(own) +
           (base == nullptr || r.plain_torch ? "" : " " + less_text(static_cast<double>(of_base), static_cast<double>(own)));
  };
  const BenchResult none;
  const BenchResult& b = base == nullptr ? none : *base;
  return {r.name,
          fmt::format("{:.2f} ms", r.median() * 1e3),
          base == nullptr ? "-" : fmt::format("{:.2f}x", r.median() / b.median()),
          beside(r.cost.saved_bytes, b.cost.saved_bytes),
          beside(r.cost.loss_bytes, b.cost.loss_bytes),
          beside(r.peak_bytes(), b.peak_bytes())};
}

void print_about(const BenchGraphCommand& c, const Setting& s) {
  fmt::print("{}: {} nodes, {} entries of A; {} {} layers × {}; {}\n", s.data_name, grouped(s.nodes), grouped(s.entries), c.model,
             c.shape.layers, c.shape.hidden, names_cuda(c.device) ? gpu_name() : fmt::format("{} CPU threads", at::get_num_threads()));
  std::string kinds;
  if (c.tf32) kinds += ", products in TF32";
  if (!s.types.empty()) kinds += ", activations in " + s.types;
  if (c.no_cache) kinds += ", A·X in every step";
  if (!c.cache.empty()) kinds += ", at most " + c.cache + " of A·X kept";
  if (wants_cuda_graph(options_of(c)))
    kinds += c.no_torch ? ", steps from a CUDA graph" : ", steps from a CUDA graph (torch's run eagerly)";
  if (s.cap > 0) kinds += fmt::format(", allocator capped at {} bytes", grouped(s.cap));
  if (!kinds.empty()) fmt::print("{}\n", kinds.substr(2));
  fmt::print("gradients at 32 bits are torch's within {:.1e}{}\n\n", s.gradient_error,
             c.tf32 || !s.types.empty() ? " (in float32 throughout)" : "");
  std::fflush(stdout);
}

void print_results(const std::vector<BenchResult>& results) {
  std::vector<std::vector<std::string>> rows{{"method", "epoch", "of torch", "saved", "loss bytes", "peak"}};
  for (const BenchResult& r : results) rows.push_back(row_of(r, base_of(results)));
  print_table(rows);
  for (const BenchResult& r : results) {
    if (r.last_layer_bytes > 0)
      fmt::print("{}: the last layer is computed for training nodes alone; peak includes {} of their edges\n", r.name,
                 bytes_text(r.last_layer_bytes));
    if (!r.eager_because.empty()) fmt::print("{}: steps run one by one, not from a CUDA graph: {}\n", r.name, r.eager_because);
  }
}

ordered_json result_json(const BenchResult& r, const BenchResult* base) {
  ordered_json j = {{"method", r.name}, {"fits", r.fits}, {"cuda_graph", r.cuda_graph}, {"amp", name_of(r.amp)}};
  const auto put = [&](const char* key, const ordered_json& value) { j[key] = r.fits ? value : ordered_json(nullptr); };
  put("epoch_seconds", r.median());
  put("ratio", base == nullptr ? ordered_json(nullptr) : ordered_json(r.median() / base->median()));
  put("saved_bytes", r.cost.saved_bytes);
  put("loss_bytes", r.cost.loss_bytes);
  put("peak_bytes", r.peak_bytes());
  put("cached_bytes", r.cached_bytes);
  put("last_layer_bytes", r.last_layer_bytes);
  put("steps", r.seconds.size());
  return j;
}

ordered_json results_json(const std::vector<BenchResult>& results, const BenchGraphCommand& c, const Setting& s) {
  ordered_json list = ordered_json::array();
  for (const BenchResult& r : results) list.push_back(result_json(r, base_of(results)));
  return {{"data", c.data},
          {"nodes", s.nodes},
          {"entries", s.entries},
          {"model", c.model},
          {"layers", c.shape.layers},
          {"hidden", c.shape.hidden},
          {"norm", c.norm},
          {"activation", c.activation},
          {"dropout", c.shape.dropout},
          {"device", c.device},
          {"tf32", c.tf32},
          {"amp", c.amp},
          {"cuda_graph", wants_cuda_graph(options_of(c))},
          {"cache", !c.no_cache},
          {"last_layer", c.last_layer},
          {"cache_limit", c.cache.empty() ? ordered_json(nullptr) : ordered_json(c.cache)},
          {"cap", s.cap > 0 ? ordered_json(s.cap) : ordered_json(nullptr)},
          {"gradient_error", s.gradient_error},
          {"machine", machine_json(c.device)},
          {"results", list}};
}

/// The one that was asked for, or what each method takes of its own; empty: all in float32.
std::string types_of(const GraphBench& bench, const std::vector<Method>& methods, Amp asked) {
  if (asked != Amp::automatic) return asked == Amp::none ? "" : name_of(asked);
  std::string names;
  for (const Method& m : methods) {
    if (bench.amp_of(&m) == Amp::fp16) names += (names.empty() ? "" : ", ") + m.name;
  }
  return names.empty() ? "" : fmt::format("fp16 ({})", names);
}

/// Everything that can be refused before the data are read. Returns the cap in bytes.
int64_t check_use(const BenchGraphCommand& c, const TrainOptions& options) {
  try {
    validate(options);
    if (c.memory_cap.empty()) return 0;
    const int64_t cap = parse_bytes(c.memory_cap, "bench");
    if (!names_cuda(c.device)) fail("bench", "--memory-cap needs --device cuda", c.device);
    return cap;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

void add_model_options(CLI::App& graph, BenchGraphCommand& c) {
  graph.add_option("--data", c.data, "The graph, as for train; dense features")->capture_default_str();
  graph.add_option("--model", c.model, "Graph layer")->check(CLI::IsMember(graph_layer_names()))->capture_default_str();
  graph.add_option("--layers", c.shape.layers, "Graph layers")->transform(whole_number(1, 1000))->capture_default_str();
  graph.add_option("--hidden", c.shape.hidden, "Width between layers")->transform(whole_number(1, 1 << 20))->capture_default_str();
  graph.add_option("--norm", c.norm, "Norm between layers")->check(members<Norm>())->capture_default_str();
  graph.add_option("--activation", c.activation, "Activation between layers")->check(members<Activation>())->capture_default_str();
  graph.add_option("--dropout", c.shape.dropout, "Dropout between layers")->check(CLI::Number)->capture_default_str();
}

void add_run_options(CLI::App& graph, BenchGraphCommand& c) {
  graph.add_option("--steps", c.steps, "Timed steps of which the median counts")
      ->transform(whole_number(1, 1000000))
      ->capture_default_str();
  graph.add_option("--methods", c.methods, "As train's --method")->capture_default_str();
  graph.add_option("--device", c.device, "Where to train")->check(device_name())->capture_default_str();
  graph.add_flag("--tf32", c.tf32, "Products of float32 matrices in TF32, torch's and the methods' (cuda)");
  graph.add_option("--amp", c.amp, "Features and activations in this type, see below; torch's as autocast would")
      ->check(members<Amp>())
      ->capture_default_str();
  add_choice(graph, "--cuda-graph,!--no-cuda-graph", c.cuda_graph,
             "Replay the methods' steps from a CUDA graph; torch's run eagerly (default: with cuda, where they can be)");
  graph.add_option("--last-layer", c.last_layer, kLastLayerHelp)->check(members<LastLayer>())->capture_default_str();
  graph.add_flag("--no-cache", c.no_cache, "Compute A·X of the first layer in every step instead of once");
  graph.add_option("--cache", c.cache, "Keep at most so much of A·X, as 40MB or 0.5GiB; the rest is computed in every step (default: all)")
      ->transform(byte_size())
      ->excludes("--no-cache");
  graph.add_flag("--no-torch", c.no_torch, "Leave plain torch out, and ratios to it");
  graph.add_option("--memory-cap", c.memory_cap, "Most that torch's allocator may take: 12GB, 11.5GiB, bytes (cuda)")
      ->transform(byte_size());
  graph.add_option("--threads", c.threads, kThreadsHelp)->transform(whole_number(1, 4096));
  graph.add_option("--json", c.json, "Write the results to this file too; - prints them instead of the table")->transform(file_name());
}

void add_axis_options(CLI::App& graph, BenchGraphCommand& c) {
  constexpr const char* kAxis = "One size changes (--axis)";
  const auto axis = [&](CLI::Option* option) { return option->group(kAxis); };
  CLI::Option* of = axis(graph.add_option("--axis", c.axis, "What changes: accuracy, bytes and time at each value, without plain torch"))
                        ->check(CLI::IsMember(kAxes))
                        ->excludes("--memory-cap");
  axis(graph.add_option("--values", c.values, "Its values, with commas between them; blocks as in specs: row, 2rows, 256"))
      ->needs(of)
      ->default_str("block " + default_values("block") + "; bits " + default_values("bits") + " …");
  axis(graph.add_option("--seeds", c.seeds, "Seeds to train for accuracy; 0: none"))
      ->needs(of)
      ->transform(whole_number(0, 100000))
      ->capture_default_str();
  axis(graph.add_option("--epochs", c.epochs, "Epochs of each"))->needs(of)->transform(whole_number(1))->capture_default_str();
  axis(graph.add_option("--clip", c.clip, "As train's"))->needs(of)->transform(real_number())->capture_default_str();
}

}  // namespace

void run_bench_graph(const BenchGraphCommand& c) {
  const std::vector<Method> methods = methods_from(c.methods);
  const TrainOptions options = options_of(c);
  Setting setting;
  setting.cap = check_use(c, options);
  check_not_data("bench", "--json", c.json, c.data);
  if (!c.json.empty() && c.json != "-") check_output(c.json, "bench");
  if (!c.axis.empty()) return run_bench_axis(c, options);
  const at::Device device = use_device(c.device, "bench");
  if (c.threads > 0) at::set_num_threads(static_cast<int>(c.threads));
  const bool silent = c.json == "-";
  try {
    setting.gradient_error = check_gradients(options);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    fail("bench", "the model must fit into memory", fmt::format("{} layers × {} on {}", c.shape.layers, c.shape.hidden, c.device));
  }

  const GraphData data = load_graph(c.data);
  release_cached_memory(device);  // the check's
  std::optional<MemoryCap> cap;
  if (setting.cap > 0) cap.emplace(device, setting.cap);
  const Tf32Guard tf32(options);
  const GraphBench bench(data, options);
  setting.data_name = data.name;
  setting.nodes = data.nodes;
  setting.entries = bench.entries();
  setting.types = types_of(bench, methods, options.amp);
  if (!silent) print_about(c, setting);
  const std::vector<BenchResult> results = bench.run(methods, !c.no_torch, c.steps);
  if (!silent) print_results(results);
  if (!c.json.empty()) write_json(c.json, results_json(results, c, setting), "bench");
}

void add_bench_graph(CLI::App& bench) {
  const auto c = std::make_shared<BenchGraphCommand>();
  CLI::App* graph = bench.add_subcommand("graph", "A whole training step beside the same model in plain torch");
  add_model_options(*graph, *c);
  add_run_options(*graph, *c);
  add_axis_options(*graph, *c);
  graph->footer(
      "\nChecked first: at 32 bits the gradients of all weights equal plain torch's within rounding, on a small graph in float32.\n"
      "Then steps of forward, loss, backward, Adam: on the CPU one each in turn, round by round; on CUDA all of one entry, then the\n"
      "next, each alone on the device. An entry that runs out of memory does not fit, and the others go on.\n"
      "  torch  the same model in torch's own functions: sparse CSR matmul with the transpose kept ready, linear, batch_norm,\n"
      "         relu, dropout, cross_entropy\n"
      "  fp32   this library's layers with torch's saves\n"
      "--amp auto: fp16 with --tf32 for methods that pack, where a norm follows every hidden layer, the largest feature is 2^-8 to 2^8\n"
      "in size and the layer averages neighbours; else float32, as plain torch and fp32 always. TF32 rounds factors to as\n"
      "many bits as fp16 has.\n"
      "Memory is that of a step without a CUDA graph. With one, the pool that its step needs stays reserved from then on.\n"
      "\nExamples:\n  satchel bench graph\n  satchel bench graph --data synthetic:arxiv --device cuda --steps 100 --json graph.json\n"
      "  satchel bench graph --data synthetic:arxiv --device cuda:1 --tf32 --hidden 256\n"
      "  satchel bench graph --data synthetic:nodes=2449029,edges=61859140,features=100,classes=47 --hidden 256 --device cuda\n"
      "    --memory-cap 12GB --methods satchel\n"
      "  satchel bench graph --axis block --methods fp32,exact,blockwise --data synthetic:arxiv --seeds 8 --device cuda --json block.json\n"
      "  satchel report block.json -o block.html");
  graph->callback([c] { run_bench_graph(*c); });
}

}  // namespace satchel::tool
