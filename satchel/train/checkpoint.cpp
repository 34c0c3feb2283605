#include "satchel/train/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "satchel/core/error.h"
#include "satchel/train/digest.h"
#include "satchel/train/names.h"
#include "satchel/train/safetensors.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

/// JSON has no NaN: a metric that is undefined is null.
double number(const ordered_json& j) { return j.is_null() ? std::numeric_limits<double>::quiet_NaN() : j.get<double>(); }

ordered_json to_json(const Scores& s) { return {{"train", s.train}, {"valid", s.valid}, {"test", s.test}}; }
Scores scores_from(const ordered_json& j) { return {number(j.at("train")), number(j.at("valid")), number(j.at("test"))}; }

ordered_json to_json(const RunState& s) {
  return {{"epoch", s.epoch},
          {"loss", s.loss},
          {"last", to_json(s.last)},
          {"best", to_json(s.best)},
          {"best_epoch", s.best_epoch},
          {"since_best", s.since_best},
          {"cached_rows", s.cached_rows},
          {"use_last", s.use_last},
          {"saved_bytes", s.measured.saved_bytes},
          {"loss_bytes", s.measured.loss_bytes},
          {"peak_bytes", s.measured.peak_bytes},
          {"epoch_seconds", s.measured.epoch_seconds}};
}

RunState state_from(const ordered_json& j) {
  RunState s;
  s.epoch = j.at("epoch").get<int64_t>();
  s.loss = number(j.at("loss"));
  s.last = scores_from(j.at("last"));
  s.best = scores_from(j.at("best"));
  s.best_epoch = j.at("best_epoch").get<int64_t>();
  s.since_best = j.at("since_best").get<int64_t>();
  // Checkpoints of 0.1 say whether, and meant all of them: the reader cuts it to the nodes there are.
  s.cached_rows =
      j.contains("caches") ? (j.at("caches").get<bool>() ? std::numeric_limits<int32_t>::max() : 0) : j.at("cached_rows").get<int64_t>();
  s.use_last = j.at("use_last").get<bool>();
  s.measured = {j.at("saved_bytes").get<int64_t>(), j.at("loss_bytes").get<int64_t>(), j.at("peak_bytes").get<int64_t>(),
                number(j.at("epoch_seconds"))};
  if (s.epoch < 0 || s.best_epoch < 0 || s.best_epoch > s.epoch || s.since_best < 0)
    fail("checkpoint", "epochs must be 0 or more, the best one among them", s.epoch);
  return s;
}

/// Runs `read`, which parses JSON from a file: what it throws names the file.
template <class Read>
auto guarded(const std::string& where, const Read& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception&) {
    fail("checkpoint", where + " must be as satchel train writes it", "JSON of another kind");
  }
}

Method method_from(const ordered_json& j) {
  Method m;
  m.name = j.at("method").get<std::string>();
  m.plain = j.at("method.plain").get<bool>();
  m.input = parse_spec(j.at("method.input").get<std::string>());
  m.norm = parse_spec(j.at("method.norm").get<std::string>());
  m.longest_block = j.at("method.longest_block").get<int64_t>();
  m.shared = j.at("method.shared").get<bool>();
  m.keeps_aggregate = j.at("method.keeps_aggregate").get<bool>();
  m.packs_data = j.at("method.packs_data").get<bool>();
  m.keeps_dropout = j.at("method.keeps_dropout").get<bool>();
  return m;
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

/// The name without `group`, where it begins with it.
std::string within(const std::string& name, const std::string& group) { return name.starts_with(group) ? name.substr(group.size()) : ""; }

}  // namespace

std::string describe_options(const TrainOptions& o) {
  const GraphShape& s = o.shape;
  const Method& m = o.method;
  return ordered_json{{"model", name_of(s.conv)},
                      {"layers", s.layers},
                      {"features", s.features},
                      {"hidden", s.hidden},
                      {"classes", s.classes},
                      {"norm", name_of(s.norm)},
                      {"activation", name_of(s.activation)},
                      {"slope", s.slope},
                      {"alpha", s.alpha},
                      {"dropout", s.dropout},
                      {"method", m.name},
                      {"method.plain", m.plain},
                      {"method.input", to_string(m.input)},
                      {"method.norm", to_string(m.norm)},
                      {"method.longest_block", m.longest_block},
                      {"method.shared", m.shared},
                      {"method.keeps_aggregate", m.keeps_aggregate},
                      {"method.packs_data", m.packs_data},
                      {"method.keeps_dropout", m.keeps_dropout},
                      {"optimizer", name_of(o.optimizer)},
                      {"lr", o.lr},
                      {"weight_decay", o.weight_decay},
                      {"momentum", o.momentum},
                      {"clip", o.clip},
                      {"eval_every", o.eval_every},
                      {"patience", o.patience},
                      {"seed", o.seed},
                      {"split", o.split},
                      {"device", o.device.substr(0, o.device.find(':'))},  // whichever GPU: they give the same results
                      {"self_loops", o.self_loops},
                      {"cache_aggregate", o.cache_aggregate},
                      {"cache_bytes", o.cache_bytes},
                      {"tf32", o.tf32},
                      {"amp", name_of(o.amp)}}
      .dump();
}

