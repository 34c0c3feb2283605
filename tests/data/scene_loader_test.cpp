#include "satchel/data/scene_loader.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

std::vector<SceneBatch> epoch_of(const SceneData& data, SceneLoaderOptions options, int64_t epoch = 0, int threads = 2) {
  options.threads = threads;
  SceneLoader loader(data, options);
  loader.start(epoch);
  std::vector<SceneBatch> all;
  for (SceneBatch batch; loader.next(batch);) all.push_back(batch);
  return all;
}

SceneSets sets() { return load_scenes("synthetic-shapes:count=11,size=48,shapes=4", SceneTask::segmentation); }

TEST(SceneLoader, ThreadsChangeNothingAndEpochsDiffer) {
  const SceneSets data = sets();
  const SceneLoaderOptions options = scene_training_options(data, 4, 40, 9);
  const auto a = epoch_of(data.train, options, 3, 1), b = epoch_of(data.train, options, 3, 4), c = epoch_of(data.train, options, 4, 1);
  ASSERT_EQ(a.size(), 2u);  // 11 scenes, full batches of 4
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].images, b[i].images);
    EXPECT_EQ(a[i].masks, b[i].masks);
    EXPECT_EQ(a[i].objects, b[i].objects);
    EXPECT_NE(a[i].images, c[i].images);
    EXPECT_EQ(a[i].images.size(), size_t{4} * 3 * 40 * 40);
    EXPECT_EQ(a[i].masks.size(), size_t{4} * 40 * 40);
  }
}

TEST(SceneLoader, WholeScenesAreTheData) {
  const SceneSets data = sets();
  SceneLoaderOptions options = scene_testing_options(data, 4);
  options.multiple = 32;
  const auto all = epoch_of(data.test, options);
  ASSERT_EQ(all.size(), 1u);  // 2 of them
  const SceneBatch& batch = all[0];
  ASSERT_EQ(batch.height * 1000 + batch.width, 64064);
  for (size_t i = 0; i < 2; ++i) {
    const Scene scene = scene_of(data.test, batch.indices[i]);
    EXPECT_EQ(scene.objects, batch.objects[i]);
    EXPECT_EQ(batch.sizes[i].height, 48);
    for (size_t y = 0; y < 64; ++y) {
      for (size_t x = 0; x < 64; ++x) {
        const bool inside = y < 48 && x < 48;
        ASSERT_EQ(batch.masks[(i * 64 + y) * 64 + x], inside ? scene.mask.classes[y * 48 + x] : Mask::ignored);
        for (size_t c = 0; c < 3; ++c) {
          const float expected = inside ? (static_cast<float>(scene.image.pixels[(c * 48 + y) * 48 + x]) / 255 - 0.5f) / 0.25f : 0;
          ASSERT_EQ(batch.images[((i * 3 + c) * 64 + y) * 64 + x], expected);
        }
      }
    }
  }
}

// Image, mask and boxes go to the same places: where the mask says disc, its box is, and the ground's colour is not the disc's.
TEST(SceneLoader, MaskAndBoxesMoveWithTheImage) {
  const SceneSets data = sets();
  SceneLoaderOptions options = scene_training_options(data, 1, 64, 5);
  size_t flips = 0, padded = 0;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    for (const SceneBatch& batch : epoch_of(data.train, options, epoch)) {
      const SceneBatch::Size& size = batch.sizes[0];
      padded += size.height < 64 ? 1 : 0;
      for (size_t k = 0; k < batch.masks.size(); ++k) {
        const auto y = static_cast<int64_t>(k / 64), x = static_cast<int64_t>(k % 64);
        const bool inside = y < size.height && x < size.width;
        ASSERT_EQ(batch.masks[k] == Mask::ignored, !inside);
        if (!inside || batch.masks[k] == 0) continue;
        bool boxed = false;  // within half a pixel of a box of the class: nearest places against scaled corners
        for (const ObjectBox& box : batch.objects[0]) {
          const float px = static_cast<float>(x) + 0.5f, py = static_cast<float>(y) + 0.5f;
          boxed |= box.label + 1 == batch.masks[k] && px > box.left - 1 && px < box.right + 1 && py > box.top - 1 && py < box.bottom + 1;
        }
        ASSERT_TRUE(boxed) << x << ' ' << y;
      }
    }
  }
  EXPECT_GE(padded, 3u);  // scales below 64/48
  options.least_scale = options.most_scale = 1;
  options.size = 48;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    for (const SceneBatch& batch : epoch_of(data.train, options, epoch)) {
      const Scene scene = scene_of(data.train, batch.indices[0]);
      if (batch.masks == scene.mask.classes) continue;
      ++flips;
      for (size_t y = 0; y < 48; ++y) {
        for (size_t x = 0; x < 48; ++x) ASSERT_EQ(batch.masks[y * 48 + x], scene.mask.classes[y * 48 + 47 - x]);
      }
      const ObjectBox &own = scene.objects[0], &got = batch.objects[0][0];
      EXPECT_EQ(got, (ObjectBox{48 - own.right, own.top, 48 - own.left, own.bottom, own.label, false}));
    }
  }
  EXPECT_GT(flips, 10u);  // of 44, half of them
  EXPECT_LT(flips, 34u);
}

TEST(SceneLoader, ResizedToASideThatIsDrawn) {
  const SceneSets data = load_scenes("synthetic-shapes:count=12,size=48,shapes=4", SceneTask::detection);
  SceneLoaderOptions options = scene_testing_options(data, 1);
  options.view = SceneView::resized;
  options.sides = {24, 72, 200};
  options.longest = 96;
  options.masks = false;
  std::set<int64_t> seen;
  for (const SceneBatch& batch : epoch_of(data.train, options)) {
    seen.insert(batch.height);
    EXPECT_TRUE(batch.masks.empty());
    const Scene scene = scene_of(data.train, batch.indices[0]);
    const auto scale = static_cast<float>(batch.height) / 48;
    ASSERT_EQ(scene.objects.size(), batch.objects[0].size());
    EXPECT_NEAR(batch.objects[0][0].right, scene.objects[0].right * scale, 1e-3);  // float32 of at most 96: 4e-6
  }
  EXPECT_EQ(seen, (std::set<int64_t>{24, 72, 96}));
}

TEST(SceneLoader, BadOptions) {
  const SceneSets data = sets();
  SceneLoaderOptions options = scene_testing_options(data, 0);
  EXPECT_EQ(error_of([&] { SceneLoader(data.train, options); }), "[loader] batch must be 1 to 2147483647, got 0");
  options = scene_training_options(data, 4, 0, 0);
  EXPECT_EQ(error_of([&] { SceneLoader(data.train, options); }), "[loader] size must be 1 to 16384, got 0");
  options = scene_testing_options(data, 4);
  options.mean = {0.5f};
  EXPECT_EQ(error_of([&] { SceneLoader(data.train, options); }), "[loader] mean and deviation must have 3 numbers, got 1");
}

}  // namespace
}  // namespace satchel
