#include "satchel/train/graph_task.h"

#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "satchel/autograd/loss.h"
#include "satchel/autograd/seeds.h"
#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "satchel/core/noise.h"
#include "satchel/train/memory.h"
#include "satchel/train/metrics.h"
#include "satchel/train/options.h"

namespace satchel {
namespace {

template <class T>
at::Tensor copied(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType type) {
  if (values.empty()) return at::empty(shape, type);
  return at::from_blob(const_cast<T*>(values.data()), shape, type).clone();
}

int64_t length(const auto& values) { return static_cast<int64_t>(values.size()); }

const std::string& source_of(const GraphData& data) { return data.source.empty() ? data.name : data.source; }

/// ROC AUC has no value where a class is missing: better said before the first epoch, of the data, than after it, of the metric.
void check_both_classes(const GraphData& data, const std::vector<int64_t>& nodes, const char* part) {
  const auto is_one = [&](int64_t node) { return data.labels[static_cast<size_t>(node)] == 1; };
  const bool ones = std::any_of(nodes.begin(), nodes.end(), is_one);
  if (ones && !std::all_of(nodes.begin(), nodes.end(), is_one)) return;
  fail("data", source_of(data) + ": " + part + " nodes of the split must be of both classes, as ROC AUC needs",
       ones ? "class 1 only" : "class 0 only");
}

void check_nodes(const GraphData& data, const std::vector<int64_t>& nodes, const char* part) {
  if (nodes.empty()) fail("data", source_of(data) + ": the split must have " + part + " nodes", "none");
  const int64_t most = data.task == Task::single_label ? data.classes - 1 : 1;
  if (std::adjacent_find(nodes.begin(), nodes.end(), std::greater_equal<>()) != nodes.end())
    fail("data", std::string(part) + " nodes must rise", "others");
  for (const int64_t node : nodes) {
    if (node < 0 || node >= data.nodes) fail("data", std::string(part) + " nodes must be 0 to " + std::to_string(data.nodes - 1), node);
    if (data.task == Task::multi_label) continue;
    const int32_t label = data.labels[static_cast<size_t>(node)];
    if (label < 0 || label > most)
      fail("data",
           "label of " + std::string(part) + " node " + std::to_string(node) + " must be 0 to " + std::to_string(most) + " in " +
               source_of(data),
           label);
  }
  if (data.task == Task::binary) check_both_classes(data, nodes, part);
}

void check_features(const Features& x, int64_t nodes) {
  if (x.rows != nodes) fail("data", "features must have a row a node, " + std::to_string(nodes), x.rows);
  if (x.columns < 1) fail("data", "features must have columns", x.columns);
  if (!x.sparse() && length(x.dense) != x.rows * x.columns) fail("data", "dense features must be rows × columns values", x.dense.size());
  if (x.sparse() && (length(x.start) != x.rows + 1 || x.column.size() != x.value.size()))
    fail("data", "sparse features must have rows + 1 starts and a value an entry", x.start.size());
}

at::Tensor label_tensor(const GraphData& data) {
  switch (data.task) {
    case Task::single_label: return copied(data.labels, {data.nodes}, at::kInt).to(at::kLong);
    case Task::binary: return copied(data.labels, {data.nodes, 1}, at::kInt).to(at::kFloat);
    case Task::multi_label: return copied(data.targets, {data.nodes, data.classes}, at::kByte).to(at::kFloat);
  }
  return {};
}

Adjacency adjacency_of(const GraphData& data, const TrainOptions& options) {
  const int64_t entries = length(data.target);
  const bool weighted = !data.weight.empty();
  const Csr edges = csr_from_csr(copied(data.start, {data.nodes + 1}, at::kLong), copied(data.target, {entries}, at::kInt), data.nodes,
                                 weighted ? copied(data.weight, {entries}, at::kFloat) : at::Tensor());
  const Csr graph = without_self_loops(weighted ? made_symmetric_weighted(edges) : made_symmetric(edges));
  return layer_adjacency(options.shape.conv, graph, options.self_loops);
}

GraphInput input_of(const Features& x) {
  GraphInput input;
  if (!x.sparse()) {
    input.x = copied(x.dense, {x.rows, x.columns}, at::kFloat);
    return input;
  }
  const int64_t entries = length(x.column);
  input.sparse = adjacency(csr_from_csr(copied(x.start, {x.rows + 1}, at::kLong), copied(x.column, {entries}, at::kInt), x.columns,
                                        copied(x.value, {entries}, at::kFloat)));
  return input;
}

}  // namespace

void validate_inputs(const GraphData& data) {
  if (data.nodes < 1) fail("data", "a graph must have nodes", data.nodes);
  if (!data.weight.empty() && data.weight.size() != data.target.size())
    fail("data", "there must be a weight an edge, " + std::to_string(data.target.size()), data.weight.size());
  if (length(data.start) != data.nodes + 1) fail("data", "edges must have a start a node and one more", data.start.size());
  check_features(data.features, data.nodes);
}

void validate(const GraphData& data, const Split& split) {
  validate_inputs(data);
  if (!data.has_labels()) fail("data", source_of(data) + " must have labels to train on", "none");
  if (data.classes < 1 || (data.task == Task::binary && data.classes != 1))
    fail("data", "classes must be at least 1, and 1 for a binary task", data.classes);
  const int64_t known = data.task == Task::multi_label ? length(data.targets) : length(data.labels);
  const int64_t wanted = data.task == Task::multi_label ? data.nodes * data.classes : data.nodes;
  if (known != wanted) fail("data", "labels must be " + std::to_string(wanted) + " in all", known);
  check_nodes(data, split.train, "training");
  check_nodes(data, split.valid, "validation");
  check_nodes(data, split.test, "test");
}

GraphShape shape_for(const GraphData& data, GraphShape shape) {
  shape.features = data.features.columns;
  shape.classes = data.classes;
  return shape;
}

GraphModelOptions model_options(const TrainOptions& options) {
  GraphModelOptions model{options.shape, options.method};
  model.amp = options.amp;
  return model;
}

GraphModel make_graph_model(const TrainOptions& options, at::Device device) {
  constexpr uint32_t kWeights = 1;                                       // rank of the seed of initial weights; steps have rank 0
  const SeededTorch weights(derive_seed(options.seed, 0, kWeights, 0));  // on the CPU: equal on every device and for every method
  GraphModel model(model_options(options));
  model->to(device);
  return model;
}

FeatureRange range_of(const Features& features) {
  if (features.sparse()) return {};
  FeatureRange range{true, 0};
  for (const float x : features.dense) {
    if (std::isnan(x)) return {true, x};
    range.largest = std::max(range.largest, std::fabs(x));
  }
  return range;
}

Amp amp_for(const TrainOptions& o, const FeatureRange& features, const char* op) {
  constexpr float kLeast = 0x1p-8f, kMost = 0x1p8f, kLargestHalf = 65504;
  if (o.amp == Amp::fp16 && std::isfinite(features.largest) && features.largest > kLargestHalf)
    fail(op, "features in float16 (--amp fp16) must be at most 65504 in size", features.largest);
  if (o.amp != Amp::automatic) return o.amp;
  const bool packs = packs_rows(o.method);
  const bool fits = features.dense && features.largest >= kLeast && features.largest <= kMost && graph_layer(o.shape.conv, op).averages;
  return o.tf32 && names_cuda(o.device) && packs && o.shape.norm != Norm::none && fits ? Amp::fp16 : Amp::none;
}

double gradient_scale(const GraphTask& task, const TrainOptions& options) {
  if (options.amp != Amp::fp16) return 1;
  const int64_t terms = task.train.numel() * (task.kind == Task::single_label ? 1 : task.labels.size(1));
  const auto scale = static_cast<double>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(terms, 1))));
  return is_baseline(options.method) ? std::min(scale, 0x1p12) : scale;
}

