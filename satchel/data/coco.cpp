// COCO with boxes: annotations/instances_train*.json and instances_val*.json. Images lie in the folder that the file's name ends with
// (train2017), in images/ or beside annotations/. Boxes are left, top, width, height. As in torchvision's reference, boxes of no area are
// left out, and what hangs over the edge by rounding is cut.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"
#include "satchel/data/scene_layouts.h"

namespace satchel {
namespace {

using nlohmann::json;

constexpr uint64_t kMostJson = uint64_t{4} << 30;
constexpr const char* kInstances = "instances_";

/// The part's file, instances_train*.json or instances_val*.json; the last by name where there are several.
std::string part_file(const std::string& folder, const std::string& part) {
  std::string found;
  if (!is_folder(folder + "/annotations")) return found;
  for (const std::string& name : names_in(folder + "/annotations")) {
    if (name.starts_with(kInstances + part) && name.ends_with(".json")) found = std::max(found, name);
  }
  return found;
}

json parse_json(const std::string& path) {
  const std::vector<uint8_t> bytes = read_file(path, kMostJson);
  try {
    // Outlines are most of a file, and nobody reads them.
    return json::parse(bytes.begin(), bytes.end(), [](int, json::parse_event_t event, json& value) {
      return !(event == json::parse_event_t::key && value == json("segmentation"));
    });
  } catch (const json::parse_error& e) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const size_t at = std::max<size_t>(e.byte, 1) - 1;
    refuse(path + ": byte " + std::to_string(at + 1), "must be JSON",
           text.empty()        ? "an empty file"
           : at >= text.size() ? "the file's end"
                               : printable(text.substr(at)));
  } catch (const json::exception& e) {
    refuse(path, "must be JSON", "numbers out of range");
  }
}

/// For errors; what is deep is not written out.
std::string shown(const json& value) {
  const bool deep = value.is_structured() && std::ranges::any_of(value, [](const json& inner) { return inner.is_structured(); });
  return deep ? std::string("lists in a list") : printable(value.dump());
}

/// Fields of the file's lists, in words of the file.
class CocoFile {
 public:
  explicit CocoFile(const std::string& path) : path_(path), root_(parse_json(path)) {
    if (!root_.is_object()) refuse(path_, "must be an object", root_.type_name());
  }
  const json& list(const char* name) const {
    const auto found = root_.find(name);
    if (found == root_.end() || !found->is_array())
      refuse(path_, "must have a list '" + std::string(name) + "'", found == root_.end() ? "none" : found->type_name());
    return *found;
  }
  [[noreturn]] void wrong(const char* list, size_t i, const std::string& rule, const std::string& got) const {
    refuse(path_ + ": " + list + "[" + std::to_string(i) + "]", rule, got);
  }
  const json& field(const char* in, size_t i, const json& item, const char* name) const {
    if (!item.is_object()) wrong(in, i, "must be an object", item.type_name());
    const auto found = item.find(name);
    if (found == item.end()) wrong(in, i, "must have '" + std::string(name) + "'", "none");
    return *found;
  }
  int64_t whole(const char* in, size_t i, const json& item, const char* name) const {
    const json& value = field(in, i, item, name);
    const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
    if (!value.is_number_integer() || !fits) wrong(in, i, std::string(name) + " must be a whole number", shown(value));
    return value.get<int64_t>();
  }
  std::string text(const char* in, size_t i, const json& item, const char* name) const {
    const json& value = field(in, i, item, name);
    if (!value.is_string()) wrong(in, i, std::string(name) + " must be a text", shown(value));
    return value.get<std::string>();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  json root_;
};

struct Classes {
  std::vector<std::string> names;
  std::vector<int64_t> ids;
};

Classes classes_of(const CocoFile& file) {
  Classes classes;
  const json& list = file.list("categories");
  for (size_t i = 0; i < list.size(); ++i) {
    const int64_t id = file.whole("categories", i, list[i], "id");
    if (std::ranges::find(classes.ids, id) != classes.ids.end()) file.wrong("categories", i, "id must occur once", std::to_string(id));
    classes.ids.push_back(id);
    classes.names.push_back(file.text("categories", i, list[i], "name"));
  }
  if (classes.ids.empty()) refuse(file.path(), "must have categories", "none");
  return classes;
}

/// The folder that the images lie in, from the first of them.
std::string image_folder_of(const std::string& folder, const std::string& json_name, const std::string& first) {
  const size_t skip = std::string(kInstances).size();
  const std::string part = json_name.substr(skip, json_name.size() - skip - std::string(".json").size());
  const std::string places[] = {folder + "/" + part, folder + "/images/" + part, folder + "/images", folder};
  for (const std::string& place : places) {
    if (exists(place + "/" + first)) return place;
  }
  return places[0];
}

/// One annotation's box; false where it has no area.
bool read_box(const CocoFile& file, size_t i, const json& item, double width, double height, ObjectBox& box) {
  constexpr const char* in = "annotations";
  const json& corners = file.field(in, i, item, "bbox");
  const auto is_number = [](const json& n) { return n.is_number() && std::isfinite(n.get<double>()); };
  if (!corners.is_array() || corners.size() != 4 || !std::ranges::all_of(corners, is_number))
    file.wrong(in, i, "bbox must be 4 numbers: left, top, width, height", shown(corners));
  const double left = corners[0].get<double>(), top = corners[1].get<double>(), w = corners[2].get<double>(), h = corners[3].get<double>();
  const bool inside = left >= -1 && top >= -1 && left + w <= width + 1 && top + h <= height + 1;
  if (w < 0 || h < 0 || !inside) {
    std::ostringstream got;
    got << left << ", " << top << ", " << w << ", " << h << " in " << width << " × " << height;
    file.wrong(in, i, "bbox must lie in its image: left, top, width, height", got.str());
  }
  box.left = static_cast<float>(std::max(left, 0.0));
  box.top = static_cast<float>(std::max(top, 0.0));
  box.right = static_cast<float>(std::min(left + w, width));
  box.bottom = static_cast<float>(std::min(top + h, height));
  if (const auto crowd = item.find("iscrowd"); crowd != item.end()) box.crowd = file.whole(in, i, item, "iscrowd") != 0;
  if (const auto area = item.find("area"); area != item.end() && is_number(*area)) box.area = std::max(0.0F, area->get<float>());
  return box.right > box.left && box.bottom > box.top;
}

SceneData load_part(const std::string& folder, const std::string& name, const Classes& classes, const CocoFile& file) {
  SceneData data;
  data.class_names = classes.names;
  data.category_ids = classes.ids;
  data.classes = static_cast<int64_t>(classes.ids.size());
  std::map<int64_t, size_t> places;
  std::map<int64_t, int32_t> labels;
  for (size_t c = 0; c < classes.ids.size(); ++c) labels[classes.ids[c]] = static_cast<int32_t>(c);
  const json& images = file.list("images");
  if (images.empty()) refuse(file.path(), "must have images", "none");
  std::string from;
  for (size_t i = 0; i < images.size(); ++i) {
    const std::string own = file.text("images", i, images[i], "file_name");
    if (from.empty()) from = image_folder_of(folder, name, own);
    const std::string path = from + "/" + own;
    if (!exists(path)) file.wrong("images", i, "file_name must name a file in " + from, printable(own));
    const int64_t id = file.whole("images", i, images[i], "id");
    if (!places.emplace(id, i).second) file.wrong("images", i, "id must occur once", std::to_string(id));
    const int64_t width = file.whole("images", i, images[i], "width"), height = file.whole("images", i, images[i], "height");
    if (width < 1 || height < 1)
      file.wrong("images", i, "width and height must be 1 or more", std::to_string(width) + " × " + std::to_string(height));
    data.sizes.push_back({width, height});
    data.paths.push_back(path);
    data.ids.push_back(id);
  }
  data.count = static_cast<int64_t>(data.paths.size());
  data.objects.resize(data.paths.size());
  const json& annotations = file.list("annotations");
  for (size_t i = 0; i < annotations.size(); ++i) {
    const json& item = annotations[i];
    const auto place = places.find(file.whole("annotations", i, item, "image_id"));
    if (place == places.end()) file.wrong("annotations", i, "image_id must be an image's id", item["image_id"].dump());
    const auto label = labels.find(file.whole("annotations", i, item, "category_id"));
    if (label == labels.end())
      file.wrong("annotations", i, "category_id must be a category of the training images", item["category_id"].dump());
    ObjectBox box;
    box.label = label->second;
    const auto& [width, height] = data.sizes[place->second];
    if (read_box(file, i, item, static_cast<double>(width), static_cast<double>(height), box)) data.objects[place->second].push_back(box);
  }
  return data;
}

}  // namespace

bool is_coco(const std::string& folder, const std::vector<std::string>&) { return !part_file(folder, "train").empty(); }

SceneSets load_coco(const std::string& folder) {
  const std::string train = part_file(folder, "train"), test = part_file(folder, "val");
  SceneSets sets;
  Classes classes;
  {
    const CocoFile file(folder + "/annotations/" + train);
    classes = classes_of(file);
    sets.train = load_part(folder, train, classes, file);
  }
  if (!test.empty()) sets.test = load_part(folder, test, classes, CocoFile(folder + "/annotations/" + test));
  sets.mean = {0.485F, 0.456F, 0.406F};  // ImageNet's, as for image folders
  sets.deviation = {0.229F, 0.224F, 0.225F};
  return sets;
}

}  // namespace satchel
