#include "tools/bench_graph_entries.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/core/noise.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "tools/torch_model.h"

namespace satchel::tool {
namespace {

constexpr int64_t kCheckNodes = 2000;
constexpr int64_t kWatched = 1;  // the step whose memory is watched: gradients and optimizer state stand before it

/// Steps before the timed ones; a CUDA graph is captured in the last of them.
int64_t warm_ups(const TrainOptions& options) { return wants_cuda_graph(options) ? TrainStep::kEager + 1 : 2; }

GraphModel seeded_model(const TrainOptions& options) {
  at::manual_seed(options.seed);
  GraphModel model(model_options(options));
  model->to(device_of(options.device));
  return model;
}

}  // namespace

double BenchResult::median() const { return satchel::median(seconds); }

/// Model, optimizer and data of one entry, on its device while it lives. It stays where it is: the step's parts refer to it.
class GraphBench::Entry {
 public:
  /// Without a method: plain torch.
  Entry(const GraphBench& bench, const Method* method) : options_(bench.options_), warm_ups_(warm_ups(bench.options_)) {
    const bool torch = method == nullptr;
    options_.method = torch ? parse_method("fp32") : *method;
    if (torch) options_.cuda_graph = false;
    options_.amp = bench.amp_of(method);
    GraphTask host = bench.host_;
    set_type(host, options_.amp);
    if (torch) {
      torch_ = torch_adjacency(host.a, bench.device_, options_.amp);
      host.a = {};  // torch does without
    }
    task_ = to_device(host, bench.device_);
    add_loss_labels(task_, is_baseline(options_.method));
    if (!torch && wants_training_rows(options_)) give_training_rows(task_);
    if (const int64_t rows = torch ? 0 : cached_rows(task_, options_); rows > 0)
      task_.input = with_aggregated(std::move(task_.input), task_.a, rows);
    model_ = seeded_model(options_);
    const double scale = gradient_scale(task_, options_);
    optimizer_ = std::make_unique<ParameterStep>(options_, model_->parameters(), scale);
    result_.name = torch ? "torch" : options_.method.name;
    result_.plain_torch = torch;
    result_.amp = options_.amp;
    result_.last_layer_bytes = last_layer_bytes(task_);
    result_.cached_bytes = task_.input.aggregated.defined() ? static_cast<int64_t>(task_.input.aggregated.nbytes()) : 0;
    parts_ = {[this] { return forward(); },
              [this, scale](const at::Tensor& logits) { return loss_of(task_, logits, is_baseline(options_.method), scale); }};
    step_ = std::make_unique<TrainStep>(parts_, *optimizer_, bench.device_, options_.cuda_graph);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  /// Round 0 is the first warm-up.
  void step(int64_t round) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t seed = derive_seed(1, static_cast<uint64_t>(round), 0, 0);
    (*step_)(seed, round == kWatched ? &result_.cost : nullptr).item<float>();  // waits for the step, once
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (round >= warm_ups_) result_.seconds.push_back(took.count());
    result_.cuda_graph = step_->replays();
    result_.eager_because = step_->eager_because();
  }

  void add_gradients() {
    at::manual_seed(1);
    parts_.loss(parts_.forward()).backward();
  }
  const GraphModel& model() const { return model_; }
  const BenchResult& result() const { return result_; }

 private:
  at::Tensor forward() { return result_.plain_torch ? torch_forward(model_, task_.input.x, torch_) : training_logits(model_, task_); }

  TrainOptions options_;
  int64_t warm_ups_;
  GraphTask task_;
  TorchAdjacency torch_;
  GraphModel model_ = nullptr;
  std::unique_ptr<ParameterStep> optimizer_;
  StepParts parts_;
  std::unique_ptr<TrainStep> step_;
  BenchResult result_;
};

GraphBench::GraphBench(const GraphData& data, const TrainOptions& options)
    : options_(options), device_(device_of(options.device)), range_(range_of(data.features)) {
  options_.shape = shape_for(data, options_.shape);
  if (data.features.sparse()) fail("bench", "features must be dense", "sparse ones");
  TrainOptions here = options_;
  here.device = "cpu";
  here.method = parse_method("fp32");
  here.amp = Amp::none;  // each entry has its own
  host_ = make_task(data, here);
}

Amp GraphBench::amp_of(const Method* method) const {
  TrainOptions options = options_;
  options.method = method == nullptr ? parse_method("fp32") : *method;
  return amp_for(options, range_, "bench");
}

BenchResult GraphBench::run_alone(const Method* method, int64_t steps) const {
  BenchResult result;
  try {
    Entry entry(*this, method);
    for (int64_t round = 0; round < warm_ups(options_) + steps; ++round) entry.step(round);
    result = entry.result();
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    result.name = method == nullptr ? "torch" : method->name;
    result.plain_torch = method == nullptr;
    result.amp = amp_of(method);
    result.fits = false;
  }
  release_cached_memory(device_);
  return result;
}

std::vector<BenchResult> GraphBench::run(const std::vector<Method>& methods, bool torch, int64_t steps) const {
  std::vector<const Method*> wanted;
  if (torch) wanted.push_back(nullptr);
  for (const Method& m : methods) wanted.push_back(&m);
  std::vector<BenchResult> results;
  if (device_.is_cuda()) {
    for (const Method* m : wanted) results.push_back(run_alone(m, steps));
    return results;
  }
  std::vector<std::unique_ptr<Entry>> entries;
  for (const Method* m : wanted) entries.push_back(std::make_unique<Entry>(*this, m));
  for (int64_t round = 0; round < warm_ups(options_) + steps; ++round) {
    for (const auto& e : entries) e->step(round);
  }
  for (const auto& e : entries) results.push_back(e->result());
  return results;
}

double GraphBench::gradient_error(const Method& method) const {
  Entry own(*this, &method), reference(*this, nullptr);
  own.add_gradients();
  reference.add_gradients();
  const auto expected = reference.model()->named_parameters();
  double difference = 0, norm = 0;
  for (const auto& item : own.model()->named_parameters()) {
    const at::Tensor e = expected[item.key()].grad().to(at::kDouble), g = item.value().grad().to(at::kDouble);
    difference += (g - e).square().sum().item<double>();
    norm += e.square().sum().item<double>();
  }
  return std::sqrt(difference / norm);
}

double check_gradients(TrainOptions options) {
  options.shape.dropout = 0;
  options.amp = Amp::none;
  options.cuda_graph = options.tf32 = false;
  const Tf32Guard full(options);
  const GraphData small = load_graph(fmt::format("synthetic:nodes={},edges={},features=64,classes=8", kCheckNodes, 7 * kCheckNodes));
  const double error = GraphBench(small, options).gradient_error(parse_method("bits=32"));
  // A gradient sums over all nodes, layer by layer: each sum of n float32 terms is off by at most n·2^−24 of their size.
  const double most = static_cast<double>(kCheckNodes * options.shape.layers) * 0x1p-24;
  if (!(error <= most)) fail("bench", fmt::format("gradients at 32 bits must be plain torch's within {:.1e}", most), error);
  return error;
}

}  // namespace satchel::tool