TrainOptions parse_options(const std::string& json) {
  return guarded("options of a checkpoint", [&] {
    const ordered_json j = ordered_json::parse(json);
    TrainOptions o;
    o.shape.conv = from_name<Conv>(j.at("model").get<std::string>(), "checkpoint");
    o.shape.layers = j.at("layers").get<int64_t>();
    o.shape.features = j.at("features").get<int64_t>();
    o.shape.hidden = j.at("hidden").get<int64_t>();
    o.shape.classes = j.at("classes").get<int64_t>();
    o.shape.norm = from_name<Norm>(j.at("norm").get<std::string>(), "checkpoint");
    o.shape.activation = from_name<Activation>(j.at("activation").get<std::string>(), "checkpoint");
    o.shape.slope = number(j.at("slope"));
    o.shape.alpha = number(j.at("alpha"));
    o.shape.dropout = number(j.at("dropout"));
    o.method = method_from(j);
    o.optimizer = from_name<Optimizer>(j.at("optimizer").get<std::string>(), "checkpoint");
    o.lr = number(j.at("lr"));
    o.weight_decay = number(j.at("weight_decay"));
    o.momentum = number(j.at("momentum"));
    o.clip = number(j.at("clip"));
    o.eval_every = j.at("eval_every").get<int64_t>();
    o.patience = j.at("patience").get<int64_t>();
    o.seed = j.at("seed").get<uint64_t>();
    o.split = j.at("split").get<int64_t>();
    o.device = j.at("device").get<std::string>();
    o.self_loops = j.at("self_loops").get<bool>();
    o.cache_aggregate = j.at("cache_aggregate").get<bool>();
    o.cache_bytes = j.value("cache_bytes", int64_t{0});  // these three: checkpoints of 0.1 have none
    o.tf32 = j.value("tf32", false);
    o.amp = from_name<Amp>(j.value("amp", "none"), "checkpoint");
    return o;
  });
}

std::string describe_data(const GraphData& data) {
  Digest digest;
  digest.add(data.start);
  digest.add(data.target);
  if (!data.weight.empty()) digest.add(data.weight);
  digest.add(data.features.dense);
  digest.add(data.features.start);
  digest.add(data.features.column);
  digest.add(data.features.value);
  digest.add(data.labels);
  digest.add(data.targets);
  for (const Split& split : data.splits) {
    digest.add(split.train);
    digest.add(split.valid);
    digest.add(split.test);
  }
  ordered_json about = {
      {"name", data.name},       {"nodes", data.nodes},        {"edges", data.target.size()}, {"features", data.features.columns},
      {"classes", data.classes}, {"task", name_of(data.task)}, {"digest", digest.text()}};
  if (!data.weight.empty()) about["weighted"] = true;
  return about.dump(-1, ' ', false, ordered_json::error_handler_t::replace);  // file names may be no UTF-8
}

void check_equal(const std::string& checkpoint, const std::string& now, const char* what) {
  guarded(std::string(what) + " of a checkpoint", [&] {
    const ordered_json theirs = ordered_json::parse(checkpoint), mine = ordered_json::parse(now);
    for (const auto& [name, value] : mine.items()) {
      if (name != "name" && theirs.at(name) != value)
        fail("resume", (name == "digest" ? "the data's digest" : name) + " must be the checkpoint's, " + theirs.at(name).dump(),
             value.dump());
    }
    return 0;
  });
}

void write_checkpoint(const std::string& path, const Checkpoint& c) {
  for (const auto& [name, tensor] : c.model) {
    if (!tensor.isfinite().all().item<bool>())
      fail("checkpoint", "weights must be finite (nothing goes to " + path + "; a smaller lr may help)", "nan or infinity in " + name);
  }
  TensorFile file;
  for (const auto& [group, tensors] : {std::pair{"model.", &c.model}, {"best.", &c.best}, {"optimizer.", &c.optimizer}}) {
    for (const auto& [name, tensor] : *tensors) file.tensors.push_back(stored(group + name, tensor));
  }
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
  c.state = guarded(path, [&] { return state_from(ordered_json::parse(state)); });
  for (const StoredTensor& t : file.tensors) {
    for (const auto& [group, tensors] : {std::pair{"model.", &c.model}, {"best.", &c.best}, {"optimizer.", &c.optimizer}}) {
      const std::string name = within(t.name, group);
      if (!name.empty()) (*tensors)[name] = restored(t);
    }
  }
  return c;
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
