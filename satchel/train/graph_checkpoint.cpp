// What of a run on a graph its checkpoint holds beside the weights.
#include <nlohmann/json.hpp>

#include "satchel/train/checkpoint.h"
#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"
#include "satchel/train/names.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

}  // namespace

std::string describe_options(const TrainOptions& o) {
  const GraphShape& s = o.shape;
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
                      {"method", o.method.name},
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
  return in_checkpoint_words("options of a checkpoint", [&] {
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
    o.method = parse_method(j.at("method").get<std::string>());
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

}  // namespace satchel
