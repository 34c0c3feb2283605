#include "satchel/train/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"
#include "satchel/train/safetensors.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const Scores& s) { return {{"train", s.train}, {"valid", s.valid}, {"test", s.test}}; }
Scores scores_from(const ordered_json& j) { return {number(j.at("train")), number(j.at("valid")), number(j.at("test"))}; }

ordered_json to_json(const RunState& s) {
  return {{"epoch", s.epoch},
          {"step", s.step},
          {"loss", s.loss},
          {"loss_sum", s.loss_sum},
          {"last", to_json(s.last)},
          {"best", to_json(s.best)},
          {"best_epoch", s.best_epoch},
          {"since_best", s.since_best},
          {"cached_rows", s.cached_rows},
          {"use_last", s.use_last},
          {"saved_bytes", s.measured.saved_bytes},
          {"loss_bytes", s.measured.loss_bytes},
          {"peak_bytes", s.measured.peak_bytes},
          {"step_seconds", s.measured.step_seconds}};
}

RunState state_from(const ordered_json& j) {
  RunState s;
  s.epoch = j.at("epoch").get<int64_t>();
  s.step = j.value("step", int64_t{0});  // checkpoints of 0.1 stand between epochs
  s.loss = number(j.at("loss"));
  s.loss_sum = j.contains("loss_sum") ? number(j.at("loss_sum")) : 0;
  s.last = scores_from(j.at("last"));
  s.best = scores_from(j.at("best"));
  s.best_epoch = j.at("best_epoch").get<int64_t>();
  s.since_best = j.at("since_best").get<int64_t>();
  // Checkpoints of 0.1 say whether, and meant all of them: the reader cuts it to the nodes there are.
  s.cached_rows =
      j.contains("caches") ? (j.at("caches").get<bool>() ? std::numeric_limits<int32_t>::max() : 0) : j.at("cached_rows").get<int64_t>();
  s.use_last = j.at("use_last").get<bool>();
  s.measured = {j.at("saved_bytes").get<int64_t>(), j.at("loss_bytes").get<int64_t>(), j.at("peak_bytes").get<int64_t>(),
                number(j.at(j.contains("step_seconds") ? "step_seconds" : "epoch_seconds"))};
  if (s.epoch < 0 || s.step < 0 || s.best_epoch < 0 || s.best_epoch > s.epoch || s.since_best < 0)
    fail("checkpoint", "epochs and steps must be 0 or more, the best epoch among them", s.epoch);
  return s;
}

const std::string& field(const std::map<std::string, std::string>& metadata, const std::string& name, const std::string& path) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) fail("checkpoint", path + " must have '" + name + "' in its metadata, as satchel train writes it", "none");
  return found->second;
}

/// The types that checkpoints hold.
constexpr std::array<std::pair<at::ScalarType, StoredType>, 5> kTypes = {{{at::kFloat, StoredType::f32},
                                                                          {at::kLong, StoredType::i64},
                                                                          {at::kDouble, StoredType::f64},
                                                                          {at::kBFloat16, StoredType::bf16},
                                                                          {at::kByte, StoredType::u8}}};

StoredTensor stored(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  const auto type = std::ranges::find(kTypes, values.scalar_type(), &std::pair<at::ScalarType, StoredType>::first);
  if (type == kTypes.end()) fail("checkpoint", name + " must be of a type that checkpoints hold", c10::toString(values.scalar_type()));
  const auto* first = static_cast<const std::byte*>(values.const_data_ptr());
  return {name, type->second, values.sizes().vec(), {first, first + values.nbytes()}};
}

at::Tensor restored(const StoredTensor& t) {
  const auto type = std::ranges::find(kTypes, t.type, &std::pair<at::ScalarType, StoredType>::second);
  if (type == kTypes.end()) fail("checkpoint", "tensor " + t.name + " must be F32, I64, F64, BF16 or U8", name_of(t.type));
  at::Tensor values = at::empty(t.shape, type->first);
  if (!t.bytes.empty()) std::memcpy(values.mutable_data_ptr(), t.bytes.data(), t.bytes.size());
  return values;
}

/// Of all that a checkpoint holds: a flipped bit is found, not trained on.
std::string digest_of(const TensorFile& file) {
  Digest digest;
  for (const char* name : {"format", "options", "data", "state"}) digest.add(file.metadata.at(name));
  std::map<std::string, const StoredTensor*> sorted;
  for (const StoredTensor& t : file.tensors) sorted[t.name] = &t;
  for (const auto& [name, tensor] : sorted) {
    digest.add(name);
    digest.add(tensor->shape);
    digest.add(tensor->bytes);
  }
  return digest.text();
}

constexpr int64_t kCurveColumns = 5;

at::Tensor to_tensor(const std::vector<CurvePoint>& curve) {
  at::Tensor rows = at::empty({static_cast<int64_t>(curve.size()), kCurveColumns}, at::kDouble);
  double* at = rows.mutable_data_ptr<double>();
  for (const CurvePoint& p : curve) {
    for (const double value : {static_cast<double>(p.epoch), p.loss, p.train, p.valid, p.test}) *at++ = value;
  }
  return rows;
}

