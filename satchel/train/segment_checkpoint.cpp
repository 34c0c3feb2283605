#include <nlohmann/json.hpp>

#include "satchel/train/checkpoint_json.h"
#include "satchel/train/digest.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/segment_task.h"

namespace satchel {
namespace {

using nlohmann::ordered_json;

/// Calls field(name, value) for what a segmentation run has beside an image run.
template <class Options, class Shape, class Field>
void each_segment_field(Options& o, Shape& shape, const Field& field) {
  field("aux", shape.aux);
  field("aux_weight", o.aux_weight);
  field("class_weights", o.class_weights);
  field("least_scale", o.least_scale);
  field("most_scale", o.most_scale);
}

void add_scenes(Digest& digest, const SceneData& data) {
  for (const std::string& path : data.paths) digest.add(path);
  for (const std::string& path : data.mask_paths) digest.add(path);
  digest.add(std::vector<int64_t>{data.count, data.drawn.side, data.drawn.shapes, data.drawn.kinds, static_cast<int64_t>(data.drawn.seed),
                                  data.drawn.first});
}

}  // namespace

std::string describe_options(const SegmentTrainOptions& options, const ImageShape& shape) {
  ordered_json j = ordered_json::parse(describe_options(static_cast<const ImageTrainOptions&>(options), shape));
  each_segment_field(options, shape, [&](const char* name, const auto& value) { j[name] = to_field(value); });
  return j.dump();
}

SegmentTrainOptions parse_segment_options(const std::string& json, ImageShape& shape) {
  return in_checkpoint_words("options of a checkpoint", [&] {
    const ordered_json j = ordered_json::parse(json);
    SegmentTrainOptions o;
    static_cast<ImageTrainOptions&>(o) = parse_options(json, shape);
    each_segment_field(o, shape, [&](const char* name, auto& value) { from_field(j.at(name), value); });
    o.aux = shape.aux;
    return o;
  });
}

std::vector<std::string> names_of_classes(const SceneData& data) {
  std::vector<std::string> names = data.class_names;
  for (auto c = static_cast<int64_t>(names.size()); c < data.classes; ++c) names.push_back(std::to_string(c));
  return names;
}

std::string describe_data(const SceneSets& data) {
  Digest digest;
  add_scenes(digest, data.train);
  add_scenes(digest, data.test);
  return ordered_json{{"name", data.train.name},
                      {"images", data.train.count},
                      {"test_images", data.test.count},
                      {"classes", data.train.classes},
                      {"class_names", names_of_classes(data.train)},
                      {"mean", data.mean},
                      {"deviation", data.deviation},
                      {"digest", digest.text()}}
      .dump(-1, ' ', false, ordered_json::error_handler_t::replace);  // file names may be no UTF-8
}

SegmentedData parse_segmented_data(const std::string& json) {
  return in_checkpoint_words("data of a checkpoint", [&] {
    const auto j = nlohmann::json::parse(json);
    return SegmentedData{j.at("class_names").get<std::vector<std::string>>(), j.at("mean").get<std::vector<float>>(),
                         j.at("deviation").get<std::vector<float>>()};
  });
}

}  // namespace satchel
