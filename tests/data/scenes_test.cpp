#include "satchel/data/scenes.h"

#include <gtest/gtest.h>

#include <set>

#include "satchel/data/synthetic_shapes.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

uint64_t hash_of(const std::vector<uint8_t>& bytes, uint64_t hash = 14695981039346656037u) {  // FNV-1a
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

TEST(SyntheticShapes, TheSameForTheSameOptions) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=20,size=64,shapes=5,classes=4,seed=3", SceneTask::segmentation);
  EXPECT_EQ(sets.train.count * 100 + sets.test.count, 2004);
  EXPECT_EQ(sets.train.classes, 5);
  EXPECT_EQ(sets.train.class_names, (std::vector<std::string>{"ground", "disc", "square", "triangle", "ring"}));
  EXPECT_EQ(load_scenes("synthetic-shapes:classes=4", SceneTask::detection).train.classes, 4);
  const Scene a = scene_of(sets.train, 7), b = scene_of(sets.train, 7);
  EXPECT_EQ(a.image.pixels, b.image.pixels);
  EXPECT_EQ(a.objects, b.objects);
  // Test scenes go on where training scenes end.
  const SceneSets more = load_scenes("synthetic-shapes:count=24,size=64,shapes=5,classes=4,seed=3", SceneTask::segmentation);
  EXPECT_EQ(scene_of(sets.test, 3).image.pixels, scene_of(more.train, 23).image.pixels);
  EXPECT_NE(scene_of(sets.test, 0).image.pixels, scene_of(sets.train, 0).image.pixels);
  const SceneSets other = load_scenes("synthetic-shapes:count=20,size=64,shapes=5,classes=4,seed=4", SceneTask::segmentation);
  EXPECT_NE(scene_of(other.train, 7).image.pixels, a.image.pixels);
}

// Sums over whole numbers: another machine, compiler or library must give the same.
TEST(SyntheticShapes, BytesAreThoseOfEveryMachine) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=2,size=48", SceneTask::segmentation);
  const Scene a = scene_of(sets.train, 0), b = scene_of(sets.train, 1);
  EXPECT_EQ(hash_of(b.mask.classes, hash_of(b.image.pixels, hash_of(a.mask.classes, hash_of(a.image.pixels)))), 1088121435103230024u);
}

/// Every pixel of an object is its kind's in the mask, every edge of a box touches one, and all pixels of the mask lie in boxes.
TEST(SyntheticShapes, BoxesAreTheBoundsOfWhatIsSeen) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=60,size=96,shapes=8,classes=8", SceneTask::segmentation);
  std::set<int32_t> kinds;
  size_t most = 0;
  for (int64_t i = 0; i < sets.train.count; ++i) {
    const Scene scene = scene_of(sets.train, i);
    ASSERT_EQ(scene.mask.classes.size(), size_t{96} * 96);
    ASSERT_GE(scene.objects.size(), 1u);
    most = std::max(most, scene.objects.size());
    std::vector<bool> boxed(scene.mask.classes.size());
    for (const ObjectBox& box : scene.objects) {
      kinds.insert(box.label);
      ASSERT_TRUE(box.left >= 0 && box.top >= 0 && box.left < box.right && box.top < box.bottom && box.right <= 96 && box.bottom <= 96);
      const auto touches = [&](int64_t left, int64_t top, int64_t right, int64_t bottom) {
        for (int64_t y = top; y < bottom; ++y) {
          for (int64_t x = left; x < right; ++x) {
            if (scene.mask.classes[static_cast<size_t>(y * 96 + x)] == box.label + 1) return true;
          }
        }
        return false;
      };
      const auto l = static_cast<int64_t>(box.left), t = static_cast<int64_t>(box.top), r = static_cast<int64_t>(box.right),
                 b = static_cast<int64_t>(box.bottom);
      EXPECT_TRUE(touches(l, t, l + 1, b) && touches(r - 1, t, r, b) && touches(l, t, r, t + 1) && touches(l, b - 1, r, b)) << i;
      for (int64_t y = t; y < b; ++y) {
        for (int64_t x = l; x < r; ++x) boxed[static_cast<size_t>(y * 96 + x)] = true;
      }
    }
    for (size_t k = 0; k < boxed.size(); ++k) ASSERT_TRUE(boxed[k] || scene.mask.classes[k] == 0) << i;
  }
  EXPECT_EQ(kinds.size(), 8u);
  EXPECT_GE(most, 5u);
}

TEST(SyntheticShapes, BadOptions) {
  const auto error = [](const std::string& text) {
    return error_of([&] { load_scenes("synthetic-shapes:" + text, SceneTask::detection); });
  };
  EXPECT_EQ(error("size=31"), "[load] synthetic-shapes: size must be 32 to 4096, got 31");
  EXPECT_EQ(error("classes=9"), "[load] synthetic-shapes: classes must be 1 to 8, got 9");
  EXPECT_EQ(error("shapes"), "[load] synthetic-shapes: option must be name=value, got 'shapes'");
  EXPECT_EQ(error("shape=1"), "[load] synthetic-shapes: option must be count, size, shapes, classes, test or seed, got 'shape'");
  const SceneSets sets = load_scenes("synthetic-shapes:count=2", SceneTask::detection);
  EXPECT_EQ(error_of([&] { scene_of(sets.train, 2); }), "[load] scene must be 0 to 1, got 2");
}

}  // namespace
}  // namespace satchel
