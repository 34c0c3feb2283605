#include "satchel/data/scenes.h"

#include <exception>
#include <new>
#include <span>
#include <string_view>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/scene_layouts.h"
#include "satchel/data/synthetic_shapes.h"

namespace satchel {
namespace {

constexpr std::string_view kSynthetic = "synthetic-shapes:";

std::span<const SceneLayout> layouts() {
  static const SceneLayout all[] = {kCoco, kVocBoxes};
  return all;
}

const SceneLayout* layout_of(const std::string& folder, SceneTask task) {
  if (!is_folder(folder)) return nullptr;
  const std::vector<std::string> names = names_in(folder);
  for (const SceneLayout& layout : layouts()) {
    if (layout.task == task && layout.is(folder, names)) return &layout;
  }
  return nullptr;
}

SceneSets load_layout(const std::string& where, SceneTask task) {
  if (!exists(where)) fail("load", "folder must exist", where.empty() ? "''" : where);
  if (!is_folder(where)) fail("load", "path must be a folder of scenes", where);
  if (const SceneLayout* layout = layout_of(where, task)) return layout->load(where);
  std::string wanted;
  for (const SceneLayout& layout : layouts()) {
    if (layout.task == task) wanted += (wanted.empty() ? "" : ", or ") + std::string(layout.wanted);
  }
  refuse(where, "must hold " + wanted, listed(names_in(where)));
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
  return layout_of(where, SceneTask::segmentation) != nullptr || layout_of(where, SceneTask::detection) != nullptr;
} catch (const std::exception&) {  // a folder that cannot be read
  return false;
}

Scene scene_of(const SceneData& data, int64_t index) {
  if (index < 0 || index >= data.count) fail("load", "scene must be 0 to " + std::to_string(data.count - 1), index);
  if (data.drawn.side > 0) return draw_scene(data.drawn, index);
  const auto at = static_cast<size_t>(index);
  Scene scene;
  scene.image = read_image(data.paths.at(at));
  if (!data.objects.empty()) scene.objects = data.objects.at(at);
  return scene;
}

}  // namespace satchel