void set_type(GraphTask& task, Amp amp) {
  if (task.input.x.defined()) task.input.x = task.input.x.to(activation_type(amp));
}

GraphTask make_unlabelled_task(const GraphData& data, const TrainOptions& options) {
  const at::Device device = device_of(options.device);
  validate_inputs(data);
  GraphTask task;
  task.kind = data.task;
  task.a = adjacency_of(data, options);
  task.input = input_of(data.features);
  set_type(task, options.amp);
  return to_device(task, device);
}

GraphTask make_task(const GraphData& data, const TrainOptions& options) {
  const at::Device device = device_of(options.device);
  const Split split = split_of(data, options.seed, options.split);
  validate(data, split);
  GraphTask task = make_unlabelled_task(data, options);
  task.labels = label_tensor(data);
  task.train = copied(split.train, {length(split.train)}, at::kLong);
  task.valid = copied(split.valid, {length(split.valid)}, at::kLong);
  task.test = copied(split.test, {length(split.test)}, at::kLong);
  task = to_device(task, device);
  add_loss_labels(task, is_baseline(options.method));
  return task;
}

void add_loss_labels(GraphTask& task, bool plain) {
  if (plain) {
    task.train_labels = at::index_select(task.labels, 0, task.train);
  } else if (task.kind == Task::single_label) {
    task.masked = masked_labels(task.labels, task.train);
  }
}

