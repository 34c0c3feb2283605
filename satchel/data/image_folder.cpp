// JPEG and PNG files in folders by class: train/CLASS/*.jpg and val/CLASS/*.jpg (or test/). Files are only listed here; they are
// decoded when they are asked for.
#include <algorithm>
#include <cctype>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

bool is_image(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name.ends_with(".jpg") || name.ends_with(".jpeg") || name.ends_with(".png");
}

void list_class(ImageData& data, const std::string& folder, int32_t label) {
  const size_t had = data.paths.size();
  for (const std::string& name : names_in(folder)) {
    if (!is_image(name)) refuse(folder, "must hold .jpg, .jpeg and .png files only", printable(name));
    data.paths.push_back(folder + "/" + name);
    data.labels.push_back(label);
  }
  if (data.paths.size() == had) refuse(folder, "must hold an image", "none");
  if (data.count() > kMaxImages) refuse(folder, "must make at most " + std::to_string(kMaxImages) + " images", "more");
}

/// Classes are those of `known`, or, where that is empty, the folders found.
ImageData list_set(const std::string& folder, std::vector<std::string> known) {
  const std::vector<std::string> found = names_in(folder);
  if (found.empty()) refuse(folder, "must hold one folder a class", "nothing");
  if (known.empty()) known = found;
  ImageData data;
  data.channels = 3;
  data.classes = static_cast<int64_t>(known.size());
  for (const std::string& name : found) {
    const std::string path = folder + "/" + name;
    if (!is_folder(path)) refuse(folder, "must hold one folder a class", printable(name));
    const auto at = std::lower_bound(known.begin(), known.end(), name);
    if (at == known.end() || *at != name) refuse(folder, "must hold classes of train only", printable(name));
    list_class(data, path, static_cast<int32_t>(at - known.begin()));
  }
  data.class_names = std::move(known);
  return data;
}

std::string test_folder(const std::string& folder) {
  for (const char* name : {"/val", "/test"}) {
    if (is_folder(folder + name)) return folder + name;
  }
  refuse(folder, "must hold val/ or test/ beside train/", listed(names_in(folder)));
}

}  // namespace

bool is_image_folder(const std::string& folder, const std::vector<std::string>& names) {
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end() && is_folder(folder + "/" + name);
  };
  return has("train") && (has("val") || has("test"));
}

ImageSets load_image_folder(const std::string& folder) {
  ImageSets sets;
  sets.train = list_set(folder + "/train", {});
  sets.test = list_set(test_folder(folder), sets.train.class_names);
  sets.mean = {0.485f, 0.456f, 0.406f};  // of ImageNet, as torchvision's own recipes have them
  sets.deviation = {0.229f, 0.224f, 0.225f};
  return sets;
}

}  // namespace satchel
