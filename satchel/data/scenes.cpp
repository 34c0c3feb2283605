#include "satchel/data/scenes.h"

#include <array>
#include <cmath>
#include <exception>
#include <new>
#include <string_view>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/png.h"
#include "satchel/data/scene_layouts.h"
#include "satchel/data/synthetic_shapes.h"

namespace satchel {
namespace {

constexpr std::string_view kSynthetic = "synthetic-shapes:";

constexpr uint64_t kMaxFile = uint64_t{1} << 30;

constexpr std::array kLayouts = {
    SceneLayout{SceneTask::segmentation, "JPEGImages, SegmentationClass and ImageSets/Segmentation (Pascal VOC)", is_voc_masks,
                load_voc_masks},
    SceneLayout{SceneTask::segmentation, "leftImg8bit and gtFine (Cityscapes)", is_cityscapes, load_cityscapes},
    SceneLayout{SceneTask::detection, "annotations/instances_train*.json (COCO)", is_coco, load_coco},
    SceneLayout{SceneTask::detection, "JPEGImages, Annotations and ImageSets/Main (Pascal VOC)", is_voc_boxes, load_voc_boxes},
};

struct Found {
  std::string folder;
  const SceneLayout* layout = nullptr;  // none: no layout of scenes
};

/// In the folder, or in one that an official archive has inside: VOCdevkit/VOC2012.
Found layout_of(const std::string& where, SceneTask task, int depth = 2) {
  if (!is_folder(where)) return {};
  const std::vector<std::string> names = names_in(where);
  for (const SceneLayout& layout : kLayouts) {
    if (layout.task == task && layout.is(where, names)) return {where, &layout};
  }
  for (const std::string& name : names) {
    if (depth == 0 || !name.starts_with("VOC")) continue;
    if (Found inside = layout_of(where + "/" + name, task, depth - 1); inside.layout != nullptr) return inside;
  }
  return {};
}

SceneSets load_layout(const std::string& where, SceneTask task) {
  if (!exists(where)) fail("load", "folder must exist", where.empty() ? "''" : where);
  if (!is_folder(where)) fail("load", "path must be a folder of scenes", where);
  if (const Found found = layout_of(where, task); found.layout != nullptr) return found.layout->load(found.folder);
  std::string wanted;
  for (const SceneLayout& layout : kLayouts) {
    if (layout.task == task) wanted += (wanted.empty() ? "" : ", or ") + std::string(layout.wanted);
  }
  refuse(where, "must hold " + wanted, listed(names_in(where)));
}

std::string size_text(int64_t width, int64_t height) { return std::to_string(width) + " by " + std::to_string(height); }

/// Read, of the image's size, and in classes.
Mask read_mask(const SceneData& data, size_t at, const Image& image) {
  const std::string& path = data.mask_paths.at(at);
  Mask mask = decode_png_mask(read_file(path, kMaxFile), path);
  if (mask.height != image.height || mask.width != image.width)
    refuse(path, "must be of its image's size, " + size_text(image.width, image.height), size_text(mask.width, mask.height));
  for (size_t i = 0; i < mask.classes.size(); ++i) {
    const uint8_t got = mask.classes[i];
    mask.classes[i] = data.class_of.at(got);
    if (mask.classes[i] != kUnknownClass) continue;
    const auto width = static_cast<size_t>(mask.width);
    refuse(path, "must have classes of the data set only",
           std::to_string(got) + " at row " + std::to_string(i / width) + ", column " + std::to_string(i % width));
  }
  return mask;
}

/// Loaders have checked boxes against the sizes that the annotations give, before any image is read.
void check_size(const SceneData& data, size_t at, const Image& image) {
  if (!data.sizes.empty()) {
    const auto& [width, height] = data.sizes.at(at);
    if (width != image.width || height != image.height)
      refuse(data.paths.at(at), "must be " + size_text(width, height) + ", as its annotations say", size_text(image.width, image.height));
  }
  for (const ObjectBox& box : data.objects.at(at)) {
    // As the loaders: a pixel over the edge is rounding.
    if (box.right <= static_cast<float>(image.width + 1) && box.bottom <= static_cast<float>(image.height + 1)) continue;
    refuse(data.paths.at(at),
           "must be as large as its boxes, to " + std::to_string(std::lround(box.right)) + ", " + std::to_string(std::lround(box.bottom)),
           size_text(image.width, image.height));
  }
}

std::string name_of(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

SceneSets load_scenes(const std::string& where, SceneTask task) try {
  const bool made = where.starts_with(kSynthetic);
  SceneSets sets = made ? make_synthetic_shapes(parse_synthetic_shapes(where.substr(kSynthetic.size())), task) : load_layout(where, task);
  sets.train.name = sets.test.name = made ? where : name_of(where);
  return sets;
} catch (const std::bad_alloc&) {
  fail("load", "data must fit into memory", where);
}

bool holds_scenes(const std::string& where) try {
  if (where.starts_with(kSynthetic)) return true;
  return layout_of(where, SceneTask::segmentation).layout != nullptr || layout_of(where, SceneTask::detection).layout != nullptr;
} catch (const std::exception&) {  // a folder that cannot be read
  return false;
}

Scene scene_of(const SceneData& data, int64_t index) {
  if (index < 0 || index >= data.count) fail("load", "scene must be 0 to " + std::to_string(data.count - 1), index);
  if (data.drawn.side > 0) return draw_scene(data.drawn, index);
  const auto at = static_cast<size_t>(index);
  Scene scene;
  scene.image = read_image(data.paths.at(at));
  if (!data.mask_paths.empty()) scene.mask = read_mask(data, at, scene.image);
  if (!data.objects.empty()) {
    check_size(data, at, scene.image);
    scene.objects = data.objects.at(at);
  }
  return scene;
}

}  // namespace satchel