bool wants_training_rows(const TrainOptions& options) {
  const GraphShape& shape = options.shape;
  if (options.last_layer != LastLayer::training || is_baseline(options.method) || shape.layers < 2) return false;
  const LayerSites sites = graph_layer(shape.conv, "train").sites(shape.hidden, shape.classes);
  return std::ranges::all_of(sites.packed, [&](const LayerSite& s) {
    const bool is_input = s.site.role == Role::weight_input && s.part.empty();
    return is_input || keeps_of(options.method, s.site).empty();
  });
}

void give_training_rows(GraphTask& task) {
  task.last = rows_for(task.a, task.train);
  task.train_labels = at::index_select(task.labels, 0, task.train);
  if (task.kind != Task::single_label) return;
  task.masked = masked_labels(task.train_labels);
  task.train_labels.reset();
}

int64_t last_layer_bytes(const GraphTask& task) {
  if (!task.gives_training_rows()) return 0;
  return bytes_of(task.last) + (task.train_labels.defined() ? static_cast<int64_t>(task.train_labels.nbytes()) : 0);
}

at::Tensor training_logits(GraphModel& model, const GraphTask& task) {
  return model->logits(task.input, task.a, task.gives_training_rows() ? task.last : task.a);
}

GraphTask to_device(const GraphTask& task, at::Device device) {
  const auto moved = [&](const at::Tensor& t) { return t.defined() ? t.to(device) : t; };
  GraphTask there = task;
  there.a = to_device(task.a, device);
  if (task.gives_training_rows()) there.last = to_device(task.last, device);
  there.input.x = moved(task.input.x);
  if (task.input.is_sparse()) there.input.sparse = to_device(task.input.sparse, device);
  there.input.aggregated = moved(task.input.aggregated);
  if (task.input.aggregated_by.defined()) there.input.aggregated_by = AggregateSource(there.a.matrix, there.input.x);
  for (at::Tensor GraphTask::*part : {&GraphTask::labels, &GraphTask::train, &GraphTask::valid, &GraphTask::test, &GraphTask::train_labels})
    there.*part = moved(task.*part);
  there.masked.labels = moved(task.masked.labels);
  return there;
}

int64_t cached_rows(const GraphTask& task, const TrainOptions& options) {
  const at::Tensor& x = task.input.x;
  if (!options.cache_aggregate || !x.defined() || is_baseline(options.method) || !keeps_of(options.method, {Role::data}).empty()) return 0;
  // Wide features are aggregated after their product, which is narrower: A·X would cost more memory than it saves time.
  if (x.size(1) > 2 * options.shape.hidden) return 0;
  const int64_t row = x.size(1) * static_cast<int64_t>(x.element_size());
  const int64_t rows = options.cache_bytes > 0 ? std::min(x.size(0), options.cache_bytes / row) : x.size(0);
  return rows * row <= free_memory(x.device()) / 4 ? rows : 0;
}

double score_of(const GraphData& data, const at::Tensor& logits, const std::vector<int64_t>& nodes) {
  GraphTask task;
  task.kind = data.task;
  task.labels = label_tensor(data).to(logits.device());
  return score_of(task, logits, copied(nodes, {length(nodes)}, at::kLong).to(logits.device()));
}

double score_of(const GraphTask& task, const at::Tensor& logits, const at::Tensor& index) {
  switch (task.kind) {
    case Task::single_label: return accuracy(logits, task.labels, index);
    case Task::multi_label: return micro_f1(logits, task.labels, index);
    case Task::binary: return roc_auc(logits.flatten(), task.labels.flatten(), index);
  }
  return 0;
}

at::Tensor loss_of(const GraphTask& task, const at::Tensor& logits, bool plain, double scale) {
  const bool single = task.kind == Task::single_label;
  if (!plain && single) return cross_entropy_(logits, task.masked, "loss", scale);
  if (!plain && task.gives_training_rows()) return binary_cross_entropy_(logits, task.train_labels, {}, "loss", scale);
  if (!plain) return binary_cross_entropy_(logits, task.labels, task.train, "loss", scale);
  const at::Tensor rows = at::index_select(logits, 0, task.train).to(at::kFloat);
  const at::Tensor loss =
      single ? at::cross_entropy_loss(rows, task.train_labels) : at::binary_cross_entropy_with_logits(rows, task.train_labels);
  return with_scaled_gradient(loss, scale);
}

}  // namespace satchel
