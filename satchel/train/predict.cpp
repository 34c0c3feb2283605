// Predictions from a checkpoint.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
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

/// Scores of one task mean nothing in another.
void check_task(const std::string& trained_on, Task task) {
  const auto about = nlohmann::json::parse(trained_on, nullptr, false);
  const auto own = about.is_object() && about.contains("task") && about["task"].is_string() ? about["task"].get<std::string>() : "none";
  if (own != name_of(task)) fail("predict", "data must have the checkpoint's task, " + own, name_of(task));
}

}  // namespace

Prediction predict_graph(const GraphData& data, const std::string& checkpoint, const std::string& device) {
  const Checkpoint c = read_checkpoint(checkpoint);
  TrainOptions options = parse_options(c.options);
  options.device = device;
  options.tf32 = options.tf32 && device == "cuda";
  validate(options);
  options.amp = amp_for(options, range_of(data.features), "predict");
  const Tf32Guard tf32(options);
  if (options.shape.features != data.features.columns)
    fail("predict", "data must have the " + std::to_string(options.shape.features) + " features of the checkpoint", data.features.columns);
  check_task(c.data, data.task);
  if (options.shape.classes != data.classes)
    fail("predict", "data must have the " + std::to_string(options.shape.classes) + " classes of the checkpoint", data.classes);

  const at::NoGradGuard guard;
  GraphTask task = make_task(data, options);
  if (c.state.cached_rows > 0 && task.input.x.defined())
    task.input = with_aggregated(std::move(task.input), task.a, std::min(c.state.cached_rows, task.a.nodes()));
  GraphModel model(model_options(options));
  set_weights(*model, c.state.use_last || c.best.empty() ? c.model : c.best);
  model->to(task.labels.device());
  model->eval();
  const at::Tensor logits = model->forward(task.input, task.a);
  if (!logits.isfinite().all().item<bool>())
    fail("predict", "logits must be finite (activations are those of the checkpoint, amp " + std::string(name_of(options.amp)) + ")",
         "nan or infinity");

  const bool single = task.kind == Task::single_label;
  Prediction p;
  p.nodes = data.nodes;
  p.outputs = data.classes;
  p.test = score_of(task, logits, task.test);
  p.scores = copied_out<float>(single ? at::softmax(logits, 1) : logits.sigmoid(), at::kFloat);
  p.classes = copied_out<int64_t>(single ? logits.argmax(1) : logits.gt(0), at::kLong);
  return p;
}

}  // namespace satchel