std::vector<CurvePoint> curve_from(const at::Tensor& rows, const std::string& path) {
  if (rows.dim() != 2 || rows.size(1) != kCurveColumns || rows.scalar_type() != at::kDouble)
    fail("checkpoint", path + ": curve must be rows of 5 float64 values", rows.sizes());
  std::vector<CurvePoint> curve;
  const double* at = rows.const_data_ptr<double>();
  for (int64_t i = 0; i < rows.size(0); ++i, at += kCurveColumns)
    curve.push_back({static_cast<int64_t>(at[0]), at[1], at[2], at[3], at[4]});
  return curve;
}

/// The name without `group`, where it begins with it.
std::string within(const std::string& name, const std::string& group) { return name.starts_with(group) ? name.substr(group.size()) : ""; }

}  // namespace

void check_equal(const std::string& checkpoint, const std::string& now, const char* what) {
  in_checkpoint_words(std::string(what) + " of a checkpoint", [&] {
    const ordered_json theirs = ordered_json::parse(checkpoint), mine = ordered_json::parse(now);
    for (const auto& [name, value] : mine.items()) {
      if (name != "name" && theirs.at(name) != value)
        fail("resume", (name == "digest" ? "the data's digest" : name) + " must be the checkpoint's, " + theirs.at(name).dump(),
             value.dump());
    }
    return 0;
  });
}

void check_finite(const Checkpoint& c, const std::string& path) {
  for (const auto& [name, tensor] : c.model) {
    if (!tensor.isfinite().all().item<bool>())
      fail("checkpoint", "weights must be finite (nothing goes to " + path + "; a smaller lr may help)", "nan or infinity in " + name);
  }
}

void write_checkpoint(const std::string& path, const Checkpoint& c) {
  check_finite(c, path);
  TensorFile file;
  for (const auto& [group, tensors] : {std::pair{"model.", &c.model}, {"best.", &c.best}, {"optimizer.", &c.optimizer}}) {
    for (const auto& [name, tensor] : *tensors) file.tensors.push_back(stored(group + name, tensor));
  }
  file.tensors.push_back(stored("curve", to_tensor(c.curve)));
  file.metadata = {{"format", c.format}, {"options", c.options}, {"data", c.data}, {"state", to_json(c.state).dump()}};
  file.metadata["digest"] = digest_of(file);
  write_safetensors(path, file);
}

std::string checkpoint_format(const std::string& path) { return field(read_safetensors(path).metadata, "format", path); }

Checkpoint read_checkpoint(const std::string& path, const std::string& format) {
  const TensorFile file = read_safetensors(path);
  Checkpoint c;
  c.format = field(file.metadata, "format", path);
  if (c.format != format) fail("checkpoint", path + " must have the format '" + format + "'", "'" + c.format + "'");
  c.options = field(file.metadata, "options", path);
  c.data = field(file.metadata, "data", path);
  const std::string state = field(file.metadata, "state", path), digest = field(file.metadata, "digest", path);
  if (const std::string own = digest_of(file); own != digest)
    fail("checkpoint", path + " must be undamaged: its content must have the digest " + digest, own);
  c.state = in_checkpoint_words(path, [&] { return state_from(ordered_json::parse(state)); });
  for (const StoredTensor& t : file.tensors) {
    if (t.name == "curve") c.curve = curve_from(restored(t), path);
    for (const auto& [group, tensors] : {std::pair{"model.", &c.model}, {"best.", &c.best}, {"optimizer.", &c.optimizer}}) {
      const std::string name = within(t.name, group);
      if (!name.empty()) (*tensors)[name] = restored(t);
    }
  }
  return c;
}

std::optional<Checkpoint> checkpoint_to_resume(const RunOptions& options, const std::string& format) {
  if (!options.resume || options.checkpoint.empty() || ::access(options.checkpoint.c_str(), F_OK) != 0) return std::nullopt;
  return read_checkpoint(options.checkpoint, format);
}

TensorMap weights_of(const torch::nn::Module& model) {
  TensorMap all;
  for (const auto& item : model.named_parameters())
    all[item.key()] = item.value().detach().to(at::kCPU, item.value().scalar_type(), false, true);
  for (const auto& item : model.named_buffers())
    all[item.key()] = item.value().detach().to(at::kCPU, item.value().scalar_type(), false, true);
  return all;
}

void set_weights(torch::nn::Module& model, const TensorMap& weights) {
  const at::NoGradGuard guard;
  TensorMap own;
  for (const auto& item : model.named_parameters()) own[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) own[item.key()] = item.value();
  if (own.size() != weights.size()) fail("checkpoint", "a model must have " + std::to_string(own.size()) + " tensors", weights.size());
  for (auto& [name, tensor] : own) {
    const auto found = weights.find(name);
    if (found == weights.end()) fail("checkpoint", "a model must have a tensor " + name, "none");
    if (found->second.sizes() != tensor.sizes() || found->second.scalar_type() != tensor.scalar_type())
      fail("checkpoint", "tensor " + name + " must have the model's shape and type", found->second.sizes());
    tensor.copy_(found->second);
  }
}

}  // namespace satchel
