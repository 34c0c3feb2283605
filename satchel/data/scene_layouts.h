// The layouts that load_scenes knows, one file each; scenes.cpp has their table. Private.
#pragma once

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

extern const SceneLayout kCoco, kVocBoxes;

}  // namespace satchel
