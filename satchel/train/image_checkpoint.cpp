#include "satchel/train/image_checkpoint.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

const std::string kShares = "shares.";

void add(Digest& digest, const ImageData& data) {
  digest.add(data.pixels);
  digest.add(data.labels);
  for (const std::string& path : data.paths) digest.add(path);
}

/// Calls field(name, value) for all that defines a run, but for the number of epochs.
template <class Options, class Shape, class Field>
void each_field(Options& o, Shape& shape, double& dropout, double& depth, const Field& field) {
  field("model", shape.name);
  field("classes", shape.classes);
  field("channels", shape.channels);
  field("small_stem", shape.small_stem);
  field("width", shape.width);
  field("dropout", dropout);
  field("method", o.method);
  field("batch", o.batch);
  field("lr", o.lr);
  field("weight_decay", o.weight_decay);
  field("momentum", o.momentum);
  field("nesterov", o.nesterov);
  field("schedule", o.schedule);
  field("warmup", o.warmup);
  field("milestones", o.milestones);
  field("gamma", o.gamma);
  field("label_smoothing", o.label_smoothing);
  field("augment", o.augment);
  field("image", o.image);
  field("eval_every", o.eval_every);
  field("seed", o.seed);
  field("device", o.device);
  field("tf32", o.tf32);
  field("amp", o.amp);
  field("loss_scale", o.loss_scale);
  field("channels_last", o.channels_last);
  field("stochastic_depth", depth);
  field("weights", o.weights);
  field("freeze", shape.freeze);
}

}  // namespace

std::string describe_options(const ImageTrainOptions& options, const ImageShape& shape) {
  ImageTrainOptions o = options;
  o.device = kind_of_device(o.device);
  double dropout = dropout_of(shape), depth = stochastic_depth_of(shape);
  ordered_json j;
  each_field(o, shape, dropout, depth, [&](const char* name, const auto& value) { j[name] = to_field(value); });
  const bool fixed = o.schedule == Decay::none || (o.schedule == Decay::step && !o.milestones.empty());
  j["epochs"] = fixed ? ordered_json("any") : ordered_json(o.epochs);
  return j.dump();
}

ImageTrainOptions parse_options(const std::string& json, ImageShape& shape) {
  return in_checkpoint_words("options of a checkpoint", [&] {
    const ordered_json j = ordered_json::parse(with_later_options(json));
    ImageTrainOptions o;
    double dropout = 0, depth = 0;
    each_field(o, shape, dropout, depth, [&](const char* name, auto& value) { from_field(j.at(name), value); });
    o.model = shape.name;
    o.width = shape.width;
    o.small_stem = shape.small_stem;
    o.dropout = shape.dropout = dropout;
    if (depth > 0) o.stochastic_depth = shape.stochastic_depth = depth;
    if (depth == 0 && stochastic_depth_of(shape) > 0) o.stochastic_depth = shape.stochastic_depth = 0;
    o.freeze = shape.freeze;
    return o;
  });
}

std::string with_later_options(const std::string& json) {
  return in_checkpoint_words("options of a checkpoint", [&] {
    ordered_json j = ordered_json::parse(json);
    for (const auto& [name, none] : {std::pair<const char*, ordered_json>{"stochastic_depth", 0.0}, {"weights", ""}, {"freeze", ""}}) {
      if (!j.contains(name)) j[name] = none;
    }
    return j.dump();
  });
}

void add_shares(const RunningBitAllocator& shares, TensorMap& optimizer) {
  for (const auto& [name, tensor] : shares.state()) optimizer[kShares + name] = tensor;
}

void take_shares(TensorMap& optimizer, RunningBitAllocator& shares, at::Device device) {
  TensorMap state;
  for (auto item = optimizer.lower_bound(kShares); item != optimizer.end() && item->first.starts_with(kShares);) {
    state[item->first.substr(kShares.size())] = item->second;
    item = optimizer.erase(item);
  }
  shares.restore(state, device);
}

std::string describe_data(const ImageSets& data) {
  Digest digest;
  add(digest, data.train);
  add(digest, data.test);
  return ordered_json{{"name", data.train.name},          {"images", data.train.count()},
                      {"test_images", data.test.count()}, {"classes", data.train.classes},
                      {"channels", data.train.channels},  {"height", data.train.height},
                      {"image_width", data.train.width},  {"mean", data.mean},
                      {"deviation", data.deviation},      {"digest", digest.text()}}
      .dump(-1, ' ', false, ordered_json::error_handler_t::replace);  // file names may be no UTF-8
}

}  // namespace satchel
