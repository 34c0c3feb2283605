// Cityscapes: leftImg8bit/train|val/CITY/NAME_leftImg8bit.png, gtFine/train|val/CITY/NAME_gtFine_labelIds.png.
#include <algorithm>
#include <array>
#include <utility>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"
#include "satchel/data/scene_layouts.h"

namespace satchel {
namespace {

/// The 19 of 34 labels that are scored, in their order.
constexpr std::array<std::pair<uint8_t, const char*>, 19> kScored = {{{7, "road"},
                                                                      {8, "sidewalk"},
                                                                      {11, "building"},
                                                                      {12, "wall"},
                                                                      {13, "fence"},
                                                                      {17, "pole"},
                                                                      {19, "traffic light"},
                                                                      {20, "traffic sign"},
                                                                      {21, "vegetation"},
                                                                      {22, "terrain"},
                                                                      {23, "sky"},
                                                                      {24, "person"},
                                                                      {25, "rider"},
                                                                      {26, "car"},
                                                                      {27, "truck"},
                                                                      {28, "bus"},
                                                                      {31, "train"},
                                                                      {32, "motorcycle"},
                                                                      {33, "bicycle"}}};
constexpr uint8_t kLabels = 34;
constexpr const char *kImageEnd = "_leftImg8bit.png", *kMaskEnd = "_gtFine_labelIds.png";

SceneData read_part(const std::string& folder, const std::string& part) {
  SceneData data;
  data.class_of.assign(256, kUnknownClass);
  std::fill_n(data.class_of.begin(), kLabels, Mask::ignored);
  data.class_of[255] = Mask::ignored;  // −1, a licence plate
  for (const auto& [label, name] : kScored) {
    data.class_of[label] = static_cast<uint8_t>(data.class_names.size());
    data.class_names.emplace_back(name);
  }
  data.classes = static_cast<int64_t>(data.class_names.size());
  const std::string images = folder + "/leftImg8bit/" + part, masks = folder + "/gtFine/" + part;
  if (!is_folder(images)) refuse(folder, "must hold leftImg8bit/" + part, listed(names_in(folder + "/leftImg8bit")));
  for (const std::string& city : names_in(images)) {
    if (!is_folder(images + "/" + city)) refuse(images, "must hold one folder a city", printable(city));
    for (const std::string& name : names_in(images + "/" + city)) {
      const std::string path = images + "/" + city + "/" + name;
      if (!name.ends_with(kImageEnd)) refuse(images + "/" + city, std::string("must hold files *") + kImageEnd + " only", printable(name));
      const std::string mask = masks + "/" + city + "/" + name.substr(0, name.size() - std::string(kImageEnd).size()) + kMaskEnd;
      if (!exists(mask)) refuse(path, "must have a mask", "none at " + mask);
      data.paths.push_back(path);
      data.mask_paths.push_back(mask);
    }
  }
  data.count = static_cast<int64_t>(data.paths.size());
  if (data.count == 0) refuse(images, "must hold an image", "none");
  return data;
}

}  // namespace

bool is_cityscapes(const std::string& folder, const std::vector<std::string>& names) {
  const auto has = [&](const char* name) { return std::ranges::find(names, name) != names.end() && is_folder(folder + "/" + name); };
  return has("leftImg8bit") && has("gtFine");
}

SceneSets load_cityscapes(const std::string& folder) {
  SceneSets sets{read_part(folder, "train"), read_part(folder, "val"), {0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}};
  return sets;
}

}  // namespace satchel
