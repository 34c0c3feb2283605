#include "satchel/train/image_checkpoint.h"

#include <nlohmann/json.hpp>

#include "satchel/train/digest.h"
#include "satchel/train/image_options.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

const std::string kShares = "shares.";

void add(Digest& digest, const ImageData& data) {
  digest.add(data.pixels);
  digest.add(data.labels);
  for (const std::string& path : data.paths) digest.add(path);
}

}  // namespace

std::string describe_options(const ImageTrainOptions& o, const ImageShape& shape) {
  ordered_json j{{"model", shape.name},
                 {"classes", shape.classes},
                 {"channels", shape.channels},
                 {"small_stem", shape.small_stem},
                 {"width", shape.width},
                 {"dropout", dropout_of(shape)},
                 {"method", o.method.name},
                 {"batch", o.batch},
                 {"lr", o.lr},
                 {"weight_decay", o.weight_decay},
                 {"momentum", o.momentum},
                 {"nesterov", o.nesterov},
                 {"schedule", name_of(o.schedule)},
                 {"warmup", o.warmup},
                 {"milestones", o.milestones},
                 {"gamma", o.gamma},
                 {"label_smoothing", o.label_smoothing},
                 {"augment", o.augment},
                 {"image", o.image},
                 {"eval_every", o.eval_every},
                 {"seed", o.seed},
                 {"device", o.device.substr(0, o.device.find(':'))},  // whichever GPU: they give the same results
                 {"tf32", o.tf32},
                 {"amp", name_of(o.amp)},
                 {"loss_scale", {o.loss_scale.initial, o.loss_scale.growth, o.loss_scale.backoff, o.loss_scale.interval}},
                 {"channels_last", o.channels_last}};
  const bool fixed = o.schedule == Decay::none || (o.schedule == Decay::step && !o.milestones.empty());
  j["epochs"] = fixed ? ordered_json("any") : ordered_json(o.epochs);
  return j.dump();
}

void add_shares(const ShareOut& shares, TensorMap& optimizer) {
  for (const auto& [name, tensor] : shares.state()) optimizer[kShares + name] = tensor;
}

void take_shares(TensorMap& optimizer, ShareOut& shares, at::Device device) {
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
