// The layouts that load_scenes knows, one file each; scenes.cpp has their table. Private.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "satchel/data/scenes.h"

namespace satchel {

/// A layout of folders for a task. A layout of its own is a row of the table in scenes.cpp.
struct SceneLayout {
  SceneTask task;
  const char* wanted;                                                         // what a folder of it holds, for errors
  bool (*is)(const std::string& folder, const std::vector<std::string>& in);  // does a folder with these names (names_in) hold it?
  SceneSets (*load)(const std::string& folder);
};

/// Pascal VOC with SegmentationClass; Cityscapes with gtFine.
bool is_voc_masks(const std::string& folder, const std::vector<std::string>& names);
SceneSets load_voc_masks(const std::string& folder);
bool is_cityscapes(const std::string& folder, const std::vector<std::string>& names);
SceneSets load_cityscapes(const std::string& folder);

/// The 20 classes of Pascal VOC's objects, by name.
std::span<const char* const> voc_class_names();

/// The names in a list such as ImageSets/Main/train.txt, with their lines: the first word of each.
struct ListedName {
  std::string name;
  int64_t line = 0;  // from 1 on
};
std::vector<ListedName> listed_names(const std::string& path);
/// stem.jpg, stem.jpeg or stem.png, whichever is there; throws `[load] LIST: line 3 must name an image that is there, got STEM.jpg`.
std::string listed_image(const std::string& list, const ListedName& name, const std::string& stem);

/// Pascal VOC with Annotations; COCO.
bool is_voc_boxes(const std::string& folder, const std::vector<std::string>& names);
SceneSets load_voc_boxes(const std::string& folder);
bool is_coco(const std::string& folder, const std::vector<std::string>& names);
SceneSets load_coco(const std::string& folder);

}  // namespace satchel
