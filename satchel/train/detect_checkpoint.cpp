#include "satchel/train/detect_checkpoint.h"

#include <nlohmann/json.hpp>

#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"
#include "satchel/train/image_checkpoint.h"

namespace satchel {
namespace {

void add_scenes(Digest& digest, const SceneData& data) {
  for (const std::string& path : data.paths) digest.add(path);
  for (const std::vector<ObjectBox>& objects : data.objects) {
    std::vector<float> numbers;
    for (const ObjectBox& o : objects)
      numbers.insert(numbers.end(), {o.left, o.top, o.right, o.bottom, static_cast<float>(o.label), o.crowd ? 1.0F : 0.0F, o.area});
    digest.add(numbers);
  }
  digest.add(std::vector<int64_t>{data.drawn.side, data.drawn.shapes, data.drawn.kinds, static_cast<int64_t>(data.drawn.seed),
                                  data.drawn.first, data.count});
}

}  // namespace

ImageTrainOptions as_images(const DetectTrainOptions& options) {
  ImageTrainOptions o = options;
  o.model = "resnet50";
  o.image = 0;
  o.small_stem = false;
  return o;
}

std::string describe_options(const DetectTrainOptions& options, const DetectorShape& shape) {
  ImageShape images;
  images.name = shape.name;
  images.classes = shape.classes;
  images.channels = shape.channels;
  images.width = shape.width;
  auto j = nlohmann::ordered_json::parse(describe_options(as_images(options), images));
  j["sides"] = options.sides;
  j["longest"] = options.longest;
  j["max_norm"] = options.max_norm;
  j["frozen_norm"] = shape.frozen_norm;
  j["trainable"] = shape.trainable;
  return j.dump();
}

DetectTrainOptions parse_detect_options(const std::string& json, DetectorShape& shape) {
  return in_checkpoint_words("options of a checkpoint", [&] {
    const auto j = nlohmann::ordered_json::parse(json);
    ImageShape images;
    DetectTrainOptions o;
    static_cast<ImageTrainOptions&>(o) = parse_options(json, images);
    j.at("sides").get_to(o.sides);
    j.at("longest").get_to(o.longest);
    j.at("max_norm").get_to(o.max_norm);
    j.at("frozen_norm").get_to(o.frozen_norm);
    j.at("trainable").get_to(o.trainable);
    shape = {images.name, images.classes, images.channels, images.width, o.frozen_norm, static_cast<int>(o.trainable)};
    return o;
  });
}

std::string describe_boxes(const SceneSets& data) {
  Digest digest;
  add_scenes(digest, data.train);
  add_scenes(digest, data.test);
  return nlohmann::ordered_json{{"name", data.train.name},
                                {"images", data.train.count},
                                {"test_images", data.test.count},
                                {"classes", data.train.classes},
                                {"class_names", data.train.class_names},
                                {"category_ids", data.train.category_ids},
                                {"mean", data.mean},
                                {"deviation", data.deviation},
                                {"digest", digest.text()}}
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

TrainedScenes parse_boxes_data(const std::string& json) {
  return in_checkpoint_words("data of a checkpoint", [&] {
    const auto j = nlohmann::ordered_json::parse(json);
    TrainedScenes t;
    j.at("class_names").get_to(t.class_names);
    j.at("category_ids").get_to(t.category_ids);
    j.at("mean").get_to(t.mean);
    j.at("deviation").get_to(t.deviation);
    return t;
  });
}

}  // namespace satchel
