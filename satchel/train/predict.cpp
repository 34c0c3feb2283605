// Predictions from a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "satchel/train/train.h"

namespace satchel {
namespace {

template <class T>
std::vector<T> copied_out(const at::Tensor& values, at::ScalarType type) {
  const at::Tensor flat = values.to(at::kCPU, type).contiguous();
  const T* first = flat.const_data_ptr<T>();
  return {first, first + flat.numel()};
}

/// Scores of one task mean nothing in another. Returns the checkpoint's.
Task task_of(const Checkpoint& c, const GraphData& data) {
  const auto about = nlohmann::json::parse(c.data, nullptr, false);
  const auto own = about.is_object() && about.contains("task") && about["task"].is_string() ? about["task"].get<std::string>() : "none";
  if (data.has_labels() && own != name_of(data.task)) fail("predict", "data must have the checkpoint's task, " + own, name_of(data.task));
  const bool weighted = about.is_object() && about.contains("weighted");
  if (weighted != !data.weight.empty()) {
    fail("predict",
         weighted ? "edges must have weights, as those that the checkpoint was trained on"
                  : "edges must have no weights, as those that the checkpoint was trained on (--unweighted leaves them out)",
         weighted ? "none" : "weights");
  }
  return from_name<Task>(own, "checkpoint");
}

/// Of labelled data: a class that the model does not know, or a label that it does not give, has no score.
void check_classes(const GraphData& data, int64_t known) {
  const bool fits = data.task == Task::multi_label ? data.classes == known : data.classes <= known;
  if (data.has_labels() && !fits)
    fail("predict", "data must have the " + std::to_string(known) + " classes of the checkpoint", data.classes);
}

/// The metric on the labelled test nodes of the run's split; NaN where there are none, or (ROC AUC) all of one class.
double tested(const GraphData& data, const TrainOptions& options, const at::Tensor& logits) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (!data.has_labels()) return kNone;
  const bool many = data.task == Task::multi_label;
  const auto known = static_cast<int64_t>(many ? data.targets.size() : data.labels.size()),
             wanted = many ? data.nodes * data.classes : data.nodes;
  if (known != wanted) fail("predict", "labels must be " + std::to_string(wanted) + " in all, or none", known);
  if (!many && std::ranges::none_of(data.labels, [](int32_t label) { return label >= 0; })) return kNone;
  std::vector<int64_t> nodes = split_of(data, options.seed, options.split).test;
  const auto label = [&](int64_t node) { return many ? 0 : data.labels.at(static_cast<size_t>(node)); };
  std::erase_if(nodes, [&](int64_t node) { return label(node) < 0; });
  const bool mixed = std::ranges::any_of(nodes, [&](int64_t node) { return label(node) != label(nodes.front()); });
  if (nodes.empty() || (data.task == Task::binary && !mixed)) return kNone;
  return score_of(data, logits, nodes);
}

}  // namespace

Prediction predict_graph(const GraphData& data, const std::string& checkpoint, const std::string& device) {
  const Checkpoint c = read_checkpoint(checkpoint);
  TrainOptions options = parse_options(c.options);
  options.device = device;
  options.tf32 = options.tf32 && names_cuda(device);
  validate(options);
  const CurrentDevice current(device_of(device, "predict"));
  options.amp = amp_for(options, range_of(data.features), "predict");
  const Tf32Guard tf32(options);
  if (options.shape.features != data.features.columns)
    fail("predict", "data must have the " + std::to_string(options.shape.features) + " features of the checkpoint", data.features.columns);
  const Task kind = task_of(c, data);
  check_classes(data, options.shape.classes);

  const at::NoGradGuard guard;
  GraphTask task = make_unlabelled_task(data, options);
  if (c.state.cached_rows > 0 && task.input.x.defined())
    task.input = with_aggregated(std::move(task.input), task.a, std::min(c.state.cached_rows, task.a.nodes()));
  GraphModel model(model_options(options));
  set_weights(*model, c.state.use_last || c.best.empty() ? c.model : c.best);
  model->to(device_of(device, "predict"));
  model->eval();
  const at::Tensor logits = model->forward(task.input, task.a);
  if (!logits.isfinite().all().item<bool>())
    fail("predict", "logits must be finite (activations are those of the checkpoint, amp " + std::string(name_of(options.amp)) + ")",
         "nan or infinity");

  const bool single = kind == Task::single_label;
  Prediction p;
  p.count = data.nodes;
  p.outputs = options.shape.classes;
  p.multi_label = kind == Task::multi_label;
  p.test = tested(data, options, logits);
  p.scores = copied_out<float>(single ? at::softmax(logits, 1) : logits.sigmoid(), at::kFloat);
  p.classes = copied_out<int64_t>(single ? logits.argmax(1) : logits.gt(0), at::kLong);
  return p;
}

}  // namespace satchel
