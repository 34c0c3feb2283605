#include "satchel/plan/published_images.h"

#include "satchel/core/layout.h"

namespace satchel {
namespace {

constexpr PublishedImageSetting kSettings[] = {{"resnet50", 64, 5.14, .49, .49},
                                               {"resnet50", 256, 20.48, 1.94, 1.97},
                                               {"resnet50", 512, {}, 3.89, 3.94},
                                               {"wide_resnet50_2", 256, 26.75, 2.49, 2.52}};
constexpr int64_t kSide = 224;
constexpr int kBits = 2;
constexpr int64_t kPerHeader = 256;  // ActNN: values with one minimum and one range, bf16 each
constexpr int64_t kWindow = 8;       // DIVISION: side of a bf16 average

/// What the programs of ActNN and DIVISION keep of a model.
class Parts {
 public:
  Parts(const PublishedImageSetting& setting, bool by_map)
      : model_(layers_of(published_image_model(setting), kSide, kSide)), images_(setting.batch), by_map_(by_map) {
    add("images", "images", 0, 32, 4 * values(0));
    for (const ImageLayer& layer : model_.layers) add_layer(layer);
  }
  std::vector<SavedTensor> take() { return std::move(parts_); }

 private:
  void add_layer(const ImageLayer& layer) {
    const int in = layer.inputs[0];
    if (layer.kind == LayerKind::conv) add_codes(layer.name, "input", in);
    if (layer.kind == LayerKind::norm) add_codes(layer.name, "norm", in);
    if (layer.relu) add(layer.name, "mask", layer.output, 1, ceil_div(values(layer.output), 8));
    if (layer.kind == LayerKind::max_pool) add(layer.name, "indices", layer.output, 8, values(layer.output));
  }

  void add_codes(const std::string& name, const char* kind, int map) {
    const ImageMap& m = model_.maps[static_cast<size_t>(map)];
    const int64_t maps = images_ * m.channels, blocks = by_map_ ? maps : images_ * ceil_div(m.values(), kPerHeader);
    add(name, kind, map, kBits, ceil_div(values(map) * kBits, 8));
    parts_.push_back({name, "metadata", {blocks, 2}, 16, 4 * blocks, 4 * blocks});
    if (!by_map_) return;
    const int64_t windows = maps * ceil_div(m.height, kWindow) * ceil_div(m.width, kWindow);
    parts_.push_back({name, "means", {windows}, 16, 2 * windows, 2 * windows});
  }

  void add(const std::string& name, const char* kind, int map, int bits, int64_t bytes) {
    const ImageMap& m = model_.maps[static_cast<size_t>(map)];
    const int64_t as_torch = bits == 1 ? 1 : bits == 8 ? 8 : 4;  // a byte of a mask, int64 of an index
    parts_.push_back({name, kind, {images_, m.channels, m.height, m.width}, bits, bytes, as_torch * values(map)});
  }

  int64_t values(int map) const { return images_ * model_.maps[static_cast<size_t>(map)].values(); }

  const ImageLayers model_;
  const int64_t images_;
  const bool by_map_;
  std::vector<SavedTensor> parts_;
};

std::vector<SavedTensor> plain_parts(const PublishedImageSetting& setting) {
  std::vector<SavedTensor> parts = plan_image(published_image_model(setting), {setting.batch, kSide, kSide}, parse_method("fp32"));
  std::erase_if(parts, [](const SavedTensor& s) { return s.kind == "statistics" || s.name == "fc"; });
  return parts;
}

}  // namespace

std::span<const PublishedImageSetting> published_image_settings() { return kSettings; }

ImageShape published_image_model(const PublishedImageSetting& setting) {
  ImageShape shape;
  shape.name = setting.model;
  shape.classes = 1000;
  return shape;
}

std::vector<PublishedImageRow> published_images(const PublishedImageSetting& setting) {
  return {{"FP32", setting.fp32, plain_parts(setting), "fp32"},
          {"ActNN", setting.actnn, Parts(setting, false).take(), "actnn"},
          {"DIVISION", setting.division, Parts(setting, true).take(), "division"}};
}

}  // namespace satchel
