#include "satchel/train/pretrained.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/safetensors.h"

namespace satchel {
namespace {

constexpr const char* kWeightsOp = "weights";
constexpr std::string_view kCounter = ".num_batches_tracked";

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// "…denselayer1.norm.1.weight", as torchvision's DenseNets were once written, as "…denselayer1.norm1.weight".
std::string present_name(std::string name) {
  const size_t layer = name.find(".denselayer");
  if (layer == std::string::npos) return name;
  const size_t kind = name.find('.', layer + 1), number = kind == std::string::npos ? kind : name.find('.', kind + 1);
  if (number == std::string::npos || number + 2 >= name.size() || name[number + 2] != '.') return name;
  return name.erase(number, 1);
}

using StoredState = std::map<std::string, StoredTensor>;

/// The tensors by the names that they have in a model; of a checkpoint of satchel train the model's alone.
StoredState read_state(const std::string& path) {
  TensorFile file;
  try {
    file = read_safetensors(path);
  } catch (const Error& e) {  // which speaks of checkpoints
    const std::string_view what = e.what(), start = "[checkpoint] ";
    fail(kWeightsOp, std::string(what.starts_with(start) ? what.substr(start.size()) : what));
  }
  constexpr std::string_view kModel = "model.";
  const auto format = file.metadata.find("format");
  const bool checkpoint = format != file.metadata.end() &&
                          (format->second == kImageFormat || format->second == kSegmentFormat || format->second == kDetectFormat);
  StoredState state;
  for (StoredTensor& t : file.tensors) {
    if (checkpoint && !t.name.starts_with(kModel)) continue;
    const std::string name = present_name(checkpoint ? t.name.substr(kModel.size()) : t.name);
    if (!state.emplace(name, std::move(t)).second) fail(kWeightsOp, path + ": a tensor must stand there once", name);
  }
  return state;
}

/// What a model takes of a file.
struct WantedWeights {
  std::string name;                  // of the model, in errors
  std::string classifier;            // "fc": its weight has `rows` rows a class
  std::vector<std::string> classed;  // it and all other layers with rows for each class, "fc."
  int64_t classes = 0, rows = 1, channels = 3;
  std::string body;          // "backbone.": where its ResNet stands; empty: it has none
  std::string passed_over;   // "aux_classifier.": what a file may have and the model has not; empty: nothing
  bool no_counters = false;  // frozen norms have no num_batches_tracked
};

WantedWeights wanted_by(const ImageShape& shape) {
  ImageShape own;
  own.name = shape.name;
  const int64_t least = least_side(own);
  WantedWeights w;
  w.name = shape.name;
  w.classifier = layers_of(own, least, least).layers.back().name;
  w.classes = shape.classes;
  w.channels = shape.channels;
  w.classed = {w.classifier + ".", "aux_" + w.classifier + "."};
  if (is_segmentation_model(shape.name)) w.body = "backbone.";
  if (is_segmentation_model(shape.name) && !shape.aux) w.passed_over = "aux_classifier.";
  return w;
}

WantedWeights wanted_by(const DetectorShape& shape) {
  constexpr int64_t kAnchors = 9;  // of a place
  WantedWeights w;
  w.name = shape.name;
  const bool regions = has_regions(shape.name);
  w.classifier = regions ? "roi_heads.box_predictor.cls_score" : "head.classification_head.cls_logits";
  w.rows = regions ? 1 : kAnchors;
  w.classed = {w.classifier + ".", "roi_heads.box_predictor.bbox_pred."};
  w.classes = shape.classes;
  w.channels = shape.channels;
  w.body = "backbone.body.";
  w.no_counters = shape.frozen_norm;
  return w;
}

/// A ResNet's own state dict is the backbone's, without its classifier. Does the file hold the backbone alone?
bool fit_backbone(StoredState& state, const WantedWeights& w) {
  if (w.body.empty()) return false;
  if (!w.passed_over.empty()) std::erase_if(state, [&](const auto& item) { return item.first.starts_with(w.passed_over); });
  if (w.no_counters) std::erase_if(state, [](const auto& item) { return item.first.ends_with(kCounter); });
  if (!state.contains("conv1.weight")) return false;
  StoredState body;
  for (auto& [name, tensor] : state) {
    if (!name.starts_with("fc.")) body.emplace(w.body + name, std::move(tensor));
  }
  state = std::move(body);
  return true;
}

ClassifierFit fit_of(const StoredState& state, const WantedWeights& w) {
  ClassifierFit fit{w.classifier, 0, w.classes};
  const auto weight = state.find(fit.layer + ".weight");
  if (weight != state.end() && !weight->second.shape.empty()) fit.stored = weight->second.shape[0] / w.rows;
  return fit;
}

at::Tensor values_of(const StoredTensor& t, bool counter, const std::string& at) {
  constexpr std::pair<StoredType, at::ScalarType> kFloats[] = {
      {StoredType::f32, at::kFloat}, {StoredType::f16, at::kHalf}, {StoredType::bf16, at::kBFloat16}};
  if (counter) {
    if (t.type != StoredType::i64) fail(kWeightsOp, at + " must be I64", name_of(t.type));
    return at::from_blob(const_cast<std::byte*>(t.bytes.data()), t.shape, at::kLong);
  }
  for (const auto& [stored, type] : kFloats) {
    if (t.type != stored) continue;
    // Empty or not, `bytes` has as many as the shape says: the header was checked.
    at::Tensor values = at::from_blob(const_cast<std::byte*>(t.bytes.data()), t.shape, type);
    if (!values.isfinite().all().item<bool>()) fail(kWeightsOp, at + " must be finite", "nan or infinity");
    return values;
  }
  fail(kWeightsOp, at + " must be F32, F16 or BF16", name_of(t.type));
}

/// Is it the classifier's tensor, of another number of classes and else of its shape?
bool differs_in_classes(const StoredTensor& t, const at::Tensor& own) {
  std::vector<int64_t> as_own = t.shape;
  if (as_own.size() != static_cast<size_t>(own.dim()) || as_own.empty()) return false;
  as_own[0] = own.size(0);
  return own.sizes() == at::IntArrayRef(as_own);
}

std::string stem_advice(const WantedWeights& w, const at::Tensor& own, const StoredTensor& t) {
  const bool stem = own.dim() == 4 && t.shape.size() == 4 && own.size(1) == w.channels && own.size(2) == 3 && t.shape[2] == 7;
  return stem ? " (the stem of small images; --large-stem has the other)" : "";
}

ClassifierFit load_wanted(torch::nn::Module& model, const WantedWeights& w, const std::string& path) {
  const at::NoGradGuard guard;
  StoredState state = read_state(path);
  const bool backbone = fit_backbone(state, w);
  const ClassifierFit fit = fit_of(state, w);
  TensorMap own;
  for (const auto& item : model.named_parameters()) own[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) own[item.key()] = item.value();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // made when all of them fit
  for (auto& [name, tensor] : own) {
    const auto found = state.find(name);
    const bool counter = name.ends_with(kCounter);
    if (found == state.end()) {
      if (counter || (backbone && !name.starts_with(w.body))) continue;
      fail(kWeightsOp, path + " must hold " + name + " of " + sizes_text(tensor.sizes().vec()) + ", as " + w.name + " has it", "none");
    }
    const StoredTensor& t = found->second;
    const bool classifies = std::ranges::any_of(w.classed, [&](const std::string& layer) { return name.starts_with(layer); });
    if (fit.is_left_out() && classifies && differs_in_classes(t, tensor)) continue;
    const std::string at = path + ": " + name;
    if (tensor.sizes() != at::IntArrayRef(t.shape))
      fail(kWeightsOp, at + " must be " + sizes_text(tensor.sizes().vec()) + stem_advice(w, tensor, t), sizes_text(t.shape));
    copies.emplace_back(tensor, values_of(t, counter, at));
  }
  for (const auto& [name, t] : state) {
    if (!own.contains(name)) fail(kWeightsOp, path + " must hold the tensors of " + w.name + " alone", name + " of " + sizes_text(t.shape));
  }
  for (auto& [to, from] : copies) to.copy_(from);
  return fit;
}

}  // namespace

ClassifierFit classifier_fit(const ImageShape& shape, const std::string& path) { return fit_of(read_state(path), wanted_by(shape)); }
ClassifierFit classifier_fit(const DetectorShape& shape, const std::string& path) { return fit_of(read_state(path), wanted_by(shape)); }

ClassifierFit load_weights(torch::nn::Module& model, const ImageShape& shape, const std::string& path) {
  return load_wanted(model, wanted_by(shape), path);
}
ClassifierFit load_weights(torch::nn::Module& model, const DetectorShape& shape, const std::string& path) {
  return load_wanted(model, wanted_by(shape), path);
}

}  // namespace satchel
