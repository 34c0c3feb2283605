// Pascal VOC's segmentation: JPEGImages/NAME.jpg, SegmentationClass/NAME.png, ImageSets/Segmentation/train.txt and val.txt.
#include <algorithm>
#include <array>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"
#include "satchel/data/scene_layouts.h"

namespace satchel {
namespace {

constexpr std::array kVocClasses = {"aeroplane", "bicycle",     "bird",  "boat",        "bottle", "bus",      "car",
                                    "cat",       "chair",       "cow",   "diningtable", "dog",    "horse",    "motorbike",
                                    "person",    "pottedplant", "sheep", "sofa",        "train",  "tvmonitor"};
constexpr const char* kLists = "/ImageSets/Segmentation/";

bool has_name(const std::vector<std::string>& names, const char* name) { return std::ranges::find(names, name) != names.end(); }

SceneData read_list(const std::string& folder, const std::string& list) {
  SceneData data;
  data.class_names.emplace_back("background");
  for (const char* name : kVocClasses) data.class_names.emplace_back(name);
  data.classes = static_cast<int64_t>(data.class_names.size());
  data.class_of.assign(256, kUnknownClass);
  for (uint8_t c = 0; c < data.classes; ++c) data.class_of[c] = c;
  data.class_of[Mask::ignored] = Mask::ignored;
  for (const ListedName& item : listed_names(list)) {
    data.paths.push_back(listed_image(list, item, folder + "/JPEGImages/" + item.name));
    data.mask_paths.push_back(folder + "/SegmentationClass/" + item.name + ".png");
    if (!exists(data.mask_paths.back()))
      refuse(list + ": line " + std::to_string(item.line), "must name a mask that is there", data.mask_paths.back());
  }
  data.count = static_cast<int64_t>(data.paths.size());
  if (data.count == 0) refuse(list, "must name an image", "none");
  return data;
}

}  // namespace

std::span<const char* const> voc_class_names() { return kVocClasses; }

std::vector<ListedName> listed_names(const std::string& path) {
  constexpr uint64_t kMaxList = uint64_t{1} << 28;
  const std::vector<uint8_t> bytes = read_file(path, kMaxList);
  std::vector<ListedName> names;
  int64_t line = 1;
  std::string word;
  bool ended = false;  // the line's first word has
  const auto finish = [&] {
    if (word.find('/') != std::string::npos || word.find('\0') != std::string::npos || word.starts_with('.'))
      refuse(path + ": line " + std::to_string(line), "must be a name", printable(word));
    if (!word.empty()) names.push_back({word, line});
    word.clear();
  };
  for (const uint8_t byte : bytes) {
    const auto c = static_cast<char>(byte);
    if (c == '\n') {
      finish();
      ended = false;
      ++line;
    } else if (c == ' ' || c == '\t' || c == '\r') {
      ended = ended || !word.empty();
    } else if (!ended) {
      word += c;
    }
  }
  finish();
  if (static_cast<int64_t>(names.size()) > kMaxImages) refuse(path, "must name at most " + std::to_string(kMaxImages) + " images", "more");
  return names;
}

std::string listed_image(const std::string& list, const ListedName& name, const std::string& stem) {
  for (const char* ending : {".jpg", ".jpeg", ".png"}) {
    if (exists(stem + ending)) return stem + ending;
  }
  refuse(list + ": line " + std::to_string(name.line), "must name an image that is there", stem + ".jpg");
}

bool is_voc_masks(const std::string& folder, const std::vector<std::string>& names) {
  return has_name(names, "JPEGImages") && has_name(names, "SegmentationClass") && exists(folder + kLists + "train.txt");
}

SceneSets load_voc_masks(const std::string& folder) {
  SceneSets sets;
  sets.train = read_list(folder, folder + kLists + "train.txt");
  const std::string val = folder + kLists + "val.txt";
  if (!exists(val)) refuse(folder, "must hold ImageSets/Segmentation/val.txt beside train.txt", listed(names_in(folder + kLists)));
  sets.test = read_list(folder, val);
  sets.mean = {0.485f, 0.456f, 0.406f};  // of ImageNet, as torchvision's own recipes have them
  sets.deviation = {0.229f, 0.224f, 0.225f};
  return sets;
}

}  // namespace satchel
