// What of a run on a graph its checkpoint holds beside the weights.
#include <nlohmann/json.hpp>

#include "satchel/core/graph_layer.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

/// Calls field(name, value) for all that defines a run.
template <class Options, class Field>
void each_field(Options& o, const Field& field) {
  field("model", o.shape.conv);
  field("layers", o.shape.layers);
  field("features", o.shape.features);
  field("hidden", o.shape.hidden);
  field("classes", o.shape.classes);
  field("norm", o.shape.norm);
  field("activation", o.shape.activation);
  field("slope", o.shape.slope);
  field("alpha", o.shape.alpha);
  field("dropout", o.shape.dropout);
  field("method", o.method);
  field("optimizer", o.optimizer);
  field("lr", o.lr);
  field("weight_decay", o.weight_decay);
  field("momentum", o.momentum);
  field("clip", o.clip);
  field("eval_every", o.eval_every);
  field("patience", o.patience);
  field("seed", o.seed);
  field("split", o.split);
  field("device", o.device);
  field("self_loops", o.self_loops);
  field("cache_aggregate", o.cache_aggregate);
  field("cache_bytes", o.cache_bytes);
  field("last_layer", o.last_layer);
  field("tf32", o.tf32);
  field("amp", o.amp);
}

}  // namespace

std::string describe_options(const TrainOptions& options) {
  TrainOptions o = options;
  o.device = kind_of_device(o.device);
  ordered_json j;
  each_field(o, [&](const char* name, const auto& value) { j[name] = to_field(value); });
  return j.dump();
}

TrainOptions parse_options(const std::string& json) {
  return in_checkpoint_words("options of a checkpoint", [&] {
    ordered_json j = ordered_json::parse(json);
    // Checkpoints of 0.1 have none of these.
    if (!j.contains("cache_bytes")) j["cache_bytes"] = 0;
    if (!j.contains("last_layer")) j["last_layer"] = "all";
    if (!j.contains("tf32")) j["tf32"] = false;
    if (!j.contains("amp")) j["amp"] = "none";
    TrainOptions o;
    each_field(o, [&](const char* name, auto& value) { from_field(j.at(name), value); });
    graph_layer(o.shape.conv, "checkpoint");
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

}  // namespace satchel
