#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "satchel/autograd/seeds.h"
#include "satchel/core/error.h"
#include "satchel/core/keep.h"
#include "satchel/core/noise.h"
#include "satchel/data/image_data.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/names.h"
#include "satchel/train/options.h"
#include "tools/analyse_subject.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

constexpr uint64_t kHalves = 77;  // run of the seeds that halves of the training nodes are drawn from

TrainOptions graph_options(const SubjectOptions& s) {
  TrainOptions o;
  o.shape.conv = s.model;
  o.shape.layers = s.layers;
  o.shape.hidden = s.hidden;
  o.shape.norm = from_name<Norm>(s.norm, "analyse");
  o.shape.activation = from_name<Activation>(s.activation, "analyse");
  if (s.dropout) o.shape.dropout = *s.dropout;
  if (s.lr) o.lr = *s.lr;
  o.epochs = s.epochs;
  o.seed = s.seed;
  o.split = s.split;
  o.device = s.device;
  o.amp = Amp::none;
  o.method = parse_method("fp32");
  return o;
}

class GraphSubject : public Subject {
 public:
  explicit GraphSubject(const SubjectOptions& s)
      : data_(load_graph(s.data, s.unweighted ? EdgeWeights::ignore : EdgeWeights::use)), device_(device_of(s.device, "analyse")) {
    if (s.checkpoint.empty()) {
      start_fresh(s);
    } else {
      take(read_checkpoint(s.checkpoint));
    }
    options_.device = s.device;
    options_.epochs = std::max<int64_t>(options_.epochs, 1);  // none run here
    options_.tf32 = false;
    options_.amp = Amp::none;
    options_.cuda_graph = false;
    options_.method = parse_method("fp32");
    check_data();
    GraphTask host = make_task(data_, options_);
    add_loss_labels(host, true);
    task_ = to_device(host, device_);
    gradient_task_ = task_;
    set_part(reference());
  }

  bool is_graph() const override { return true; }
  std::string model() const override {
    return fmt::format("{}, {} layers × {}", options_.shape.conv, options_.shape.layers, options_.shape.hidden);
  }
  std::string data() const override { return data_.name; }
  int64_t epochs() const override { return epochs_; }
  int64_t reference() const override { return -1; }
  const char* parts_name() const override { return "random halves of the training nodes"; }

  void forward(const SaveReport& report) override {
    GraphModel model = made(parse_method("exact,bits=32"), options_.shape.dropout);
    std::string last;
    const SaveWatch watch([&](const std::string& name, Kind kind, const at::Tensor& x) {
      // Of the two that a layer keeps A·x comes second.
      report(name, kind == Kind::input && name == last ? Kind::aggregate : kind, x);
      last = kind == Kind::input ? name : "";
    });
    const SeedRun seeds(options_.seed);
    model->logits(task_.input, task_.a);
  }

  std::vector<std::string> weights() const override { return parameter_names(*made(options_.method, 0)); }

  std::vector<at::Tensor> gradients(const Method& method, uint64_t seed, int64_t part) override {
    set_part(part);
    if (!model_ || model_method_ != method.name) {
      model_ = made(method, 0);
      model_method_ = method.name;
    }
    const SeedRun seeds(seed);
    GraphTask& task = gradient_task_;
    return parameter_gradients(*model_, loss_of(task, model_->logits(task.input, task.a), is_baseline(method)));
  }

 private:
  void start_fresh(const SubjectOptions& s) {
    options_ = graph_options(s);
    options_.shape = shape_for(data_, options_.shape);
    if (s.epochs == 0) {
      GraphModel fresh = make_graph_model(options_, at::kCPU);
      weights_ = weights_of(*fresh);
      return;
    }
    if (!s.quiet) fmt::print("training {} for {} epochs …\n", model(), s.epochs);
    std::fflush(stdout);
    take(trained_checkpoint(kGraphFormat, [&](const std::string& path) {
      options_.checkpoint = path;
      train_graph(data_, options_);
    }));
    options_.checkpoint.clear();
  }

  void take(Checkpoint c) {
    options_ = parse_options(c.options);
    epochs_ = c.state.epoch;
    weights_ = std::move(c.state.use_last || c.best.empty() ? c.model : c.best);
    const auto about = nlohmann::json::parse(c.data, nullptr, false);
    if (about.is_object() && about.contains("weighted") != !data_.weight.empty())
      fail("analyse", "edges must have weights where those of the checkpoint's run had (--unweighted leaves them out)",
           data_.weight.empty() ? "none" : "weights");
  }

  void check_data() const {
    if (!data_.has_labels()) fail("analyse", "data must have labels: gradients need them", data_.name);
    if (options_.shape.features != data_.features.columns)
      fail("analyse", fmt::format("data must have the {} features of the checkpoint", options_.shape.features), data_.features.columns);
    if (shape_for(data_, options_.shape).classes != options_.shape.classes)
      fail("analyse", fmt::format("data must have the {} classes of the checkpoint", options_.shape.classes), data_.classes);
    validate(options_);
  }

  GraphModel made(const Method& method, double dropout) const {
    TrainOptions o = options_;
    o.method = method;
    o.shape.dropout = dropout;
    GraphModel model(model_options(o));
    set_weights(*model, weights_);
    model->to(device_);
    model->train();
    return model;
  }

  /// Both kinds of labels of the nodes that the loss is taken over.
  void set_part(int64_t part) {
    if (part == part_) return;
    gradient_task_.train = task_.train;
    if (part >= 0) {
      const SeededTorch drawn(derive_seed(kHalves, static_cast<uint64_t>(part), 0, 0));
      const at::Tensor some = at::randperm(task_.train.numel(), at::kLong).narrow(0, 0, (task_.train.numel() + 1) / 2);
      gradient_task_.train = task_.train.index_select(0, some.to(task_.train.device()));
    }
    for (const bool plain : {true, false}) add_loss_labels(gradient_task_, plain);
    part_ = part;
  }

  GraphData data_;
  at::Device device_;
  TrainOptions options_;
  TensorMap weights_;
  int64_t epochs_ = 0;
  GraphTask task_, gradient_task_;
  int64_t part_ = -2;
  GraphModel model_ = nullptr;
  std::string model_method_;
};

}  // namespace

std::unique_ptr<Subject> graph_subject(const SubjectOptions& options) {
  if (holds_images(options.data) || options.data.starts_with("synthetic-images"))
    throw UsageError(fmt::format("[analyse] data must be a graph here (images go with --model resnet18 …), got {}", options.data));
  return std::make_unique<GraphSubject>(options);
}

}  // namespace satchel::tool
