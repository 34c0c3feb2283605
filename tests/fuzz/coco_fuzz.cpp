#include <algorithm>

#include "satchel/data/scenes.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

void run(std::string_view input) {
  make_folder("annotations");
  make_folder("images");
  spill("images/a.jpg", "");
  spill("annotations/instances_train.json", input);
  const SceneSets sets = load_scenes(scratch(), SceneTask::detection);
  require(sets.train.count >= 1 && sets.train.objects.size() == sets.train.paths.size(), "every image has a list of objects");
  for (const auto& objects : sets.train.objects) {
    require(std::ranges::all_of(objects,
                                [&](const ObjectBox& o) {
                                  return o.left >= 0 && o.top >= 0 && o.right > o.left && o.bottom > o.top && o.label >= 0 &&
                                         o.label < sets.train.classes;
                                }),
            "boxes have an area, corners from 0 on and a class");
  }
}

std::vector<std::string> seeds() {
  return {
      R"({"images":[{"id":1,"file_name":"a.jpg","width":60,"height":70}],"annotations":[{"image_id":1,"category_id":3,"bbox":[1,2,3,4],)"
      R"("area":9,"iscrowd":0}],"categories":[{"id":3,"name":"car"}]})",
      "{}"};
}

}  // namespace satchel::fuzz
