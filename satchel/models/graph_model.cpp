#include "satchel/models/graph_model.h"

#include <torch/nn/modules/container/modulelist.h>

#include <optional>
#include <utility>

#include "satchel/autograd/weight_casts.h"
#include "satchel/core/error.h"
#include "satchel/core/keep.h"

namespace satchel {
namespace {

void check_shape(const GraphShape& s) {
  constexpr const char* op = "graph_model";
  if (s.layers < 1) fail(op, "layers must be at least 1", s.layers);
  if (s.features < 1) fail(op, "features must be at least 1", s.features);
  if (s.hidden < 1) fail(op, "hidden must be at least 1", s.hidden);
  if (s.classes < 1) fail(op, "classes must be at least 1", s.classes);
  graph_layer(s.conv, op);
  check_dropout(s.dropout, op);
}

/// Dense features in `type`: as they are where they stand so already, else a copy.
GraphInput in_type(GraphInput input, at::ScalarType type) {
  if (!input.x.defined() || input.x.scalar_type() == type) return input;
  const at::Tensor both = side_by_side(input.x, input.aggregated);
  const std::vector<at::Tensor> halves = both.defined() ? both.to(type).chunk(2, 1) : std::vector<at::Tensor>();
  const at::Tensor x = both.defined() ? halves[0] : input.x.to(type);
  input.aggregated_by.moved(input.x, x);
  input.x = x;
  if (input.aggregated.defined()) input.aggregated = both.defined() ? halves[1] : input.aggregated.to(type);
  return input;
}

}  // namespace

at::ScalarType activation_type(Amp amp) {
  switch (amp) {
    case Amp::none: return at::kFloat;
    case Amp::bf16: return at::kBFloat16;
    case Amp::fp16: return at::kHalf;
    case Amp::automatic: break;
  }
  fail("graph_model", "amp must be none, bf16 or fp16", "auto");
}

GraphModelImpl::GraphModelImpl(const GraphModelOptions& options)
    : options_(options), type_(activation_type(options.amp)), casts_(std::make_shared<WeightCasts>()) {
  const GraphShape& s = options_.shape;
  check_shape(s);
  validate_for_graph(options_.method, "graph_model");
  const auto convs = register_module("convs", torch::nn::ModuleList());
  const auto norms = register_module("norms", torch::nn::ModuleList());
  for (int64_t i = 0; i < s.layers; ++i) {
    const bool last = i + 1 == s.layers;
    const int64_t in = i == 0 ? s.features : s.hidden, out = last ? s.classes : s.hidden;
    const SavePolicy saving{options_.method, "convs." + std::to_string(i)};
    convs_.push_back(make_layer(s.conv, {in, out, true, saving}));
    convs->push_back(convs_.back());
    if (last) break;
    norms_.emplace_back(nn::NormActOptions{out, s.norm, s.activation, s.slope, s.alpha, s.dropout, 1e-5, 0.1,
                                           SavePolicy{options_.method, "norms." + std::to_string(i)}});
    norms->push_back(norms_.back());
  }
}

bool GraphModelImpl::casts_weights() const { return type_ != at::kFloat && !is_baseline(options_.method); }

std::vector<at::Tensor> GraphModelImpl::layer_weights() const {
  std::vector<at::Tensor> weights;
  for (const auto& conv : convs_)
    for (const at::Tensor& w : conv->parameters()) weights.push_back(w);
  return weights;
}

int64_t GraphModelImpl::reserve_casts() {
  if (casts_weights()) casts_->reserve(layer_weights(), type_);
  return casts_->bytes();
}

at::Tensor GraphModelImpl::forward(const GraphInput& input, const Adjacency& a) { return logits(input, a).to(at::kFloat); }

at::Tensor GraphModelImpl::logits(const GraphInput& input, const Adjacency& a) { return logits(input, a, a); }

at::Tensor GraphModelImpl::logits(const GraphInput& given, const Adjacency& a, const Adjacency& last) {
  if (last.targets.defined() && norms_.empty()) fail("graph_model", "layers must be at least 2 where the last gives some nodes", 1);
  const GraphInput input = type_ == at::kFloat ? given : in_type(given, type_);
  const auto norm_follows = [&](size_t i) { return i < norms_.size() && options_.shape.norm == Norm::batch && norms_[i]->is_training(); };
  std::optional<WeightCasts::Use> use;
  if (casts_weights() && at::GradMode::is_enabled()) {
    casts_->update(layer_weights(), type_);
    use.emplace(*casts_);
  }
  at::Tensor x = convs_[0]->forward_data(input, a, norm_follows(0));
  if (type_ != at::kFloat) x = x.to(type_);  // sparse features are float32
  for (size_t i = 0; i < norms_.size(); ++i) {
    x = norms_[i]->forward(std::move(x));
    x = convs_[i + 1]->forward(x, i + 1 == norms_.size() ? last : a, norm_follows(i + 1));
  }
  return x;
}

}  // namespace satchel
